"""Advantages that compare the responses to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.advantages import (
    AdvantageInputs,
    Advantages,
    Need,
    required,
    reward_to_go,
    tokens_of,
    total_reward,
)
from kedge.algorithm.masking import check_counted, check_same_shape, keep_counted, rounding_of
from kedge_base.errors import ShapeError

Comparison = Callable[[Float[Tensor, "responses steps"], Bool[Tensor, "responses steps"]], Tensor]
"""Compares the numbers of one group: one row per response; float64."""


@dataclass(frozen=True)
class LeaveOneOutAdvantage:
    """A_i = S_i − mean of the other responses' S = G/(G−1)·(S_i − mean of all G).

    The baseline does not contain the response itself, so the gradient is unbiased.

    Source: RLOO (arXiv 2402.14740) §2.3; spec §9.
    """

    gamma: float = 1.0
    needs: ClassVar[Need | None] = "group"

    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        return _compared(rewards, mask, inputs, self.gamma, _less_others)


@dataclass(frozen=True)
class GroupMeanAdvantage:
    """A_i = S_i − mean of the group, divided by the group's standard deviation if `scale_by_std`.

    The standard deviation has Bessel's correction, as in every common implementation.

    Args:
        gamma: γ.
        scale_by_std: True is GRPO. False is Dr. GRPO, and with whitening over the batch REINFORCE++ with a baseline.

    Source: GRPO (arXiv 2402.03300) §4.1.2; Dr. GRPO (arXiv 2503.20783) §3.2; REINFORCE++ (arXiv 2501.03262 v9) eq. 6
        and 7; spec §9.
    """

    gamma: float = 1.0
    scale_by_std: bool = False
    needs: ClassVar[Need | None] = "group"

    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        return _compared(rewards, mask, inputs, self.gamma, _standardized if self.scale_by_std else _less_mean)


@dataclass(frozen=True)
class OptimalBaselineAdvantage:
    """A_i = S_i − Σ_j l_j·S_j / Σ_j l_j over the group, with l the response's length in tokens, stop token included.

    The baseline with the least variance if every token's gradient has the same norm and they are orthogonal.

    Source: OPO (arXiv 2505.23585); spec §9.
    """

    gamma: float = 1.0
    needs: ClassVar[Need | None] = "group"

    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        return _compared(rewards, mask, inputs, self.gamma, _less_mean, repeat_by_length=True)


@dataclass(frozen=True)
class BaselineAdvantage:
    """A = S − a score of the prompt: the greedy response's, or the running mean of `PromptMeans`.

    Source: ReMax (arXiv 2310.10505); spec §9. SPO (arXiv 2509.13232).
    """

    gamma: float = 1.0
    needs: ClassVar[Need | None] = "baseline"

    @torch.no_grad()
    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        baseline = required(inputs, "baseline")
        to_go = reward_to_go(rewards, mask, self.gamma)
        check_same_shape(baseline=baseline, mask_without_time=mask[:, 0])
        compared = total_reward(to_go, mask) - baseline.to(to_go.dtype).unsqueeze(-1)
        return Advantages(keep_counted(compared.expand_as(to_go), mask), to_go)


def decayed_mean(count: float, mean: float, scores: Sequence[float], *, decay: float) -> tuple[float, float]:
    """Count and mean of scores after further ones: n ← ρ·n + k, v ← v + Σ (S − v) / n.

    With one score at a time, n converges to 1/(1 − ρ) and the mean to an exponential moving average. With scores of 0
    and 1, the mean is that of a Beta distribution, α / (α + β), both of which decay by ρ before they are added to.

    Args:
        count: n, of the scores before, with their weights.
        mean: v.
        scores: k new scores S.
        decay: ρ in [0, 1].

    Source: SPO (arXiv 2509.13232), and its authors' recipe in verl.
    """
    count = decay * count + len(scores)
    return count, mean + math.fsum(score - mean for score in scores) / count


@dataclass(frozen=True)
class GroupInGroupAdvantage:
    """A_t = A_i + ω·A(G_t): GRPO's advantage of the episode, plus a turn's among turns from the same state.

    A_i is from the episode's undiscounted rewards. A(G_t) compares the discounted return from the turn on with those of
    all turns that started in the same state, in any episode of the prompt; it is 0 for a state with a single turn. Both
    are divided by their standard deviation.

    Args:
        gamma: γ per turn, of the returns from a turn on.
        step_weight: ω.

    Source: GiGPO (arXiv 2505.10978) eq. 3 to 8; spec §9.
    """

    gamma: float
    step_weight: float = 1.0
    needs: ClassVar[Need | None] = "group"

    @torch.no_grad()
    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        states = inputs.get("states")
        if states is None:
            raise ShapeError("the advantage needs states, got None; number the states in which turns begin")
        episode = GroupMeanAdvantage(scale_by_std=True)(rewards, mask, **inputs).advantages
        to_go = reward_to_go(rewards, mask, self.gamma)
        steps = mask & tokens_of(mask, inputs)
        _, place, visits = cast(
            "tuple[Tensor, Tensor, Tensor]",
            states[steps].unique(return_inverse=True, return_counts=True),  # pyright: ignore[reportUnknownMemberType]
        )
        steps = steps.masked_scatter(steps, visits[place] > 1)
        returns = to_go[steps].unsqueeze(-1)
        compared = torch.zeros_like(to_go)
        if returns.numel():
            every = torch.ones_like(returns, dtype=torch.bool)
            compared[steps] = _by_group(returns, every, states[steps], _standardized).to(rewards).squeeze(-1)
        return Advantages(episode + self.step_weight * compared, to_go)


@dataclass(frozen=True)
class ProcessAdvantage:
    """For rewards per token: A_t = Σ_{k≥t} r̃_k, with each token's reward r̃ compared with the group's first.

    r̃ = r − mean over the group's tokens (÷ their standard deviation), or − mean of the other responses' mean rewards

    Every token is a step, and γ = 1. Added to the advantage of the rest of the reward. With sparse rewards, A_t also
    depends on the number of remaining tokens, because each of them subtracts the mean.

    Args:
        leave_one_out: compare with the other responses only; each counts once, at any length.
        scale_by_std: divide by the standard deviation.

    Source: GRPO (arXiv 2402.03300) §4.1.3; leave one out: PRIME (arXiv 2502.01456); spec §9.
    """

    leave_one_out: bool = False
    scale_by_std: bool = False
    needs: ClassVar[Need | None] = "group"

    @torch.no_grad()
    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        check_counted(mask, rewards=rewards)
        comparison = _standardized if self.scale_by_std else _less_others if self.leave_one_out else _less_mean
        compared = _by_group(keep_counted(rewards, mask), mask, required(inputs, "group"), comparison).to(rewards)
        return Advantages(reward_to_go(compared, mask, 1.0), reward_to_go(rewards, mask, 1.0))


@torch.no_grad()
def _compared(
    rewards: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    inputs: AdvantageInputs,
    gamma: float,
    comparison: Comparison,
    *,
    repeat_by_length: bool = False,
) -> Advantages:
    """Compute advantages from one total per response; with `repeat_by_length`, each total counts once per token."""
    to_go = reward_to_go(rewards, mask, gamma)
    totals = total_reward(to_go, mask)
    counted = mask.any(-1, keepdim=True)
    if repeat_by_length:
        totals = totals.expand_as(mask)
        counted = tokens_of(mask, inputs)
    compared = _by_group(totals, counted, required(inputs, "group"), comparison).to(rewards)
    return Advantages(keep_counted(compared.expand_as(to_go), mask), to_go)


def _by_group(
    numbers: Float[Tensor, "batch steps"],
    mask: Bool[Tensor, "batch steps"],
    group: Int[Tensor, " batch"],
    comparison: Comparison,
) -> Float[Tensor, "batch steps"]:
    """Compare the numbers of each group, in float64; 0 if they differ only by rounding, or the group has one row."""
    check_same_shape(group=group, mask_without_steps=mask[:, 0])
    values = numbers.cpu().double()
    counted = mask.cpu()
    groups = group.cpu()
    compared = torch.zeros_like(values)
    for number in cast(Tensor, groups.unique()):  # pyright: ignore[reportUnknownMemberType]
        rows = groups == number
        known = values[rows][counted[rows]]
        are_several = int(counted[rows].any(-1).sum()) > 1
        if are_several and known.max() - known.min() > rounding_of(known.abs().max(), numbers.dtype):
            compared[rows] = keep_counted(comparison(values[rows], counted[rows]), counted[rows])
    return compared


def _less_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values - values[mask].mean()


def _standardized(values: Tensor, mask: Tensor) -> Tensor:
    return _less_mean(values, mask) / values[mask].std(correction=1)


def _less_others(values: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean of the other counted rows' means; there is at least one such row."""
    means = keep_counted(values, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return values - (means.sum() - means) / (mask.any(-1).sum() - 1)
