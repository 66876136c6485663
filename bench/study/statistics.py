"""Interquartile means with stratified bootstrap intervals, and the probability of improvement.

The method of Agarwal et al. 2021 (arXiv 2108.13264). Their package, rliable, has had no release since August 2024 and
needs scipy, arch, pandas and seaborn; these few functions need numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from kedge_base.intervals import Interval

NUM_RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95

Strata: TypeAlias = "Sequence[Sequence[float] | np.ndarray]"
"""The scores of one algorithm: for each task, one per seed; with a leading axis of resamples, if any."""


def interquartile_mean(strata: Strata) -> np.ndarray:
    """The mean of the middle half of all scores, over tasks and seeds; ⌊n/4⌋ are cut at either end.

    Args:
        strata: Scores by task (…, seeds), in comparable units if there is more than one task.

    Returns:
        One mean for each resample, (…).

    Source: Agarwal et al. 2021, section 4.3.
    """
    ordered = np.sort(np.concatenate([np.asarray(each, dtype=float) for each in strata], axis=-1), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def improvement(ours: Strata, theirs: Strata) -> np.ndarray:
    """The probability that a run of the first algorithm beats one of the second, averaged over tasks; ties count half.

    Args:
        ours: Scores of the first, by task (…, seeds).
        theirs: Scores of the second, of the same tasks (…, its seeds).

    Returns:
        One probability for each resample, (…).

    Source: Agarwal et al. 2021, section 4.3, equation 2.
    """
    shares: list[np.ndarray] = []
    for first, second in zip(ours, theirs, strict=True):
        difference = np.asarray(first, dtype=float)[..., :, None] - np.asarray(second, dtype=float)[..., None, :]
        shares.append(((1 + np.sign(difference)) / 2).mean(axis=(-2, -1)))
    return np.mean(shares, axis=0)


def with_interval(statistic: Callable[..., np.ndarray], *algorithms: Strata, seed: int = 0) -> Interval:
    """A statistic with its 95 % percentile interval, from resamples of the seeds within each task.

    Args:
        statistic: Such as `interquartile_mean`; its arguments are the algorithms' scores.
        algorithms: The scores of each.
        seed: Of the resamples.

    Source: Agarwal et al. 2021, section 4.1 (stratified bootstrap).
    """
    draw = np.random.default_rng(seed)
    found = statistic(*([_resampled(each, draw) for each in strata] for strata in algorithms))
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(statistic(*algorithms)), float(low), float(high))


def _resampled(scores: Sequence[float] | np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Scores of one task, drawn with replacement: (resamples, seeds)."""
    values = np.asarray(scores, dtype=float)
    return values[draw.integers(len(values), size=(NUM_RESAMPLES, len(values)))]
