"""The memory of the training of a critic on one machine.

    rollout, reward, experience: as of a PPO update, of the policy alone
    fit             + a forward pass of the critic's trunk, its states, and their sums of squares
    train           + moments + activations of one micro-batch + the gradients so far
    step            + moments + all gradients
    evaluation      + moments + a forward pass of the critic

All of them hold the weights of all roles. A head on the policy's trunk is fitted, and not trained further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kedge.plan.machine import Part, Phase, Speed, merged
from kedge.plan.optimizer import ADAMW, PlannedOptimizer
from kedge.plan.ppo_memory import (
    PpoWork,
    rollout_bytes,
    sampling_flops,
    sampling_phases,
    train_phase,
)

__all__ = ["CriticWork", "critic_flops", "critic_phases", "kept_bytes"]

SUMS, PRODUCT, SOLVING = 2, 1, 6
"""Square matrices of the least-squares fit: the sums of both halves; one more while states are added; at the end, the
halves, their sum, and three of its covariance."""


@dataclass(frozen=True)
class CriticWork:
    """The sampling of some responses, and the training on as many.

    Attributes:
        sampling: The update of PPO that has these responses.
        role: The model that the critic is part of: critic, or policy.
        kept: Bytes of all sampled responses.
        fitted: These responses in units of a pass of the fit.
        passes: Of a training pass, over all epochs.
        steps: Optimizer steps on these responses.
        accumulates: Whether a step has several passes.
        optimizer: The optimizer.
    """

    sampling: PpoWork
    role: str
    kept: float
    fitted: float
    passes: float
    steps: float
    accumulates: bool
    optimizer: PlannedOptimizer = ADAMW


def critic_phases(figures: Mapping[str, float], work: CriticWork, speed: Speed | None = None) -> tuple[Phase, ...]:
    """The phases of the stage; times are of as many responses as are sampled together.

    Args:
        figures: As in `ppo_phases`; `fit.*` of the pass of the fit, `values.*` of an evaluation, `train.*` if the
            critic has a model of its own.
        work: The responses.
        speed: Of the machine; None for no times.
    """
    role = work.role
    weights = [Part(each, "weights", figures[f"{each}.weights"]) for each in work.sampling.roles]
    kept = Part("run", "rollout buffers", work.kept)
    moments = work.optimizer.held(figures, role)
    buffers = Part("run", "rollout buffers", rollout_bytes(work.sampling))
    sampling = sampling_phases(figures, work.sampling, [*weights, kept, buffers], speed)
    fit = max(_fit_options(figures, role), key=lambda parts: sum(part.bytes for part in parts))
    fitting = None if speed is None else speed.seconds(figures, "fit", work.fitted)
    phases = [*sampling, Phase("fit", merged([*weights, kept, *fit]), fitting)]
    held = [*weights, kept, moments]
    if "train.flops" in figures:
        seconds = None if speed is None else speed.seconds(figures, "train", work.passes)
        phases += [
            train_phase(figures, held, role=role, accumulates=work.accumulates, seconds=seconds),
            work.optimizer.step(figures, held, [role], speed, steps=work.steps),
        ]
    reading = Part(role, "activations", figures["values.peak"])
    return (*phases, Phase("evaluation", merged([*held, reading])))


def critic_flops(figures: Mapping[str, float], work: CriticWork) -> float:
    """The FLOPs of these responses' passes."""
    training = work.passes * figures.get("train.flops", 0.0)
    return sampling_flops(figures, work.sampling) + work.fitted * figures["fit.flops"] + training


def kept_bytes(prompt: int, response: int, rows: int) -> float:
    """Tables of kept responses: ids and masks of prompts; ids, three masks, a return and a zero of responses."""
    return rows * (9 * prompt + (8 + 3 + 4 + 4) * response)


def _fit_options(figures: Mapping[str, float], role: str) -> list[list[Part]]:
    """The pass over the trunk; adding the states of one half, in fp64, to its sums; and the solution at the end."""
    square, states = figures["fit.square"], figures["fit.kept"]
    return [
        [Part(role, "activations", figures["fit.peak"]), Part("run", "rollout buffers", SUMS * square)],
        [
            Part(role, "activations", states * (1 + 0.5 + 1)),  # all in fp32, and a half of them in fp32 and in fp64
            Part("run", "rollout buffers", (SUMS + PRODUCT) * square),
        ],
        [Part("run", "rollout buffers", SOLVING * square)],
    ]
