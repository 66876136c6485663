"""What a reward model learns from: comparisons of two responses, and rankings of several."""

from __future__ import annotations

from jaxtyping import Bool, Float, Real
from torch import Tensor
from torch.nn.functional import logsigmoid

from kedge.algorithm.checks import check_same_shape
from kedge.errors import ShapeError

__all__ = ["preference_loss", "ranking_loss"]


def preference_loss(
    chosen: Float[Tensor, "*pairs"],
    rejected: Float[Tensor, "*pairs"],
    margin: Float[Tensor, "*pairs"] | float | None = None,
) -> Float[Tensor, ""]:
    """Bradley–Terry loss of comparisons: the chosen response should score above the rejected one.

    loss = −mean log σ(chosen − rejected − margin)

    Args:
        chosen: scores of the chosen responses.
        rejected: scores of the rejected ones, pair by pair.
        margin: by how much the chosen one should at least win, in units of the score; 0 by default.

    Raises:
        ShapeError: when the shapes differ or there is no pair.

    Source: Stiennon eq. 1; margin: Llama 2 eq. 2; spec §3.9.
    """
    check_same_shape(chosen=chosen, rejected=rejected, margin=margin if isinstance(margin, Tensor) else None)
    if chosen.numel() == 0:
        raise ShapeError("there is no pair to learn from")
    return -logsigmoid(chosen - rejected - (0.0 if margin is None else margin)).mean()


def ranking_loss(
    scores: Float[Tensor, "prompts K"],
    ranks: Real[Tensor, "prompts K"],
    *,
    mask: Bool[Tensor, "prompts K"] | None = None,
) -> Float[Tensor, ""]:
    """Bradley–Terry loss of rankings: every pair of a prompt's responses is a comparison.

    loss = −mean over prompts of the mean over their pairs (i better than j) of log σ(score_i − score_j)

    A prompt weighs the same however many pairs it has. For two responses it is `preference_loss`.

    Args:
        scores: one number per response.
        ranks: a smaller rank is better. Equal ranks are a tie and form no pair. NaN marks a response that is not there.
        mask: True = counts, for prompts with fewer than K responses; all of them by default.

    Returns:
        The loss; prompts without any pair (all tied, or one response) are left out of the mean.

    Raises:
        ShapeError: when the shapes differ or no prompt has a pair.

    Source: InstructGPT eq. 1; spec §3.10.
    """
    check_same_shape(scores=scores, ranks=ranks, mask=mask)
    present = ~ranks.isnan() if mask is None else mask & ~ranks.isnan()
    scores = scores.masked_fill(~present, 0.0)
    both = present.unsqueeze(-1) & present.unsqueeze(-2)
    pairs = both & (ranks.unsqueeze(-1) < ranks.unsqueeze(-2))
    counts = pairs.sum((-1, -2))
    comparable = counts > 0
    if not comparable.any():
        raise ShapeError("no prompt has two responses of different rank")
    losses = -logsigmoid(scores.unsqueeze(-1) - scores.unsqueeze(-2)).masked_fill(~pairs, 0.0)
    return (losses.sum((-1, -2)) / counts.clamp(min=1)).sum() / comparable.sum()
