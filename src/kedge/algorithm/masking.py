"""Means, whitening and aggregation over the counted slots of padded tensors.

Masked slots are replaced before anything is computed from them. Multiplying by the mask is not enough: NaN · 0 is NaN,
in the value and in the gradient.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from typing_extensions import TypedDict

from kedge_base.errors import ConfigError, ShapeError

Aggregation = Literal["token", "sequence", "constant"]


_ROUNDING_STEPS = 8
_LOGITS = 10.0
"""Magnitude of the logits whose difference is a log probability: it contains their rounding, however small it is."""


WITHOUT_FLOAT64 = {"mps"}
"""Devices without double precision: Apple's GPUs."""


def in_float64(x: Tensor) -> Tensor:
    """Convert to double precision; moves to the CPU first if the device lacks it."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()


class Averaging(TypedDict, total=False):
    """How a loss per token becomes one number: the options of `aggregate`, which every loss accepts and passes on."""

    aggregation: Aggregation
    constant_length: int | None
    normalizer: Tensor | float | None


def unpadded(table: Shaped[Tensor, "batch width"], mask: Bool[Tensor, "batch width"]) -> list[list[Any]]:
    """List the counted entries of each row."""
    entries = iter(cast("Any", table[mask]).tolist())  # a single GPU synchronization for all rows
    return [list(islice(entries, count)) for count in cast("Any", mask.sum(-1)).tolist()]


def keep_counted(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Keep the counted entries of `x`, and set others to 0; no gradient reaches a masked slot."""
    return torch.where(mask, x, 0.0)


def counted(mask: Bool[Tensor, "*shape"], **tensors: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], ...]:
    """`keep_counted` of each tensor, after `check_counted`: the one preparation of a formula's arguments.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
    """
    check_counted(mask, **tensors)
    return tuple(keep_counted(each, mask) for each in tensors.values())


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean of the counted entries.

    Args:
        x: values; the contents of masked slots, including NaN, have no influence.
        mask: True = counts.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
    """
    check_counted(mask, x=x)
    return keep_counted(x, mask).sum() / mask.sum()


def rounding_of(largest: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Bound on the rounding error between numbers that should be equal: 8 rounding steps of the largest of their terms.

    Args:
        largest: The largest absolute value of the numbers, or of the terms that they are sums of.
        dtype: Number format in which the numbers were computed.
    """
    return _ROUNDING_STEPS * torch.finfo(dtype).eps * largest


def masked_whiten(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    shift_mean: bool = True,
    correction: int = 0,
    magnitude: float = 0.0,
) -> Float[Tensor, "*shape"]:
    """Scale the counted entries of the tensor to unit variance; entries that differ only by rounding count as constant.

    y = (x − μ) / σ  [+ μ where shift_mean is False];  masked slots become 0
    y = 0 [+ μ]  where the entries are constant

    So y does not depend on the unit of x. With the papers' √(σ² + 10⁻⁸), it does unless σ is far above 10⁻⁴, and the
    rounding errors of constant entries are multiplied by up to 10,000.

    Args:
        x: values, e.g. the advantages of the whole batch.
        mask: True = counts; μ and σ are computed from the counted entries.
        shift_mean: True shifts the mean to 0 (advantages); False keeps it (rewards, where the sign matters).
        correction: 0 for the population variance, 1 for Bessel's correction.
        magnitude: largest absolute value of the terms that the entries are sums of, if it exceeds them: small
            differences of large numbers are also rounding. See `rounding_of` and `magnitude_of`.

    Raises:
        ShapeError: when the shapes differ or at most `correction` entries count.

    Source: Ziegler's and N+'s whitening; spec §5.23, §6.26.
    """
    check_counted(mask, x=x)
    count = mask.sum()
    if not torch.compiler.is_compiling() and count <= correction:
        raise ShapeError(f"whitening with correction={correction} needs more than {int(count)} counted entries")
    mean = keep_counted(x, mask).sum() / count
    centered = keep_counted(x - mean, mask)
    highest = x.masked_fill(~mask, -math.inf).max()
    lowest = x.masked_fill(~mask, math.inf).min()
    largest = torch.maximum(highest.abs(), lowest.abs()).clamp(min=magnitude)
    is_constant = (highest - lowest <= rounding_of(largest, x.dtype)) & largest.isfinite()
    variance = torch.where(is_constant, 1.0, centered.square().sum() / (count - correction))
    whitened = torch.where(is_constant, 0.0, centered * variance.rsqrt())
    return whitened if shift_mean else keep_counted(whitened + mean, mask)


def magnitude_of(*terms: Tensor | None) -> float:
    """Return the largest absolute value in the tensors, for `masked_whiten`; None is ignored."""
    return max((float(each.abs().max()) for each in terms if each is not None), default=0.0)


def magnitude_of_rewards(
    scores: Float[Tensor, " batch"],
    token_scores: Float[Tensor, "batch time"] | None,
    logprobs: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    kl_coef: float,
    temperature: float,
    summed: bool,
) -> float:
    """Return the largest absolute value of the terms of rewards with a KL penalty, for `masked_whiten`.

    A KL is a difference of log probabilities, and these are differences of logits. A policy and an equal reference
    differ by rounding at every token.

    Args:
        scores: one number per response.
        token_scores: one number per action, from a process reward.
        logprobs: of the actions, nats.
        mask: True = counts.
        kl_coef: β of the penalty.
        temperature: of the log probabilities.
        summed: True for sums of a response's rewards, such as advantages; False for the rewards of tokens.
    """
    charged = kl_coef * keep_counted(logprobs.abs() + _LOGITS / temperature, mask)
    if summed:
        charged = cast(Tensor, charged.norm(dim=-1))  # pyright: ignore[reportUnknownMemberType] (torch gives no type)
    return magnitude_of(scores, token_scores, charged)


def aggregation_normalizer(mask: Bool[Tensor, "*batch time"], *, aggregation: Aggregation = "token") -> Tensor:
    """The divisor of `aggregate`: the number of counted tokens, or of sequences with counted tokens.

    A training step computes it once from the mask of the whole minibatch, over all ranks, and passes it to every
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
    """Reduce one number per token to a scalar.

    token:     Σ_b Σ_t x / N         every token has the same weight
    sequence:  Σ_b (Σ_t x / n_b) / S  every sequence has the same weight
    constant:  Σ_b (Σ_t x / C) / S    a sequence is weighted by its length, independent of the other lengths

    with N counted tokens in total, n_b of them in sequence b, and S sequences with at least one. `constant_length=1`
    gives the mean over sequences of their sums.

    Args:
        x: one number per token.
        mask: True = counts.
        aggregation: which of the three.
        constant_length: C, in tokens; by default the tensor's width. Set it when micro-batches are trimmed to their
            longest response, because their widths differ.
        normalizer: N or S of the whole minibatch (see `aggregation_normalizer`) if `x` is a part of it: the results
            of the parts *sum* to the whole's, and so do their gradients. By default `x` is the whole.

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


def check_same_shape(**tensors: Tensor | None) -> None:
    """Reject tensors of different shapes, because broadcasting would hide the mistake. None is ignored."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"shapes must be equal: {listed}")


def check_counted(mask: Tensor, **tensors: Tensor | None) -> None:
    """Reject a mask that is not boolean, counts nothing, or differs in shape from the tensors it masks."""
    check_same_shape(mask=mask, **tensors)
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask must be boolean (True = counts), got {mask.dtype}")
    if not torch.compiler.is_compiling() and not mask.any():
        raise ShapeError(f"mask of shape {tuple(mask.shape)} counts nothing")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Reject a value that is not in the `Literal` type `choices`."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_finite(**numbers: float) -> None:
    """Reject infinite numbers and NaN."""
    if torch.compiler.is_compiling():
        return
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ConfigError(f"{name} must be a finite number, got {number}")


def check_share(**numbers: float) -> None:
    """Reject numbers outside [0, 1], and NaN."""
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise ConfigError(f"{name} must be in [0, 1], got {number}")


def check_positive(**numbers: float) -> None:
    """Reject numbers that are zero, negative, infinite or NaN."""
    if torch.compiler.is_compiling():
        return
    check_finite(**numbers)
    for name, number in numbers.items():
        if number <= 0:
            raise ConfigError(f"{name} must be above 0, got {number}")
