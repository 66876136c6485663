"""Generalized advantage estimation: the recursion behind every estimator, and VAPO's λ per response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kedge.algorithm.checks import check_counted, check_positive, check_same_shape, check_share
from kedge.algorithm.masking import keep_counted

__all__ = ["Advantages", "LengthAdaptiveLambda", "generalized_advantages"]


class Advantages(NamedTuple):
    """Advantages for the policy loss, and returns for the value loss."""

    advantages: Float[Tensor, "*batch time"]
    returns: Float[Tensor, "*batch time"]


@torch.no_grad()
def generalized_advantages(
    rewards: Float[Tensor, "*batch time"],
    values: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    gamma: float,
    gae_lambda: float | Float[Tensor, "*batch"],
    bootstrap_values: Float[Tensor, "*batch"] | None = None,
) -> Advantages:
    """Generalized advantage estimation.

    δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1},   returns_t = A_t + V_t

    The next step is the next *counted* one: masked steps within a row, such as a tool's output, are skipped.
    The returns keep the rewards' scale. Whiten the advantages only afterwards: returns computed from whitened
    advantages would train the critic on a quantity unrelated to the rewards.

    Args:
        rewards: one number per step.
        values: V_t, the critic's value of the state before step t.
        mask: True = counts; one row is one episode.
        gamma: discount γ in [0, 1].
        gae_lambda: λ in [0, 1], for all rows or per row: 0 is the TD residual (bias), 1 the Monte Carlo return − V
            (variance).
        bootstrap_values: value of the state after each row's last counted step, for an episode truncated by a time
            limit; 0 by default, the value after a terminal step.

    Returns:
        `.advantages` and `.returns`, 0 in masked slots. No gradient.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: when γ or λ is outside [0, 1].

    Source: GAE eq. 16; PPO eq. 11–12; spec §6.25.
    """
    check_share(gamma=gamma)
    check_counted(mask, rewards=rewards, values=values)
    check_same_shape(bootstrap_values=bootstrap_values, mask_without_time=mask[..., 0])
    if isinstance(gae_lambda, Tensor):
        check_same_shape(gae_lambda=gae_lambda, mask_without_time=mask[..., 0])
        check_share(smallest_gae_lambda=float(gae_lambda.min()), largest_gae_lambda=float(gae_lambda.max()))
    else:
        check_share(gae_lambda=gae_lambda)
    after_row = torch.zeros_like(values[..., 0]) if bootstrap_values is None else bootstrap_values
    residuals = rewards + gamma * _next_values(values, mask, after_row) - values
    decay = gamma * gae_lambda.unsqueeze(-1) if isinstance(gae_lambda, Tensor) else gamma * gae_lambda
    # A masked step passes on what comes behind it, 0 + 1·A, so that the loop over time has two operations.
    residuals = torch.where(mask, residuals, 0.0)
    decays = torch.where(mask, decay, torch.ones_like(residuals))
    carried = torch.zeros_like(after_row)
    columns: list[Tensor] = []
    for residual, factor in zip(reversed(residuals.unbind(-1)), reversed(decays.unbind(-1)), strict=True):
        carried = residual + factor * carried
        columns.append(carried)
    advantages = keep_counted(torch.stack(columns[::-1], dim=-1), mask)
    return Advantages(advantages=advantages, returns=keep_counted(advantages + values, mask))


def _next_values(
    values: Float[Tensor, "*batch time"], mask: Bool[Tensor, "*batch time"], after_row: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch time"]:
    """V of the next counted step; behind the last one, `after_row`."""
    length = mask.shape[-1]
    places = torch.arange(1, length, device=mask.device).expand(mask[..., 1:].shape)
    following = torch.where(mask[..., 1:], places, length).flip(-1).cummin(-1).values.flip(-1)
    last = torch.full_like(mask[..., :1], length, dtype=torch.long)
    return torch.cat([values, after_row.unsqueeze(-1)], -1).gather(-1, torch.cat([following, last], -1))


@dataclass(frozen=True)
class LengthAdaptiveLambda:
    """λ = 1 − 1/(α·l) for a response of l tokens, clamped to [0, 1].

    The coefficients λᵏ of GAE then sum to α·l: the estimate reaches over the same share of every response. Up to
    l = 1/α tokens the formula is not positive; λ is then 0, the TD residual.

    Args:
        alpha: α > 0; VAPO uses 0.05.

    Source: VAPO (arXiv 2504.05118) eq. 4 and 5; α: §5.1; spec §6.25, §9.
    """

    alpha: float

    def __call__(
        self, mask: Bool[Tensor, "*batch time"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*batch"]:
        """One λ per row of a mask of the response's tokens, stop token included; l counts its True entries.

        Raises:
            ConfigError: α is not above 0.
        """
        check_positive(length_adaptive_alpha=self.alpha)
        lengths = mask.sum(-1).clamp(min=1).to(dtype)
        return (1.0 - 1.0 / (self.alpha * lengths)).clamp(0.0, 1.0)
