"""The memory of a step of supervised training on one machine: fine-tuning, or a reward model.

train     weights + moments + activations of one micro-batch + its logits + the gradients so far
step      weights + moments + gradients
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kedge.plan.machine import Part, Phase, Speed
from kedge.plan.optimizer import ADAMW, PlannedOptimizer
from kedge.plan.ppo_memory import train_phase

__all__ = ["SupervisedWork", "supervised_phases"]


@dataclass(frozen=True)
class SupervisedWork:
    """One optimizer step.

    Attributes:
        role: The model that is trained.
        passes: Micro-batches, in units of the largest.
        accumulates: Whether there are several.
        optimizer: The optimizer.
    """

    role: str
    passes: float
    accumulates: bool
    optimizer: PlannedOptimizer = ADAMW


def supervised_phases(
    figures: Mapping[str, float], work: SupervisedWork, speed: Speed | None = None
) -> tuple[Phase, ...]:
    """The phases of a step after the first; figures as in `ppo_phases`."""
    role = work.role
    held = [Part(role, "weights", figures[f"{role}.weights"]), work.optimizer.held(figures, role)]
    seconds = None if speed is None else speed.seconds(figures, "train", work.passes)
    train = train_phase(figures, held, role=role, accumulates=work.accumulates, seconds=seconds)
    return (train, work.optimizer.step(figures, held, [role], speed))
