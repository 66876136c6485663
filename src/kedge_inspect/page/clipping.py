"""Shows clipping: the ratios of a run by the sign of the advantage, epoch by epoch."""

from __future__ import annotations

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
            _merged([epochs[at] for _, epochs, _ in updates if at < len(epochs)])
            for at in range(max(len(epochs) for _, epochs, _ in updates))
        ],
        "updates": [
            {
                "update": update,
                "low": bounds[0],
                "high": bounds[1],
                "epochs": [_merged([epoch]) for epoch in epochs],
            }
            for update, epochs, bounds in evenly_spaced(updates, MOST_UPDATES)
        ],
        "of": len(updates),
    }


def _epochs(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [epoch for epoch in row.get("epochs") or () if isinstance(epoch, Mapping) and epoch.get("ratios")]


def _loss(record: RunRecord) -> str:
    loss = record.choice("ppo.policy_loss") or "clipped"
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


def _merged(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several epochs: counts are added, and shares averaged by tokens."""
    weights = [sum(epoch["ratios"]["raised"]) + sum(epoch["ratios"]["lowered"]) for epoch in epochs]

    def mean(values: Sequence[Any]) -> float | None:
        """The rounded mean over values that are present; None if they have no weight."""
        pairs = [
            (weight, value) for weight, value in zip(weights, map(as_number, values), strict=True) if value is not None
        ]
        mass = sum(weight for weight, _ in pairs)
        return rounded(sum(weight * value for weight, value in pairs) / mass) if mass else None

    return {
        "tokens": sum(weights),
        **{name: mean([epoch.get(name) for epoch in epochs]) for name in ("clip_fraction", "approx_kl")},
        "cases": {case: mean([epoch.get("cases", {}).get(case) for epoch in epochs]) for case in CASES},
        "ratios": {
            sign: [sum(bins) for bins in zip(*(epoch["ratios"][sign] for epoch in epochs), strict=True)]
            for sign in ("raised", "lowered")
        },
    }
