"""The loss of reward models, on rankings of two or more responses."""

from __future__ import annotations

from jaxtyping import Bool, Float, Real
from torch import Tensor
from torch.nn.functional import logsigmoid

from kedge.algorithm.masking import check_same_shape
from kedge_base.errors import ShapeError


def ranking_loss(
    scores: Float[Tensor, "prompts K"],
    ranks: Real[Tensor, "prompts K"],
    *,
    mask: Bool[Tensor, "prompts K"] | None = None,
) -> Float[Tensor, ""]:
    """Bradley–Terry loss of rankings: each pair of a prompt's responses is a comparison.

    loss = −mean over prompts of the mean over their pairs (i better than j) of log σ(score_i − score_j)

    Every prompt has the same weight, regardless of its number of pairs. For two responses the loss is
    −log σ(chosen − rejected).

    Args:
        scores: one number per response.
        ranks: a smaller rank is better. Equal ranks are a tie and form no pair. NaN marks a missing response.
        mask: True = counts, for prompts with fewer than K responses; by default all count.

    Returns:
        The loss; prompts without a pair (all tied, or one response) are excluded from the mean.

    Raises:
        ShapeError: when the shapes differ or no prompt has a pair.

    Source: Stiennon eq. 1 (pairs), InstructGPT eq. 1 (rankings); spec §3.9, §3.10.
    """
    check_same_shape(scores=scores, ranks=ranks, mask=mask)
    present = ~ranks.isnan() if mask is None else mask & ~ranks.isnan()
    scores = scores.masked_fill(~present, 0.0)
    both = present.unsqueeze(-1) & present.unsqueeze(-2)
    pairs = both & (ranks.unsqueeze(-1) < ranks.unsqueeze(-2))
    counts = pairs.sum((-1, -2))
    comparable = counts > 0
    if not comparable.any():
        raise ShapeError("no prompt has two responses with different ranks")
    losses = -logsigmoid(scores.unsqueeze(-1) - scores.unsqueeze(-2)).masked_fill(~pairs, 0.0)
    return (losses.sum((-1, -2)) / counts.clamp(min=1)).sum() / comparable.sum()
