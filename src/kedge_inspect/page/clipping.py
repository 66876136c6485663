"""Shows clipping: the ratios of a run by the sign of the advantage, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kedge_base.run_folder.record_format import WIDEST
from kedge_inspect.page.looks import has_part
from kedge_inspect.page.numbers import as_number, evenly_spaced, rounded
from kedge_inspect.record import RunRecord

MOST_UPDATES = 40

NO_DETAILS = "This run has no details.jsonl: it has no update yet."
CASES = ("raised", "raised_held", "lowered", "lowered_held")


def clipping(record: RunRecord) -> dict[str, Any]:
    """The clip's bounds, and the ratios and cases of each epoch, over the whole run and for some of its updates.

    Returns:
        `low` and `high`, the bounds of ρ in the last update; `whole`, the epochs over all updates; `updates`, the
        epochs of some of the updates and their bounds; `of`, the number of all updates.
    """
    metrics = {row["update"]: row for row in record.metrics}
    updates = [
        (row["update"], epochs, _bounds(record, metrics.get(row["update"], {})))
        for row in record.details
        if (epochs := _epochs(row))
    ]
    if not updates:
        return {"empty": NO_DETAILS if has_part(record, "clipping") else ""}
    low, high = updates[-1][2]
    return {
        "low": low,
        "high": high,
        "loss": _loss(record),
        "span": WIDEST,
        "whole": [
            _merged([(epochs[at], bounds) for _, epochs, bounds in updates if at < len(epochs)])
            for at in range(max(len(epochs) for _, epochs, _ in updates))
        ],
        "updates": [
            {
                "update": update,
                "low": bounds[0],
                "high": bounds[1],
                "epochs": [_merged([(epoch, bounds)]) for epoch in epochs],
            }
            for update, epochs, bounds in evenly_spaced(updates, MOST_UPDATES)
        ],
        "of": len(updates),
    }


def share_below(counts: Sequence[float], bound: float) -> float:
    """The share of a histogram of log ρ below a bound; the bin that contains the bound is interpolated linearly."""
    total = sum(counts)
    position = min(max((bound + WIDEST) / (2 * WIDEST), 0.0), 1.0) * len(counts)
    whole = int(position)
    part = counts[whole] * (position - whole) if whole < len(counts) else 0.0
    return (sum(counts[:whole]) + part) / total if total else 0.0


def _epochs(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [epoch for epoch in row.get("epochs") or () if isinstance(epoch, Mapping) and epoch.get("ratios")]


def _loss(record: RunRecord) -> str:
    setting: object = record.setting("ppo.policy_loss") or "clipped"
    loss = (
        ", ".join(map(str, setting)) if isinstance(setting, Mapping) else str(setting)
    )  # the setting is a name, or {name: parameter}
    whole = {"sequence": ", by whole responses", "turn": ", by whole turns"}
    return loss + whole.get(str(record.setting("ppo.ratio")), "")


def _bounds(record: RunRecord, metrics: Mapping[str, Any]) -> tuple[float, float]:
    """The clip's bounds in an update; PPO's where the configured ones are for the ratio of whole responses or turns,
    not of tokens.
    """
    if record.setting("ppo.ratio") in ("sequence", "turn"):
        return 0.8, 1.2
    below, above = (
        as_number(metrics.get(f"schedule/{name}", record.setting(name)))
        for name in ("ppo.clip_range", "ppo.clip_range_high")
    )
    below = 0.2 if below is None else below
    return 1 - below, 1 + (below if above is None else above)


def _merged(parts: Sequence[tuple[Mapping[str, Any], tuple[float, float]]]) -> dict[str, Any]:
    """Merge several epochs, each with its bounds: counts are added, and shares averaged by tokens.

    `pulled`: the shares of all tokens with a ratio outside the range on the side that is not clipped.
    """
    epochs = [epoch for epoch, _ in parts]
    weights = [sum(epoch["ratios"]["raised"]) + sum(epoch["ratios"]["lowered"]) for epoch in epochs]
    ratios = {
        sign: [sum(bins) for bins in zip(*(epoch["ratios"][sign] for epoch in epochs), strict=True)]
        for sign in ("raised", "lowered")
    }
    outside = [_outside(epoch["ratios"], *bounds) for epoch, bounds in parts]
    return {
        "tokens": sum(weights),
        "clip_fraction": rounded(_weighted_mean(weights, [epoch.get("clip_fraction") for epoch in epochs])),
        "approx_kl": rounded(_weighted_mean(weights, [epoch.get("approx_kl") for epoch in epochs])),
        "cases": {
            case: rounded(_weighted_mean(weights, [epoch.get("cases", {}).get(case) for epoch in epochs]))
            for case in CASES
        },
        "pulled": {
            sign: rounded(sum(counts) / (sum(weights) or 1))
            for sign, counts in zip(("raised", "lowered"), zip(*outside, strict=True), strict=True)
        },
        "ratios": ratios,
    }


def _outside(ratios: Mapping[str, Sequence[float]], low: float, high: float) -> tuple[float, float]:
    """Count the raised tokens with a ratio below the range, and the lowered ones with a ratio above it."""
    raised, lowered = ratios["raised"], ratios["lowered"]
    from_low, from_high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    return sum(raised) * share_below(raised, from_low), sum(lowered) * (1 - share_below(lowered, from_high))


def _weighted_mean(weights: Sequence[float], values: Sequence[Any]) -> float | None:
    """The mean over values that are present; None if they have no weight."""
    pairs = [(weight, number) for weight, value in zip(weights, values, strict=True)
             if (number := as_number(value)) is not None]  # fmt: skip
    mass = sum(weight for weight, _ in pairs)
    return sum(weight * number for weight, number in pairs) / mass if mass else None
