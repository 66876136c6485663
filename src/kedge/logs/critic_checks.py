"""Formats a check of the critic as metrics, and as the row of `critic_checks.jsonl` that report and doctor read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kedge.algorithm.prefix_test import PrefixTest

FIGURES = {
    "critic/pairs_within": "pairs_within",
    "critic/pairs_within_ceiling": "ceiling_within",
    "critic/pairs_across": "pairs_across",
    "critic/pairs_across_ceiling": "ceiling_across",
    "critic/pairs_across_prompt_mean": "prompt_pairs_across",
    "critic/rank_correlation": "rank_correlation",
    "critic/rank_correlation_within": "rank_correlation_within",
    "critic/explained_variance": "explained_variance",
    "critic/explained_variance_ceiling": "ceiling_explained",
    "critic/explained_variance_prompt_mean": "prompt_explained_variance",
    "critic/error": "error",
    "critic/error_prompt_mean": "prompt_error",
    "critic/bias": "bias",
}
"""Name of the check's figure for each metric."""

MOST_POINTS = 500


def describe_check(test: PrefixTest) -> dict[str, float]:
    """The metrics of a check, without those that could not be determined."""
    figures = asdict(test)
    values = {name: figures[figure] for name, figure in FIGURES.items() if figures[figure] is not None}
    return {name: each["value"] if isinstance(each, dict) else each for name, each in values.items()}


def check_line(test: PrefixTest, update: int) -> str:
    """Describe in one line how well a critic orders prefixes, with intervals.

    Args:
        test: The check's figures.
        update: Updates completed; 0 for the start.
    """
    pairs = {"across prompts": test.pairs_across, "within a prompt": test.pairs_within}
    known = ", ".join(f"{interval} {where}" for where, interval in pairs.items() if interval is not None)
    found = f"ordered pairs {known}; chance is 0.50" if known else "no two prefixes could be compared"
    return f"critic check after update {update}: {found}"


def check_row(test: PrefixTest, prefixes: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """All figures with their intervals, the calibration, and the prefixes, subsampled evenly if there are very many."""
    step = -(-len(prefixes) // MOST_POINTS) or 1
    return {**asdict(test), "prefixes": prefixes[::step]}
