"""The reward model: how often it is right, whether it knows, and where its scores lie before and after PPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kedge.inspect.page.numbers import as_figure, histogram, rounded
from kedge.inspect.record import RunRecord

__all__ = ["policy_scores", "reward_model"]

NUM_BINS = 32


def reward_model(record: RunRecord) -> dict[str, Any]:
    """Accuracy beside a sense of length, calibration, and the scores of chosen and of rejected answers.

    The scores are those that PPO sees, after the normalisation.
    """
    summary = record.summary
    if record.stage != "reward":
        return {"empty": "This run trained no reward model."}
    if "accuracy" not in summary:
        return {"empty": "No comparison was held out to measure on: with data.eval_fraction above 0 some are."}
    return {
        "accuracy": rounded(summary["accuracy"]),
        "length_accuracy": rounded(summary.get("length_accuracy")),
        "num_pairs": summary.get("num_pairs"),
        "error": rounded(summary.get("calibration_error")),
        "bins": rounded(summary.get("calibration_bins") or []),
        "scores": _distributions(
            {name: _normalised(summary.get(f"{name}_scores"), summary) for name in ("chosen", "rejected")}
        ),
    }


def policy_scores(record: RunRecord) -> dict[str, Any]:
    """The scores of the policy's responses in its first and in its last update."""
    rows = [row for row in record.details if _is_distribution(row.get("scores"))]
    if record.stage != "ppo":
        return {"empty": "Only PPO has a policy's scores."}
    if not rows:
        return {"empty": "This run wrote no details.jsonl: runs of this version do, from their first update."}
    ends = {row["update"]: row["scores"] for row in (rows[0], rows[-1])}
    return {"scores": _distributions({f"update {update}": scores for update, scores in ends.items()})}


def _is_distribution(quantiles: Any) -> bool:
    return isinstance(quantiles, Sequence) and len(quantiles) > 1 and all(as_figure(q) is not None for q in quantiles)


def _normalised(quantiles: Any, summary: Mapping[str, Any]) -> list[float] | None:
    if not _is_distribution(quantiles):
        return None
    scale = summary.get("normalization") or {}
    mean, std = as_figure(scale.get("mean")) or 0.0, as_figure(scale.get("std")) or 1.0
    return [(score - mean) / std for score in quantiles]


def _distributions(quantiles: Mapping[str, Sequence[float] | None]) -> dict[str, Any] | None:
    """Histograms over the same bins, with each distribution's median."""
    known = {name: values for name, values in quantiles.items() if values}
    if not known:
        return None
    low, high = min(values[0] for values in known.values()), max(values[-1] for values in known.values())
    margin = (high - low) / NUM_BINS or 0.5
    edges = np.linspace(low - margin / 2, high + margin / 2, NUM_BINS + 1).tolist()
    return {
        "edges": rounded(edges),
        "named": [
            {"name": name, "shares": rounded(histogram(values, edges)), "median": rounded(values[len(values) // 2])}
            for name, values in known.items()
        ],
    }
