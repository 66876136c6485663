"""Critic-free advantages, with a critic's change of value as a control variate whose weight is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.advantages import (
    AdvantageInputs,
    Advantages,
    GeneralizedAdvantage,
    Need,
    RewardToGo,
    required,
    total_reward,
)
from kedge.algorithm.group_advantages import LeaveOneOutAdvantage
from kedge.algorithm.masking import in_float64, keep_counted

NUM_QUARTERS = 4
"""Parts of the prompts: two for the weight of the other two, one to fit it and one to test it."""

ROUNDING = 1e-12
"""Share of the mean squares below which the variance of a change of value is only rounding."""


@dataclass(frozen=True)
class ControlVariateAdvantage:
    """A_t = B_t − w·C_t: an advantage B without a critic, and a critic's change of value C as a control variate.

        C_t = R_t − GAE_t − V_0,    which is V_t − V_0 with λ = 1

    B is the return R minus the mean return of the prompt's other responses; or R itself, so that whitening subtracts
    the batch's mean, and V_0 is then the batch's mean. The weight w in [0, 1] is the one that lowers the variance of A
    most. Each half of the prompts gets the weight fitted on the other half, or 0 if weights fitted on one part of that
    half do not lower the variance on its other part. With w = 0, A is bit-identical to B. With λ = γ = 1 the gradient
    is unbiased for any critic that has not been trained on these responses: neither w nor C_t depends on the action at
    t or on what follows.

    Args:
        base: B.
        critic: GAE, with the critic's targets.

    Source: control variates: Greensmith et al. 2004 §4; the fusion of a value with a group's mean: V0.5 (arXiv
        2603.10848).
    """

    base: LeaveOneOutAdvantage | RewardToGo
    critic: GeneralizedAdvantage
    needs: ClassVar[Need | None] = "values"

    @torch.no_grad()
    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        base, change, weights, targets = self._parts(rewards, mask, inputs)
        return Advantages(keep_counted(base - weights * change, mask), targets)

    @torch.no_grad()
    def metrics(
        self, rewards: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], **inputs: Unpack[AdvantageInputs]
    ) -> dict[str, float]:
        """The mean of w, and the share of B's variance that it removes, before any whitening."""
        base, change, weights, _ = self._parts(rewards, mask, inputs)
        plain, left = (in_float64(each[mask]).var(correction=0) for each in (base, base - weights * change))
        saved = 1.0 - float(left / plain) if plain > 0 else 0.0
        return {"advantage/critic_weight": float(weights.mean()), "advantage/variance_saved": saved}

    def _parts(self, rewards: Tensor, mask: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """B, C, w by row, and the critic's targets."""
        values = required(inputs, "values")
        base, to_go = self.base(rewards, mask, **inputs)
        estimated, targets = self.critic(rewards, mask, **inputs)
        first = values.gather(-1, mask.int().argmax(-1, keepdim=True))
        if self.base.needs == "group":
            prompts = required(inputs, "group")
            change = total_reward(to_go, mask) - estimated - first
        else:  # B does not compare responses: each counts as a separate prompt
            prompts = torch.arange(len(rewards), device=rewards.device)
            change = to_go - estimated - first[mask.any(-1)].mean()
        return base, change, control_weights(base, change, mask, prompts).to(base).unsqueeze(-1), targets


def control_weights(
    base: Float[Tensor, "batch time"],
    change: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """The weight of each row's control variate, fitted on other prompts; 0 if it does not generalize.

    Args:
        base: the estimate whose variance is reduced.
        change: the control variate.
        mask: True = counts; each counted slot has the same weight.
        group: number of each row's prompt. Prompts are divided in the order of their first rows.

    Returns:
        Weights in [0, 1], float64, on the CPU.
    """
    groups = cast("list[int]", group.tolist())  # pyright: ignore[reportUnknownMemberType]
    order = {number: place for place, number in enumerate(dict.fromkeys(groups))}
    quarters = torch.tensor([order[number] % NUM_QUARTERS for number in groups])
    sums = torch.zeros(NUM_QUARTERS, 6, dtype=torch.float64)
    x, c, counted = (each.cpu().double() for each in (base, change, mask))
    rows = torch.stack([(counted * each).sum(-1) for each in (torch.ones_like(x), x, c, x * x, x * c, c * c)], dim=-1)
    sums.index_add_(0, quarters, rows)
    # Each half's weight is fitted on the other: on quarters 2 and 3 for the first half, on 0 and 1 for the second.
    halves = [_tested_weight(sums[2 - half * 2 : 4 - half * 2]) for half in (0, 1)]
    return torch.tensor(halves, dtype=torch.float64)[quarters // 2]


def _tested_weight(parts: Float[Tensor, "2 6"]) -> float:
    """The weight fitted on both parts, or 0 if fitting on one and testing on the other does not reduce the variance."""
    saved = sum(_saved(tested, _weight(fitted)) for fitted, tested in (parts, parts.flip(0)))
    return _weight(parts.sum(0)) if saved > 0 else 0.0


def _weight(sums: Float[Tensor, " 6"]) -> float:
    _, covariance, variance = _moments(sums)
    return min(max(covariance / variance, 0.0), 1.0) if variance > 0 else 0.0


def _saved(sums: Float[Tensor, " 6"], weight: float) -> float:
    """The reduction of the sum of squares around the mean by subtracting the weighted change."""
    number, covariance, variance = _moments(sums)
    return number * weight * (2 * covariance - weight * variance)


def _moments(sums: Float[Tensor, " 6"]) -> tuple[float, float, float]:
    """The number of slots, and the change's covariance with the base and variance; 0 for fewer than two slots."""
    number, x, c, xx, xc, cc = cast("list[float]", sums.tolist())  # pyright: ignore[reportUnknownMemberType]
    if number < 2:
        return 0.0, 0.0, 0.0
    variance = cc / number - (c / number) ** 2
    return number, xc / number - x * c / number**2, variance if variance * number > ROUNDING * (xx + cc) else 0.0
