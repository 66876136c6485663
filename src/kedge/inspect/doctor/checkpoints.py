"""Advice to go back to an earlier policy: a checkpoint that exists, or the fields that keep one next time."""

from __future__ import annotations

from kedge.inspect.doctor.trends import Series
from kedge.inspect.record import RunRecord
from kedge.system.output import best_checkpoint, kept_checkpoints

__all__ = ["earlier_policy"]

NUM_EVALUATIONS = 10
"""Evaluations over a run that are enough to find one near its best update."""


def earlier_policy(run: RunRecord, name: str, quality: Series) -> str:
    """How to get the policy of an earlier update.

    Names the kept checkpoint at which the quality was highest, if that is closer to the peak than to the end.

    Args:
        run: The run.
        name: The metric whose peak has been passed; higher is better. `eval/…` is measured after the update, others
            on the responses that the update was made with.
        quality: Its values.
    """
    held_out = name.startswith("eval/")
    # An update's responses are sampled before its steps, by the policy that the update before it left.
    shift = 0 if held_out else 1
    values = {update - shift: value for update, value in zip(quality.updates, quality.values, strict=True)}
    values[quality.updates[-1]] = quality.values[-1]
    kept = [update for update in kept_checkpoints(run.folder) if update in values]
    nearest = max(kept, key=lambda update: values[update], default=None)
    if nearest is None or values[nearest] < (max(quality.values) + quality.values[-1]) / 2:
        every = max(1, max(quality.updates) // NUM_EVALUATIONS)
        return (
            f"no checkpoint near update {quality.argmax} was kept: ppo.eval_every={every} with "
            f"checkpoint.keep_best={name if held_out else f'eval/{name}'} keeps the best one of the next run"
        )
    which = "best" if nearest == best_checkpoint(run.folder) else str(nearest)
    return f"use the policy after update {nearest}: --model {run.folder}@{which}"
