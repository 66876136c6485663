"""What becomes of figures that must not be learnt from: NaN, infinity, and what is far out of the ordinary."""

from typing import Literal

from kedge.config.schema.field import Section, knob

__all__ = ["PpoGuard"]

Policy = Literal["stop", "skip", "rollback"]


class PpoGuard(Section):
    """A step with such figures is never taken. `incidents.jsonl` says what they were, and of which response."""

    on_nonfinite: Policy = knob(
        "stop",
        meaning="When a score, log probability, value, loss or gradient is NaN or infinite: stop; skip, which leaves "
        "the rest of the update out; or rollback, which also goes back to the newest checkpoint's weights.",
        source="kedge: what is wrong should be seen",
    )
    on_spike: Policy = knob(
        "skip",
        meaning="The same for a spike of the gradient norm or the loss; see spike_sigma.",
        source="kedge: one odd batch is no reason to stop. Rollback is what PaLM did, by hand",
    )
    spike_sigma: float | None = knob(
        None,
        gt=0,
        meaning="How many standard deviations above the run's own recent median make a spike; null watches for none. "
        "The gradient norm is compared by its logarithm, the loss as it is.",
        source="kedge: off in the papers, which clip the gradient; 8 is what no healthy run reaches",
        too_high="only a collapse counts as a spike",
        too_low="steps that are merely large are left out",
    )
    spike_history: int = knob(
        40,
        ge=2,
        meaning="Optimiser steps that are the recent past; before there are as many, nothing counts as a spike.",
        source="kedge: ten updates of four steps",
        too_high="the run is compared with what it was long ago, and the start is watched late",
        too_low="chance decides what is ordinary",
    )
    max_skips: int = knob(
        3,
        ge=0,
        meaning="Updates in a row of which something may be left out, by skip or rollback; one more ends the run.",
        source="kedge: what happens four times in a row is no accident",
        too_high="a broken run burns hours without learning",
        too_low="two accidents in a row end the run",
    )
