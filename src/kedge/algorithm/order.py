"""How far two orders agree: shares of ordered pairs and rank correlations, with intervals over prompts."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kedge.system.intervals import Interval, resampled_interval, share_interval

__all__ = ["PromptResamples", "ordered_pairs", "rank_correlations"]


def ordered_pairs(
    guesses: Float[Tensor, " n"], truths: Float[Tensor, " n"]
) -> tuple[Float[Tensor, "n n"], Bool[Tensor, "n n"]]:
    """For every ordered pair (i, j): 1 if the guess orders it as the truth does, ½ if the guesses are equal, else 0.

    Returns:
        These numbers, 0 where the truths are equal, and whether the truths differ.
    """
    order = torch.sign(truths[:, None] - truths[None, :])
    right = (1 + order * torch.sign(guesses[:, None] - guesses[None, :])) / 2
    return right * order.abs(), order != 0


def rank_correlations(
    first: Float[Tensor, " n"], second: Float[Tensor, " n"], weights: Float[Tensor, "rows n"]
) -> Float[Tensor, " rows"]:
    """Spearman's rank correlation, ties at their mean rank, once per row of weights.

    Args:
        first: One number per entry; a constant one has the correlation 0.
        second: The same; the result is NaN where it is constant or fewer than two entries have a weight.
        weights: How often each entry counts: all 1, a subset, or the multiplicities of a resample.

    Source: Spearman 1904.
    """
    total = weights.sum(-1, keepdim=True)
    deviations: list[Tensor] = []
    for numbers in (first, second):
        below = (1 + torch.sign(numbers[:, None] - numbers[None, :])) / 2
        ranks = weights @ below.to(weights).T
        deviations.append(ranks - (weights * ranks).sum(-1, keepdim=True) / total)
    covariance = (weights * deviations[0] * deviations[1]).sum(-1)
    one, other = ((weights * each.square()).sum(-1) for each in deviations)
    tiny = 1e-9 * total.squeeze(-1) ** 3  # the variance of ranks that differ only by rounding
    correlation = torch.where(one > tiny, covariance / (one * other).clamp(min=1e-300).sqrt(), 0.0)
    return torch.where(other > tiny, correlation, torch.nan)


class PromptResamples:
    """Bootstrap resamples of the prompts. The first row of each weight matrix is the sample itself.

    Args:
        member: True where a prefix belongs to a prompt.
        confidence: Coverage of the intervals.
        count: Resamples.
        seed: Of the draws.
    """

    def __init__(self, member: Float[Tensor, "prompts prefixes"], confidence: float, count: int, seed: int) -> None:
        num_prompts = len(member)
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(num_prompts, (count, num_prompts), generator=generator)
        drawn = torch.zeros(count, num_prompts, dtype=torch.float64)
        drawn.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
        self.prompt_weights = torch.cat([torch.ones(1, num_prompts, dtype=torch.float64), drawn])
        self.weights = self.prompt_weights @ member
        self._member = member
        self._confidence = confidence

    def interval(self, figures: Float[Tensor, " rows"], bounds: tuple[float, float]) -> Interval | None:
        """The figure of the sample with its interval from those of the resamples; None if the sample has none."""
        if figures[0].isnan():
            return None
        first, *resamples = map(float, figures)
        return resampled_interval(first, resamples, len(self._member), confidence=self._confidence, bounds=bounds)

    def share(self, guesses: Tensor, truths: Tensor, *, across: bool) -> Interval | None:
        """The share of ordered pairs, of one prompt or of different ones; 0 and 1 get an interval as well."""
        found = self.interval(self._shares(guesses, truths, across=across), (0.0, 1.0))
        if found is None or found.value not in (0.0, 1.0):
            return found
        return share_interval([found.value] * len(self._member), confidence=self._confidence)

    def ceiling(self, one_half: Tensor, other_half: Tensor, *, across: bool) -> float | None:
        """The share of ordered pairs of a perfect critic, from the agreement of two halves of the continuations."""
        known = ~(one_half.isnan() | other_half.isnan())
        halves = torch.where(known, one_half, 0.0), torch.where(known, other_half, 0.0)
        both = [self._shares(*pair, across=across, known=known)[0] for pair in (halves, halves[::-1])]
        agreement = float(torch.stack(both).mean())
        if math.isnan(agreement):
            return None
        correlation = math.sin(math.pi * (min(max(agreement, 0.5), 1.0) - 0.5))
        return 0.5 + math.asin(math.sqrt(min(1.0, 2 * correlation / (1 + correlation)))) / math.pi

    def _shares(self, guesses: Tensor, truths: Tensor, *, across: bool, known: Tensor | None = None) -> Tensor:
        """The share per row of weights. Pairs are summed by prompt first, so that a resample costs prompts²."""
        right, differ = ordered_pairs(guesses, truths)
        if known is not None:
            right, differ = (each * (known[:, None] & known[None, :]) for each in (right, differ))
        right, differ = (self._member @ each.double() @ self._member.T for each in (right, differ))
        if not across:
            return (self.prompt_weights @ right.diagonal()) / (self.prompt_weights @ differ.diagonal())
        right, differ = (each - each.diagonal().diag() for each in (right, differ))
        return ((self.prompt_weights @ right) * self.prompt_weights).sum(-1) / (
            (self.prompt_weights @ differ) * self.prompt_weights
        ).sum(-1)
