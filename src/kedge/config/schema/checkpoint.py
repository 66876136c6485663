"""`checkpoint`: how often a run saves itself, so that `--resume` can continue it."""

from kedge.config.schema.field import Section, knob

__all__ = ["Checkpointing"]


class Checkpointing(Section):
    """A run that was killed loses what came after its last checkpoint. When one is saved changes no result."""

    every: int | None = knob(
        None,
        ge=1,
        meaning="Updates (optimiser steps of the supervised stages) from one checkpoint to the next; null: only time.",
        source="kedge: an update takes between milliseconds and minutes, so a number would suit few",
        too_high="a killed run loses many updates",
        too_low="the run spends its time on writing",
    )
    every_minutes: float | None = knob(
        10.0,
        gt=0,
        meaning="Minutes from one checkpoint to the next, beside `every`; null: only updates count.",
        source="kedge: a save of seconds then costs about one per cent, and a killed run loses ten minutes at most",
        too_high="a killed run loses hours",
        too_low="the run spends its time on writing",
    )
    keep: int = knob(
        2,
        ge=1,
        meaning="Newest checkpoints that stay; each is about three times as large as the weights that are trained.",
        source="kedge: where the disk damages one, the one before is left",
        too_high="the disk fills up",
        too_low="1 leaves nothing to go back to where the disk damages it",
    )
