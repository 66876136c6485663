"""The critic's loss and its explained variance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.checks import check_counted, check_positive
from kedge.algorithm.masking import Averaging, aggregate, keep_counted, masked_mean, rounding_of

__all__ = ["ValueLoss", "clipped_value_loss", "explained_variance"]


class ValueLoss(NamedTuple):
    """A value loss, and the share of counted tokens whose clipped error is strictly larger."""

    loss: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]


def clipped_value_loss(
    values: Float[Tensor, "*batch time"],
    old_values: Float[Tensor, "*batch time"],
    returns: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    clip_range: float | None,
    huber_delta: float | None = None,
    **averaging: Unpack[Averaging],
) -> ValueLoss:
    """Squared error of the critic: the larger of the unclipped error and the error with V at most ε from V_old.

    loss = ½·aggregate max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)

    The ½ is included; the coefficient of this loss in the total loss is not. With δ, Huber's loss replaces half the
    square of an error e: δ·(|e| − δ/2) where |e| > δ, so that the gradient of an error is at most δ.

    Args:
        values: V of the current critic; differentiable.
        old_values: V_old, at the start of the epochs; frozen.
        returns: R, from unwhitened advantages; frozen.
        mask: True = counts; the reward mask, which can have one more slot than the action mask.
        clip_range: ε > 0 in the unit of the values, so it must fit their scale; None for the unclipped error.
        huber_delta: δ > 0 in the unit of the values; None for the squared error.
        **averaging: see `aggregate`.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: for a clip range or δ that is not above 0.

    Source: S0; N+; spec §6.28. Huber (1964); DQN (Mnih et al. 2015) uses δ = 1.
    """
    check_counted(mask, values=values, old_values=old_values, returns=returns)
    values = keep_counted(values, mask)
    old_values, returns = keep_counted(old_values, mask).detach(), keep_counted(returns, mask).detach()
    losses = free = _doubled_penalty(values - returns, huber_delta)
    if clip_range is not None:
        check_positive(value_clip_range=clip_range)
        held = values.clamp(old_values - clip_range, old_values + clip_range)
        losses = torch.maximum(free, _doubled_penalty(held - returns, huber_delta))
    loss = 0.5 * aggregate(losses, mask, **averaging)
    return ValueLoss(loss=loss, clip_fraction=masked_mean((losses > free).to(losses.dtype), mask))


def _doubled_penalty(error: Tensor, huber_delta: float | None) -> Tensor:
    """The squared error, or twice Huber's loss, which is the same up to δ."""
    if huber_delta is None:
        return error.square()
    check_positive(value_huber_delta=huber_delta)
    size = error.abs()
    return torch.where(size <= huber_delta, error.square(), huber_delta * (2 * size - huber_delta))


@torch.no_grad()
def explained_variance(
    values: Float[Tensor, "*shape"], returns: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Share of the returns' variance that the critic explains.

    1 − Var(R − V) / Var(R): 1 is a perfect critic, 0 is no better than a constant, below 0 is worse than a constant.

    Args:
        values: V.
        returns: R.
        mask: True = counts.

    Returns:
        The share; 0 if the returns are constant, up to the rounding of returns that are sums of advantages and values.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: spec §10.
    """
    check_counted(mask, values=values, returns=returns)
    spread = _variance(returns, mask)
    unexplained = _variance(returns - values, mask)
    rounding = rounding_of(keep_counted(returns, mask).abs().max(), returns.dtype)
    return torch.where(spread > rounding.square(), 1.0 - unexplained / spread, 0.0)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    x = keep_counted(x, mask)
    return masked_mean((x - masked_mean(x, mask)).square(), mask)
