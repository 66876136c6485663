"""`ppo`: what happens on non-finite values and spikes."""

from typing import Annotated, Literal

from annotated_types import Gt

from kedge.config.schema.field import Choice, field
from kedge.config.schema.section import Section

Reaction = Literal["stop", "skip", "rollback"]


class Guard(Section):
    """Non-finite values and spikes."""

    on_nonfinite: Reaction = "stop"
    """On a NaN or infinite score, logprob, value, loss or gradient: stop the run; skip the rest of the update; or
    rollback, which also restores the weights of the newest checkpoint.

    Source: kedge: a fault should be seen
    """
    on_spike: Choice[Reaction, Reaction, Annotated[float, Gt(0)]] | None = field(None)
    """The same for a spike of the gradient norm or the loss: {skip: 6} is 6 standard deviations above the run's recent
    median, and skip alone is 8; null for none. The gradient norm is compared on a log scale, the loss on a linear one.

    Source: kedge: off, as in the papers, which clip the gradient. No healthy run reaches 8. PaLM rolled back, by hand
    """
    max_skips: int = field(3, ge=0)
    """Updates in a row that may be skipped or rolled back; one more ends the run.

    Source: kedge: four in a row are not an accident
    Too high: a broken run continues for hours without learning
    Too low: two bad batches in a row end the run
    """
