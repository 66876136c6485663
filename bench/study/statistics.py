"""Interquartile means with stratified bootstrap intervals, and the probability of improvement.

The method of Agarwal et al. 2021 (arXiv 2108.13264). Their package, rliable, has had no release since August 2024 and
needs scipy, arch, pandas and seaborn; these few functions need numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from kedge.algorithm.statistics import Interval

__all__ = ["Strata", "improvement", "interquartile_mean", "with_interval"]

NUM_RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95

Strata: TypeAlias = "Sequence[Sequence[float]]"
"""The scores of one algorithm: for each task, those of its seeds."""


def interquartile_mean(strata: Strata) -> float:
    """The mean of the middle half of all scores, over tasks and seeds; ⌊n/4⌋ are cut at either end.

    Args:
        strata: Scores by task and seed, in comparable units if there is more than one task.

    Source: Agarwal et al. 2021, section 4.3.
    """
    ordered = np.sort(np.concatenate([np.asarray(each, dtype=float) for each in strata]))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def improvement(ours: Strata, theirs: Strata) -> float:
    """The probability that a run of the first algorithm beats one of the second, averaged over tasks; ties count half.

    Args:
        ours: Scores of the first, by task and seed.
        theirs: Scores of the second, of the same tasks.

    Source: Agarwal et al. 2021, section 4.3, equation 2.
    """
    shares: list[float] = []
    for first, second in zip(ours, theirs, strict=True):
        difference = np.subtract.outer(np.asarray(first, dtype=float), np.asarray(second, dtype=float))
        shares.append(float(((1 + np.sign(difference)) / 2).mean()))
    return float(np.mean(shares))


def with_interval(statistic: Callable[..., float], *algorithms: Strata, seed: int = 0) -> Interval:
    """A statistic with its 95 % percentile interval, from resamples of the seeds within each task.

    Args:
        statistic: Such as `interquartile_mean`; its arguments are the algorithms' scores.
        algorithms: The scores of each.
        seed: Of the resamples.

    Source: Agarwal et al. 2021, section 4.1 (stratified bootstrap).
    """
    draw = np.random.default_rng(seed)
    found = [statistic(*(_resampled(each, draw) for each in algorithms)) for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(statistic(*algorithms), float(low), float(high))


def _resampled(strata: Strata, draw: np.random.Generator) -> list[np.ndarray]:
    return [np.asarray(each, dtype=float)[draw.integers(len(each), size=len(each))] for each in strata]
