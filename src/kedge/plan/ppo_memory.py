"""The memory of a PPO update on one machine: sums of what kedge keeps alive in each phase.

held always     weights of all roles; the optimizer's moments; the rollout and its experience
rollout         + key–value cache + logits of one token per row
reward          + the forward pass of the reward model
experience      + the forward passes of policy, critic and reference
train           + activations of one micro-batch + its logits + the gradients so far
step            + all gradients, which are freed at the end of the update
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kedge.plan.machine import Part, Phase, Speed, merged
from kedge.plan.optimizer import ADAMW, PlannedOptimizer

__all__ = [
    "PpoWork",
    "cache_columns",
    "flops_of",
    "ppo_phases",
    "rollout_bytes",
    "sampling_flops",
    "sampling_phases",
    "train_phase",
]

MIN_GROWTH = 32
"""Columns by which the key–value cache grows at least."""

FP32 = 4


@dataclass(frozen=True)
class PpoWork:
    """One update.

    Attributes:
        roles: All of them; those that are trained hold gradients and moments.
        prompt: Tokens of the longest prompt.
        response: Tokens of the longest response.
        rows: Responses.
        sampled: Responses that are sampled at a time.
        epochs: As `ppo.num_epochs`.
        minibatches: As `ppo.num_minibatches`.
        passes: Micro-batches in an epoch, in units of the largest.
        scored: The same of all responses in passes without gradients.
        accumulates: Whether a step adds up the gradients of several micro-batches.
        reuses_pass: Whether the first forward pass of the epochs also gives the old log probabilities.
        optimizer: The optimizer.
    """

    roles: tuple[str, ...]
    prompt: int
    response: int
    rows: int
    sampled: int
    epochs: int
    minibatches: int
    passes: float
    scored: float
    accumulates: bool
    reuses_pass: bool
    optimizer: PlannedOptimizer = ADAMW


def ppo_phases(figures: Mapping[str, float], work: PpoWork, speed: Speed | None = None) -> tuple[Phase, ...]:
    """The phases of an update after the first.

    Args:
        figures: Of each role `ROLE.weights` and `ROLE.trained`, bytes; of each pass its peak above these and its work.
        work: The update.
        speed: Of the machine; None for no times.
    """
    held = [*_held(figures, work)]
    phases = [*sampling_phases(figures, work, held, speed), _train(figures, work, speed, held)]
    step = work.optimizer.step(figures, held, work.roles, speed, steps=work.epochs * work.minibatches)
    return (*phases, step)


def sampling_phases(
    figures: Mapping[str, float], work: PpoWork, held: list[Part], speed: Speed | None = None
) -> Iterator[Phase]:
    """The phases before the epochs: sampling, scoring if a reward model does, and collecting experience.

    Args:
        figures: As in `ppo_phases`.
        work: The update.
        held: What is held besides.
        speed: Of the machine; None for no times.
    """
    yield Phase("rollout", merged([*held, *_rollout(figures, work)]), _rollout_seconds(figures, work, speed))
    rewards = [role for role in work.roles if role.startswith("reward")]
    if rewards:
        most = max(rewards, key=lambda role: figures[f"{role} pass.peak"])
        passes = [Part(most, "activations", figures[f"{most} pass.peak"])]
        seconds = (
            None if speed is None else sum(speed.seconds(figures, f"{role} pass", work.scored) for role in rewards)
        )
        yield Phase("reward", merged([*held, *passes]), seconds)
    yield _experience(figures, work, speed, held)


def sampling_flops(figures: Mapping[str, float], work: PpoWork) -> float:
    """The FLOPs of the phases before the epochs."""
    steps = max(0, work.response - 1)
    sampling = figures["prefill.flops"] + (steps + 1) * figures["draw.flops"] + steps * figures["decode.flops"]
    passes = [name for name in figures if name.endswith(" pass.flops")]
    scored = sum(figures[name] for name in passes if not (work.reuses_pass and name == "old pass.flops"))
    return work.rows / work.sampled * sampling + work.scored * scored


def flops_of(figures: Mapping[str, float], work: PpoWork) -> float:
    """The FLOPs of an update's passes."""
    return sampling_flops(figures, work) + work.epochs * work.passes * figures["train.flops"]


def rollout_bytes(work: PpoWork) -> float:
    """Tables of the rollout and its experience: ids and masks of prompts; numbers, ids and masks of responses.

    A response's slot has its id (8 bytes), 3 masks, 7 numbers in fp32 (log probabilities of the sampler and the
    reference, value, reward, advantage, return, draw in fp64), and two more per epoch.
    """
    return work.rows * (9 * work.prompt + (8 + 3 + 8 * FP32 + 2 * FP32 * work.epochs) * work.response)


def cache_columns(prompt: int, response: int) -> tuple[int, int]:
    """Columns of the key–value cache after the prompt, and at the end: it grows by half, and by at least 32."""
    most = prompt + response
    first = columns = min(prompt + MIN_GROWTH, most)
    while columns < most - 1:  # the last token is never read
        columns = min(columns + max(MIN_GROWTH, columns // 2), most)
    return first, columns


def _held(figures: Mapping[str, float], work: PpoWork) -> Iterator[Part]:
    for role in work.roles:
        yield Part(role, "weights", figures[f"{role}.weights"])
        yield work.optimizer.held(figures, role)
    yield Part("run", "rollout buffers", rollout_bytes(work))


def _rollout(figures: Mapping[str, float], work: PpoWork) -> list[Part]:
    """The larger of reading the prompts and of the last tokens; one layer's keys exist twice while the cache grows."""
    first, last = cache_columns(work.prompt, work.response)
    cache = figures["prefill.cache"] * last / first
    copies = figures["prefill.kept"] - figures["prefill.cache"]
    growing = figures["prefill.layer cache"] / 2 if last > first else 0.0
    logits = max(figures["draw.peak"], figures["decode.peak"])
    ending = [
        Part("policy", "key–value cache", cache + growing),
        Part("policy", "activations", copies),
        Part("policy", "logits", logits),
    ]
    reading = [Part("policy", "activations", figures["prefill.peak"])]
    return max((ending, reading), key=lambda parts: sum(part.bytes for part in parts))


def _rollout_seconds(figures: Mapping[str, float], work: PpoWork, speed: Speed | None) -> float | None:
    if speed is None:
        return None
    steps, batches = work.response - 1, work.rows / work.sampled
    first = cache_columns(work.prompt, work.response)[0]
    # A step reads the cache so far: on average that of half of the response.
    read = figures["prefill.cache"] / first * (work.prompt + work.response / 2) / speed.bandwidth
    once = speed.seconds(figures, "prefill") + (steps + 1) * speed.seconds(figures, "draw")
    return batches * (once + steps * (speed.seconds(figures, "decode") + read))


def _experience(figures: Mapping[str, float], work: PpoWork, speed: Speed | None, held: list[Part]) -> Phase:
    """Passes without gradients; or the first pass of the epochs, whose activations stay during the others."""
    names = ("reference",) if work.reuses_pass else ("old", "reference")
    passes = [name for name in names if f"{name} pass.peak" in figures]
    roles = {"old": "policy", "reference": "reference"}
    options = [[Part(roles[name], "activations", figures[f"{name} pass.peak"])] for name in passes]
    seconds = None if speed is None else sum(speed.seconds(figures, f"{name} pass", work.scored) for name in passes)
    if work.reuses_pass:
        trunk = Part("policy", "activations", figures["train.trunk"])
        saved = [trunk, Part("policy", "logits", figures["train.saved"] - figures["train.trunk"])]
        forward = [trunk, Part("policy", "logits", figures["train.forward"] - figures["train.trunk"])]
        options = [forward, *([*saved, *option] for option in options), saved]
    most = max(options, key=lambda parts: sum(part.bytes for part in parts), default=[])
    return Phase("experience", merged([*held, *most]), seconds)


def train_phase(
    figures: Mapping[str, float], held: list[Part], *, role: str, accumulates: bool, seconds: float | None
) -> Phase:
    """The part of the backward pass with the highest peak, with new gradients or with some that are added to.

    Args:
        figures: As in `ppo_phases`.
        held: What is held besides.
        role: The model that is trained.
        accumulates: Whether a step adds up the gradients of several micro-batches.
        seconds: Of the phase.
    """
    options = [_backward(figures, role, "fresh", number, 0.0) for number in _parts(figures, "fresh")]
    if accumulates:
        earlier = figures["train.gradients"]
        options += [_backward(figures, role, "again", number, earlier) for number in _parts(figures, "again")]
    most = max(options, key=lambda parts: sum(part.bytes for part in parts))
    return Phase("train", merged([*held, *most]), seconds)


def _parts(figures: Mapping[str, float], name: str) -> range:
    return range(sum(f"train.{name}.{number}.peak" in figures for number in range(4)))


def _train(figures: Mapping[str, float], work: PpoWork, speed: Speed | None, held: list[Part]) -> Phase:
    seconds = None if speed is None else speed.seconds(figures, "train", work.epochs * work.passes)
    return train_phase(figures, held, role="policy", accumulates=work.accumulates, seconds=seconds)


def _backward(figures: Mapping[str, float], role: str, name: str, number: int, earlier: float) -> list[Part]:
    peak, fresh = figures[f"train.{name}.{number}.peak"], figures[f"train.{name}.{number}.gradients"]
    # The first part begins with the logits; later, only blocks are left.
    trunk = min(figures["train.trunk"], peak - fresh) if number == 0 else peak - fresh
    return [
        Part(role, "gradients", fresh + earlier),
        Part(role, "activations", trunk),
        Part(role, "logits", peak - fresh - trunk),
    ]
