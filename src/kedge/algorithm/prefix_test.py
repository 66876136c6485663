"""How well a critic's values of prefixes agree with the returns of continuations sampled from them.

    prefix ─▶ M continuations ─▶ mean return m        V(prefix) against m: order, rank, error, calibration

The mean return of other responses to the same prompt is judged in the same way: it is what a group baseline knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.checks import check_same_shape
from kedge.algorithm.order import PromptResamples, rank_correlations
from kedge.errors import ShapeError
from kedge.system.intervals import Interval

__all__ = ["CalibrationBin", "PrefixTest", "prefix_test"]


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
        pairs_within: share of pairs of prefixes of one prompt whose values are in the order of their mean returns.
            Chance is ½; equal values count half; pairs with equal mean returns have no order and are left out.
        pairs_across: the same for pairs of prefixes of different prompts.
        prompt_pairs_across: the same for the prompt's mean return in place of the value. (Within a prompt it is ½.)
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
    num_bins: int = 10,
    confidence: float = 0.95,
    num_resamples: int = 1_000,
    seed: int = 0,
) -> PrefixTest:
    """Hold the values of prefixes against the mean returns of their continuations.

    The noise of M continuations leaves a perfect critic an explained variance of 1 − mean(s²/M)/Var(m), with s² the
    unbiased variance of a prefix's returns. Its share of ordered pairs follows from how often two halves of the
    continuations agree on the order of a pair, c: for normal differences, with ρ = sin(π(c − ½)) the correlation of
    the halves, that of the whole is r = 2ρ/(1 + ρ) (Spearman–Brown) and the share ½ + arcsin(√r)/π (Sheppard).

    Args:
        values: V, one per prefix.
        returns: the return to go of each continuation, from the end of the prefix; NaN where it has none. At least two
            per prefix.
        prompt_returns: the mean return of other responses to the prefix's prompt, the same for all its prefixes.
        prompts: number of each prefix's prompt.
        num_bins: bins of the calibration, ≥ 1.
        confidence: coverage of the intervals, in (0, 1).
        num_resamples: resamples of the prompts.
        seed: of the resamples.

    Raises:
        ShapeError: shapes differ, there is no prefix, or a prefix has fewer than two returns.

    Source: Kazemnejad et al. 2024 (VinePPO, arXiv 2410.01679), section 7: values against the returns of fresh samples,
        and the order of alternatives. Pairs as in Harrell et al. 1982. Brown 1910; Sheppard 1899.
    """
    check_same_shape(values=values, prompt_returns=prompt_returns, prompts=prompts, returns=returns[:, 0])
    known = ~returns.isnan()
    if not values.numel() or (known.sum(-1) < 2).any():
        raise ShapeError("a prefix test needs at least one prefix, and two returns of each")
    value, baseline, returns = values.cpu().double(), prompt_returns.cpu().double(), returns.cpu().double()
    means, counts = _means(returns), known.sum(-1).cpu()
    member = _rows_of(prompts.cpu()).double()
    resamples = PromptResamples(member, confidence, num_resamples, seed)
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
        bins=tuple(_bins(value, means, resamples, num_bins)),
    )


def _rows_of(numbers: Int[Tensor, " n"]) -> Bool[Tensor, "rows n"]:
    """A row for each distinct number, in order: where it is."""
    return torch.stack([numbers == each for each in sorted(set(map(int, numbers)))])


def _means(returns: Tensor) -> Float[Tensor, " prefixes"]:
    """Mean returns, in float32's precision, so that the same returns in another order have the same mean."""
    return returns.nanmean(-1).float().double()


def _explained(guesses: Tensor, truths: Tensor, weights: Tensor) -> Float[Tensor, " rows"]:
    """Explained variance per row of weights; NaN where the truths are constant."""

    def variance(numbers: Tensor) -> Tensor:
        total, centered = weights.sum(-1), numbers - numbers.mean()
        return (weights @ centered.square()) / total - ((weights @ centered) / total).square()

    spread = variance(truths)
    return torch.where(spread > 0, 1 - variance(truths - guesses) / spread, torch.nan)


def _bins(values: Tensor, means: Tensor, resamples: PromptResamples, num_bins: int) -> list[CalibrationBin]:
    """Bins between quantiles of the values; equal values share one."""
    edges = values.quantile(torch.arange(1, num_bins).double() / num_bins)
    bins = torch.searchsorted(edges, values, right=True)  # skips those between equal edges
    found: list[CalibrationBin] = []
    for inside in _rows_of(bins).double():
        shares = (resamples.weights @ (inside * means)) / (resamples.weights @ inside)
        interval = resamples.interval(shares, (float(means.min()), float(means.max())))
        count = int(inside.sum())
        assert interval is not None, "the bin has a prefix"
        found.append(CalibrationBin(float((values * inside).sum()) / count, interval, count))
    return found
