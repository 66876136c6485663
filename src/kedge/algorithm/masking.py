"""Means, whitening and aggregation over the counted slots of padded tensors.

Masked slots are replaced before anything is computed from them. Multiplying by the mask would not do: NaN · 0 is NaN,
in the value and in the gradient alike.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kedge.algorithm.checks import check_choice, check_counted, check_positive
from kedge.errors import ShapeError

__all__ = ["Aggregation", "aggregate", "aggregation_normalizer", "keep_counted", "masked_mean", "masked_whiten"]

Aggregation = Literal["token", "sequence", "constant"]


def keep_counted(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The counted entries of `x` and 0 elsewhere; no gradient reaches a masked slot."""
    return torch.where(mask, x, 0.0)


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean of the counted entries.

    Args:
        x: values; what stands in masked slots, NaN included, has no influence.
        mask: True = counts.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
    """
    check_counted(mask, x=x)
    return keep_counted(x, mask).sum() / mask.sum()


def masked_whiten(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    shift_mean: bool = True,
    correction: int = 0,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """Scale the counted entries of the whole tensor to unit variance.

    y = (x − μ) / √(σ² + eps)  [+ μ where shift_mean is False];  masked slots become 0

    Args:
        x: values, e.g. the advantages of the whole batch.
        mask: True = counts; μ and σ are those of the counted entries.
        shift_mean: True shifts the mean to 0 (advantages); False keeps it (rewards, whose sign means something).
        correction: 0 for the population variance, 1 for Bessel's correction.
        eps: added to the variance, so that constant entries stay finite.

    Raises:
        ShapeError: when the shapes differ or no more than `correction` entries count.

    Source: Ziegler's and N+'s whitening; spec §5.23, §6.26.
    """
    check_counted(mask, x=x)
    count = mask.sum()
    if count <= correction:
        raise ShapeError(f"whitening with correction={correction} needs more than {int(count)} counted entries")
    mean = keep_counted(x, mask).sum() / count
    centred = keep_counted(x - mean, mask)
    whitened = centred * torch.rsqrt(centred.square().sum() / (count - correction) + eps)
    return whitened if shift_mean else keep_counted(whitened + mean, mask)


def aggregation_normalizer(mask: Bool[Tensor, "*batch time"], *, aggregation: Aggregation = "token") -> Tensor:
    """What `aggregate` divides by: the counted tokens, or the sequences that have any.

    A training step computes it once from the mask of its whole minibatch, over all ranks, and hands it to every
    micro-batch.

    Source: spec §6.30.
    """
    check_choice("aggregation", aggregation, Aggregation)
    return mask.sum() if aggregation == "token" else mask.any(-1).sum()


def aggregate(
    x: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    normalizer: Tensor | float | None = None,
) -> Float[Tensor, ""]:
    """One number from one number per token.

    token:     Σ_b Σ_t x / N         every token weighs the same
    sequence:  Σ_b (Σ_t x / n_b) / S  every sequence weighs the same
    constant:  Σ_b (Σ_t x / C) / S    a sequence weighs by its length, whatever the other lengths are

    with N counted tokens in all, n_b of them in sequence b, and S sequences that have any. `constant_length=1` gives
    the mean over sequences of their sums.

    Args:
        x: one number per token.
        mask: True = counts.
        aggregation: which of the three.
        constant_length: C, in tokens; the tensor's width by default, which differs between micro-batches that are
            trimmed to their longest response: name it there.
        normalizer: N or S of the whole minibatch (see `aggregation_normalizer`), when `x` is a part of it: then the
            results of the parts *sum* to that of the whole, and so do their gradients. By default `x` is the whole.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: DAPO eq. 8 (token), GRPO eq. 3 (sequence), Dr. GRPO §3.2 (constant); spec §6.30.
    """
    check_counted(mask, x=x)
    divisor = aggregation_normalizer(mask, aggregation=aggregation) if normalizer is None else normalizer
    sums = keep_counted(x, mask).sum(-1)
    if aggregation == "sequence":
        sums = sums / mask.sum(-1).clamp(min=1)
    elif aggregation == "constant":
        length = mask.shape[-1] if constant_length is None else constant_length
        check_positive(constant_length=length)
        sums = sums / length
    return sums.sum() / divisor
