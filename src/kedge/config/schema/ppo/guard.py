"""How PPO handles non-finite values and spikes."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Group

__all__ = ["GuardConfig"]

Reaction = Literal["stop", "skip", "rollback"]


class GuardConfig(Group):
    """A step with such values is never taken. `incidents.jsonl` records them, and the response they came from."""

    on_nonfinite: Reaction = field(
        "stop",
        meaning="On a NaN or infinite score, logprob, value, loss or gradient: stop the run; skip the rest of the "
        "update; or rollback, which also restores the weights of the newest checkpoint.",
        source="kedge: a fault should be seen",
    )
    on_spike: Reaction = field(
        "skip",
        meaning="The same for a spike of the gradient norm or the loss; see spike_sigma.",
        source="kedge: one bad batch should not end a run. PaLM rolled back, by hand",
    )
    spike_sigma: float | None = field(
        None,
        gt=0,
        meaning="Standard deviations above the run's recent median that count as a spike; null disables it. The "
        "gradient norm is compared on a log scale, the loss on a linear one.",
        source="kedge: off, as in the papers, which clip the gradient. No healthy run reaches 8",
        too_high="only a collapse counts as a spike",
        too_low="steps that are merely large are skipped",
    )
    spike_history: int = field(
        40,
        ge=2,
        meaning="Optimizer steps that the recent median covers; until there are as many, nothing counts as a spike. "
        "Counted anew from the end of ppo.value_warmup_updates.",
        source="kedge: ten updates of four steps",
        too_high="the run is compared with its distant past, and spikes early in the run go unnoticed",
        too_low="the median and its spread are mostly noise",
    )
    max_skips: int = field(
        3,
        ge=0,
        meaning="Updates in a row that may be skipped or rolled back; one more ends the run.",
        source="kedge: four in a row are not an accident",
        too_high="a broken run continues for hours without learning",
        too_low="two bad batches in a row end the run",
    )
