"""The loss of reward models, on rankings of two or more responses."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from kedge.algorithm.masking import check_same_shape
from kedge_base.errors import ShapeError

Ties: TypeAlias = Literal["drop", "davidson", "rao_kupper"]
"""Treatment of equal ranks: no pair, or a third outcome by Davidson's or by Rao and Kupper's model."""


def ranking_loss(
    scores: Float[Tensor, "prompts K"],
    ranks: Real[Tensor, "prompts K"],
    *,
    mask: Bool[Tensor, "prompts K"] | None = None,
    ties: Ties = "drop",
    tie: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Bradley–Terry loss of rankings: each pair of a prompt's responses is a comparison.

    loss = −mean over prompts of the mean over their pairs (i better than j) of log σ(score_i − score_j)

    Every prompt has the same weight, regardless of its number of pairs. For two responses the loss is
    −log σ(chosen − rejected).

    With a model of ties, tied pairs count as well, with d = score_i − score_j:

    davidson:    P(i better) ∝ e^(d/2), P(j better) ∝ e^(−d/2), P(tie) ∝ ν,  ν = e^tie
    rao_kupper:  P(i better) = σ(d − η), P(j better) = σ(−d − η), P(tie) = 1 − both,  η = log(1 + e^tie)

    As `tie` falls, ties become impossible, and P(i better) is Bradley–Terry's.

    Args:
        scores: one number per response.
        ranks: a smaller rank is better. Equal ranks are a tie. NaN marks a missing response.
        mask: True = counts, for prompts with fewer than K responses; by default all count.
        ties: "drop" forms no pair of equal ranks.
        tie: how likely ties are: any number, learned with the scores; None with "drop".

    Returns:
        The loss; prompts without a pair (all tied and dropped, or one response) are excluded from the mean.

    Raises:
        ShapeError: when the shapes differ or no prompt has a pair.

    Source: Stiennon eq. 1 (pairs), InstructGPT eq. 1 (rankings); spec §3.9, §3.10. Davidson 1970 (JASA 65, p. 317); Rao
    and Kupper 1967 (JASA 62, p. 194), where η is log θ.
    """
    check_same_shape(scores=scores, ranks=ranks, mask=mask)
    present = ~ranks.isnan() if mask is None else mask & ~ranks.isnan()
    scores = scores.masked_fill(~present, 0.0)
    both = present.unsqueeze(-1) & present.unsqueeze(-2)
    pairs = both & (ranks.unsqueeze(-1) < ranks.unsqueeze(-2))
    tied = (both & (ranks.unsqueeze(-1) == ranks.unsqueeze(-2))).triu(1)
    if tie is not None:
        pairs = pairs | tied
    counts = pairs.sum((-1, -2))
    comparable = counts > 0
    if not comparable.any():
        raise ShapeError("no prompt has two responses with different ranks")
    gaps = scores.unsqueeze(-1) - scores.unsqueeze(-2)
    logprobs = logsigmoid(gaps) if tie is None else _logprobs_with_ties(gaps, tied, ties, tie)
    losses = -logprobs.masked_fill(~pairs, 0.0)
    return (losses.sum((-1, -2)) / counts.clamp(min=1)).sum() / comparable.sum()


def _logprobs_with_ties(gaps: Tensor, tied: Tensor, ties: Ties, tie: Tensor) -> Tensor:
    if ties == "davidson":
        tie = tie.expand_as(gaps)
        return torch.where(tied, tie, gaps / 2) - torch.stack([gaps / 2, -gaps / 2, tie]).logsumexp(0)
    margin = softplus(tie)
    better = logsigmoid(gaps - margin)
    return torch.where(tied, better + logsigmoid(-gaps - margin) + (2 * margin).expm1().log(), better)


def initial_tie(share: float) -> float:
    """The `tie` that gives equal scores this probability of a tie, clamped; the same in both models of ties.

    share = ν / (2 + ν) in Davidson's, and (θ − 1) / (θ + 1) with θ = 1 + e^tie in Rao and Kupper's.
    """
    share = min(max(share, 0.01), 0.99)
    return math.log(2 * share / (1 - share))
