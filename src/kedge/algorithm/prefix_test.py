"""Agreement of two orders: shares of ordered pairs and rank correlations, with intervals over prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.masking import check_same_shape
from kedge.algorithm.readout import ROUNDING
from kedge_base.errors import ShapeError
from kedge_base.intervals import Interval, resampled_interval, share_interval

NUM_BINS = 10
"""Bins of the calibration."""


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
        second: Like `first`; the result is NaN where it is constant or fewer than two entries have a weight.
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
        count: Resamples.
    """

    def __init__(self, member: Float[Tensor, "prompts prefixes"], count: int) -> None:
        num_prompts = len(member)
        generator = torch.Generator().manual_seed(0)
        draws = torch.randint(num_prompts, (count, num_prompts), generator=generator)
        drawn = torch.zeros(count, num_prompts, dtype=torch.float64)
        drawn.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
        self.prompt_weights = torch.cat([torch.ones(1, num_prompts, dtype=torch.float64), drawn])
        self.weights = self.prompt_weights @ member
        self._member = member

    def interval(self, figures: Float[Tensor, " rows"], bounds: tuple[float, float]) -> Interval | None:
        """The figure of the sample with its interval over the resamples; None if it is undefined."""
        if figures[0].isnan():
            return None
        first, *resamples = map(float, figures)
        return resampled_interval(first, resamples, len(self._member), bounds=bounds)

    def share(self, guesses: Tensor, truths: Tensor, *, across: bool) -> Interval | None:
        """The share of ordered pairs, of one prompt or of different ones; 0 and 1 also get an interval."""
        found = self.interval(self._shares(guesses, truths, across=across), (0.0, 1.0))
        if found is None or found.value not in (0.0, 1.0):
            return found
        return share_interval([found.value] * len(self._member))

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


@dataclass(frozen=True)
class CalibrationBin:
    """Prefixes of similar value.

    Attributes:
        value: their mean value.
        returns: the mean return of their continuations.
        count: number of prefixes.
    """

    value: float
    returns: Interval
    count: int


@dataclass(frozen=True)
class PrefixTest:
    """The test's figures, with intervals over prompts; None where nothing can be compared.

    Attributes:
        num_prompts: prompts.
        num_prefixes: prefixes.
        num_continuations: mean number of scored continuations per prefix.
        pairs_within: share of pairs of prefixes of one prompt with values in the order of their mean returns.
            Chance is ½; equal values count half; pairs with equal mean returns have no order and are left out.
        pairs_across: the same for pairs of prefixes of different prompts.
        prompt_pairs_across: the same for the prompt's mean return instead of the value. (Within a prompt it is ½.)
        ceiling_within: about the `pairs_within` of a perfect critic; below 1 because the mean returns are noisy.
        ceiling_across: about the `pairs_across` of a perfect critic.
        rank_correlation_within: Spearman's correlation of values and mean returns in a prompt, mean over prompts.
        rank_correlation: Spearman's correlation over all prefixes.
        explained_variance: 1 − Var(m − V)/Var(m).
        prompt_explained_variance: the same for the prompt's mean return.
        gain: the first minus the second; below 0 the critic is the worse baseline.
        ceiling_explained: the explained variance of a perfect critic.
        error: mean |m − V|, in units of the return.
        prompt_error: the same for the prompt's mean return.
        bias: mean of V − m.
        bins: the calibration: at most ten bins of equally many prefixes, by value.
    """

    num_prompts: int
    num_prefixes: int
    num_continuations: float
    pairs_within: Interval | None
    pairs_across: Interval | None
    prompt_pairs_across: Interval | None
    ceiling_within: float | None
    ceiling_across: float | None
    rank_correlation_within: Interval | None
    rank_correlation: Interval | None
    explained_variance: Interval | None
    prompt_explained_variance: Interval | None
    gain: Interval | None
    ceiling_explained: float | None
    error: float
    prompt_error: float
    bias: float
    bins: tuple[CalibrationBin, ...]


@torch.no_grad()
def prefix_test(
    values: Float[Tensor, " prefixes"],
    returns: Float[Tensor, "prefixes continuations"],
    prompt_returns: Float[Tensor, " prefixes"],
    prompts: Int[Tensor, " prefixes"],
    *,
    num_resamples: int = 1_000,
) -> PrefixTest:
    """Compare the values of prefixes with the mean returns of their continuations.

    The noise of M continuations leaves a perfect critic an explained variance of 1 − mean(s²/M)/Var(m), with s² the
    unbiased variance of a prefix's returns. Its share of ordered pairs follows from how often two halves of the
    continuations agree on the order of a pair, c: for normal differences, with ρ = sin(π(c − ½)) the correlation of
    the halves, the whole's is r = 2ρ/(1 + ρ) (Spearman–Brown) and the share ½ + arcsin(√r)/π (Sheppard).

    Args:
        values: V, one per prefix.
        returns: the return to go of each continuation, from the end of the prefix; NaN where missing. At least two
            per prefix.
        prompt_returns: the mean return of other responses to the prefix's prompt, the same for all its prefixes.
        prompts: number of each prefix's prompt.
        num_resamples: resamples of the prompts.

    Raises:
        ShapeError: shapes differ, prefixes are missing, or a prefix has fewer than two returns.

    Source: Kazemnejad et al. 2024 (VinePPO, arXiv 2410.01679), section 7: values against the returns of fresh samples,
        and the order of alternatives. Pairs as in Harrell et al. 1982. Brown 1910; Sheppard 1899.
    """
    check_same_shape(values=values, prompt_returns=prompt_returns, prompts=prompts, returns=returns[:, 0])
    known = ~returns.isnan()
    if not values.numel() or (known.sum(-1) < 2).any():
        raise ShapeError("a prefix test needs at least one prefix, and two returns of each")
    value = values.cpu().double()
    baseline = prompt_returns.cpu().double()
    returns = returns.cpu().double()
    means = _means(returns)
    counts = known.sum(-1).cpu()
    member = _rows_of(prompts.cpu()).double()
    resamples = PromptResamples(member, num_resamples)
    noise = float(((returns - means[:, None]).square().nansum(-1) / (counts - 1) / counts).mean())
    spread = float(means.var(correction=0))
    halves = _means(returns[:, ::2]), _means(returns[:, 1::2])
    explained, prompt_explained = (_explained(guess, means, resamples.weights) for guess in (value, baseline))
    within = rank_correlations(value, means, member)
    return PrefixTest(
        num_prompts=len(member),
        num_prefixes=len(value),
        num_continuations=float(counts.double().mean()),
        pairs_within=resamples.share(value, means, across=False),
        pairs_across=resamples.share(value, means, across=True),
        prompt_pairs_across=resamples.share(baseline, means, across=True),
        ceiling_within=resamples.ceiling(*halves, across=False),
        ceiling_across=resamples.ceiling(*halves, across=True),
        rank_correlation_within=resamples.interval(
            (resamples.prompt_weights @ within.nan_to_num()) / (resamples.prompt_weights @ (~within.isnan()).double()),
            (-1.0, 1.0),
        ),
        rank_correlation=resamples.interval(rank_correlations(value, means, resamples.weights), (-1.0, 1.0)),
        explained_variance=resamples.interval(explained, (-math.inf, 1.0)),
        prompt_explained_variance=resamples.interval(prompt_explained, (-math.inf, 1.0)),
        gain=resamples.interval(explained - prompt_explained, (-math.inf, math.inf)),
        ceiling_explained=max(0.0, 1 - noise / spread) if spread > 0 else None,
        error=float((means - value).abs().mean()),
        prompt_error=float((means - baseline).abs().mean()),
        bias=float((value - means).mean()),
        bins=tuple(_bins(value, means, resamples)),
    )


def _rows_of(numbers: Int[Tensor, " n"]) -> Bool[Tensor, "rows n"]:
    """One mask per distinct number, in ascending order."""
    return torch.stack([numbers == each for each in sorted(set(map(int, numbers)))])


def _means(returns: Tensor) -> Float[Tensor, " prefixes"]:
    """Mean returns, in float32's precision, so that the same returns in a different order have the same mean."""
    return returns.nanmean(-1).float().double()


def _explained(guesses: Tensor, truths: Tensor, weights: Tensor) -> Float[Tensor, " rows"]:
    """Explained variance per row of weights; NaN where the truths are constant, up to rounding."""

    def moments(numbers: Tensor) -> tuple[Tensor, Tensor]:
        centered = numbers - numbers.mean()
        mean, square = ((weights @ each) / weights.sum(-1) for each in (centered, centered.square()))
        return square - mean.square(), square

    spread, square = moments(truths)
    return torch.where(spread > ROUNDING * square, 1 - moments(truths - guesses)[0] / spread, torch.nan)


def _bins(values: Tensor, means: Tensor, resamples: PromptResamples) -> list[CalibrationBin]:
    """Bins between quantiles of the values; equal values share one."""
    edges = values.quantile(torch.arange(1, NUM_BINS).double() / NUM_BINS)
    bins = torch.searchsorted(edges, values, right=True)  # skips those between equal edges
    found: list[CalibrationBin] = []
    for inside in _rows_of(bins).double():
        shares = (resamples.weights @ (inside * means)) / (resamples.weights @ inside)
        interval = resamples.interval(shares, (float(means.min()), float(means.max())))
        count = int(inside.sum())
        assert interval is not None, "the bin has a prefix"
        found.append(CalibrationBin(float((values * inside).sum()) / count, interval, count))
    return found
