"""The reward model: accuracy, calibration, and distributions of its scores before and after PPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kedge.inspect.page.numbers import as_number, histogram, rounded
from kedge.inspect.record import RunRecord

__all__ = ["policy_scores", "reward_model"]

NUM_BINS = 32


def reward_model(record: RunRecord) -> dict[str, Any]:
    """Accuracy next to that of a length baseline, calibration, and the scores of chosen and rejected responses.

    The scores are normalized, as PPO uses them.
    """
    summary = record.summary
    if record.stage != "reward":
        return {"empty": ""}
    if "accuracy" not in summary:
        return {"empty": "No comparisons were held out: set data.eval_fraction above 0."}
    return {
        "accuracy": rounded(summary["accuracy"]),
        "length_accuracy": rounded(summary.get("length_accuracy")),
        "num_pairs": summary.get("num_pairs"),
        "error": rounded(summary.get("calibration_error")),
        "bins": rounded(summary.get("calibration_bins") or []),
        "scores": _distributions(
            {name: _normalized(summary.get(f"{name}_scores"), summary) for name in ("chosen", "rejected")}
        ),
    }


def policy_scores(record: RunRecord) -> dict[str, Any]:
    """The scores of the policy's responses in the first and the last update."""
    rows = [row for row in record.details if _is_distribution(row.get("scores"))]
    if record.stage != "ppo":
        return {"empty": ""}
    if not rows:
        return {"empty": "This run has no details.jsonl: it was written by an earlier version, or has no update yet."}
    ends = {row["update"]: row["scores"] for row in (rows[0], rows[-1])}
    return {"scores": _distributions({f"update {update}": scores for update, scores in ends.items()})}


def _is_distribution(quantiles: Any) -> bool:
    return isinstance(quantiles, Sequence) and len(quantiles) > 1 and all(as_number(q) is not None for q in quantiles)


def _normalized(quantiles: Any, summary: Mapping[str, Any]) -> list[float] | None:
    if not _is_distribution(quantiles):
        return None
    scale = summary.get("normalization") or {}
    mean, std = as_number(scale.get("mean")) or 0.0, as_number(scale.get("std")) or 1.0
    return [(score - mean) / std for score in quantiles]


def _distributions(quantiles: Mapping[str, Sequence[float] | None]) -> dict[str, Any] | None:
    """Histograms over shared bins, each with its median."""
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
