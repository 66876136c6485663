"""Where the clip holds tokens back: the ratios of a run, by the advantage's sign, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.inspect.page.numbers import as_figure, evenly, rounded
from kedge.inspect.record import RunRecord
from kedge.logs.details import WIDEST

__all__ = ["clipping", "share_below"]

MOST_UPDATES = 40

CASES = ("raised", "raised_held", "lowered", "lowered_held")


def clipping(record: RunRecord) -> dict[str, Any]:
    """The clip's bounds, and the ratios and cases of each epoch: over the whole run, and of some of its updates.

    Returns:
        `low` and `high`, the bounds of ρ; `whole`, the epochs over all updates; `updates`, some of the updates, `of`
        so many, with their epochs.
    """
    rows = [row for row in record.details if _epochs(row)]
    if not rows:
        return {"empty": _why_empty(record)}
    bounds = low, high = _bounds(record)
    num_epochs = max(len(_epochs(row)) for row in rows)
    return {
        "low": low,
        "high": high,
        "loss": record.setting("ppo.policy_loss") or "clipped",
        "span": WIDEST,
        "whole": [
            _together([_epochs(row)[number] for row in rows if number < len(_epochs(row))], bounds)
            for number in range(num_epochs)
        ],
        "updates": [
            {"update": rows[index]["update"], "epochs": [_together([epoch], bounds) for epoch in _epochs(rows[index])]}
            for index in evenly(len(rows), MOST_UPDATES)
        ],
        "of": len(rows),
    }


def share_below(counts: Sequence[float], bound: float) -> float:
    """The share of a histogram of log ρ that lies below a bound, the bin around the bound taken as evenly filled."""
    total = sum(counts)
    position = min(max((bound + WIDEST) / (2 * WIDEST), 0.0), 1.0) * len(counts)
    whole = int(position)
    part = counts[whole] * (position - whole) if whole < len(counts) else 0.0
    return (sum(counts[:whole]) + part) / total if total else 0.0


def _epochs(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [epoch for epoch in row.get("epochs") or () if isinstance(epoch, Mapping) and epoch.get("ratios")]


def _bounds(record: RunRecord) -> tuple[float, float]:
    below = as_figure(record.setting("ppo.clip_range"))
    below = 0.2 if below is None else below
    above = as_figure(record.setting("ppo.clip_range_high"))
    return 1 - below, 1 + (below if above is None else above)


def _together(epochs: Sequence[Mapping[str, Any]], bounds: tuple[float, float]) -> dict[str, Any]:
    """Epochs as one: counts are added, shares weighed by their tokens.

    `pulled` are the shares of all tokens whose ratio is beyond the other bound: not held back, but pulled back in.
    """
    weights = [sum(epoch["ratios"]["raised"]) + sum(epoch["ratios"]["lowered"]) for epoch in epochs]
    ratios = {
        sign: [sum(bins) for bins in zip(*(epoch["ratios"][sign] for epoch in epochs), strict=True)]
        for sign in ("raised", "lowered")
    }
    share = {sign: sum(counts) / (sum(weights) or 1) for sign, counts in ratios.items()}
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in bounds)
    return {
        "tokens": sum(weights),
        "clip_fraction": rounded(_weighed(weights, [epoch.get("clip_fraction") for epoch in epochs])),
        "approx_kl": rounded(_weighed(weights, [epoch.get("approx_kl") for epoch in epochs])),
        "cases": {
            case: rounded(_weighed(weights, [epoch.get("cases", {}).get(case) for epoch in epochs])) for case in CASES
        },
        "pulled": {
            "raised": rounded(share["raised"] * share_below(ratios["raised"], low)),
            "lowered": rounded(share["lowered"] * (1 - share_below(ratios["lowered"], high))),
        },
        "ratios": ratios,
    }


def _weighed(weights: Sequence[float], values: Sequence[Any]) -> float | None:
    """The mean of the figures that are there; None where no token counts."""
    pairs = [(weight, figure) for weight, value in zip(weights, values, strict=True)
             if (figure := as_figure(value)) is not None]  # fmt: skip
    mass = sum(weight for weight, _ in pairs)
    return sum(weight * figure for weight, figure in pairs) / mass if mass else None


def _why_empty(record: RunRecord) -> str:
    if record.stage != "ppo":
        return "Only PPO clips."
    return "This run wrote no details.jsonl: runs of this version do, from their first update."
