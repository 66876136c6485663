"""An evaluation on the page: outcomes, scores and lengths of both sides, the judge's consistency, every pair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.inspect.page.distributions import distributions
from kedge.inspect.page.excerpts import fitting, shortened
from kedge.inspect.page.numbers import as_number, rounded
from kedge.inspect.record import RunRecord

__all__ = ["describe_evaluation", "evaluation"]

FIGURES = (
    "model", "against", "judge", "judge_mode", "num_prompts", "num_judged", "num_equal", "won", "tied", "lost",
    "win_rate", "score", "score_against", "kl", "length", "length_against", "eos_rate", "eos_rate_against",
    "longer_wins", "position_bias",
)  # fmt: skip

OUTCOMES = {"model": "won", "tie": "tied", "against": "lost"}


def evaluation(record: RunRecord, *, most_bytes: int) -> dict[str, Any]:
    """The figures of `summary.json` and the pairs of `judgments.jsonl`.

    Args:
        record: The run.
        most_bytes: Size limit of the pairs' JSON; of larger evaluations, evenly spaced pairs are shown.

    Returns:
        The figures by name; `orders` of a pairwise judge; `frontier`; `scores` and `lengths` as distributions; `pairs`
        with the number `kept` and `of` all. `empty` with the reason for a run without them.
    """
    if record.stage != "evaluate":
        return {"empty": "This run is not an evaluation."}
    if record.setting("evaluate.critic") is not None:
        return {"empty": ""}
    if not record.summary:
        return {"empty": _why_empty(record)}
    kept = fitting([_pair(row) for row in record.results], most_bytes)
    return {
        **rounded({name: record.summary.get(name) for name in FIGURES}),
        "num_unequal_lengths": _num_unequal_lengths(record.results),
        "orders": _orders(record.results),
        "frontier": _frontier(record.summary),
        "scores": _both_sides(record, "score"),
        "lengths": _lengths(record),
        "pairs": kept,
        "kept": len(kept),
        "of": len(record.results),
    }


def describe_evaluation(record: RunRecord) -> list[str]:
    """Two sentences: the outcome, and whether it tells the two sides apart."""
    summary = record.summary
    if not summary:
        return [_why_empty(record)]
    if "win_rate" not in summary:
        return [f"The critic of {summary.get('critic')} was checked, with rewards from {summary.get('reward')}."]
    rate, against = summary["win_rate"], summary.get("against", "references")
    first = (
        f"{summary['model']} won {summary['won']:,}, tied {summary['tied']:,} and lost {summary['lost']:,} of "
        f"{summary['num_judged']:,} prompts against {against}, judged by {summary['judge']}: a win rate of "
        f"{rate['value']:.0%} ({rate['low']:.0%} to {rate['high']:.0%}), ties counting half."
    )
    if rate["low"] <= 0.5 <= rate["high"]:
        return [first, "The interval includes 50%: this evaluation does not tell the two apart."]
    return [first, f"The judge prefers {summary['model'] if rate['value'] > 0.5 else against}."]


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: shortened(str(row.get(name, ""))) for name in ("prompt", "completion", "completion_against")}
    named = ("score", "score_against", "length", "length_against")
    figures = {name: rounded(as_number(row[name])) for name in named if name in row}
    orders = [OUTCOMES.get(str(row.get(f"winner_shown_{place}")), "") for place in ("first", "second")]
    shown = {"orders": orders} if "winner_shown_first" in row else {}
    return {"outcome": OUTCOMES.get(str(row.get("winner")), "undecided"), **texts, **figures, **shown}


def _num_unequal_lengths(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Decided pairs whose lengths differ; None for evaluations of earlier versions, which did not write lengths."""
    if not all("length" in row for row in rows):
        return None
    return sum(row["length"] != row["length_against"] and row.get("winner") in OUTCOMES for row in rows)


def _orders(rows: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """How often a pairwise judge had the same winner in both orders, and which position it preferred otherwise."""
    both = [(row.get("winner_shown_first"), row.get("winner_shown_second")) for row in rows]
    decided = [(one, two) for one, two in both if one in OUTCOMES and two in OUTCOMES]
    if not decided:
        return None
    return {
        "pairs": len(decided),
        "same": sum(one == two for one, two in decided),
        "first": sum((one, two) == ("model", "against") for one, two in decided),
        "second": sum((one, two) == ("against", "model") for one, two in decided),
    }


def _frontier(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Score, or win rate where the judge has none, over √KL; the opponent is at KL 0."""
    others = [point for point in summary.get("frontier") or () if isinstance(point, Mapping)]
    known = [point for point in (summary, *others) if isinstance(point.get("kl"), Mapping)]
    if not others or not known:
        return None
    scored = isinstance(summary.get("score_against"), Mapping)
    even = {"value": 0.5, "low": 0.5, "high": 0.5}
    start = {"model": summary.get("against"), "kl": {"value": 0.0}, "win_rate": even}
    points = [{**start, "score": summary.get("score_against")}, *known]
    name = "score" if scored else "win_rate"
    shown = [
        {"model": str(point.get("model")), "root_kl": math.sqrt(max(0.0, point["kl"]["value"])), **_ends(point[name])}
        for point in points
        if isinstance(point.get(name), Mapping)
    ]
    return {"of": name.replace("_", " "), "points": rounded(sorted(shown, key=lambda point: point["root_kl"]))}


def _ends(figures: Mapping[str, Any]) -> dict[str, float]:
    """A figure with the ends of its error bar; of a single prompt they are unknown, and the bar has no length."""
    return {name: figures["value"] if figures[name] is None else figures[name] for name in ("value", "low", "high")}


def _both_sides(record: RunRecord, name: str) -> dict[str, Any] | None:
    sides = {"model": name, "against": f"{name}_against"}
    named = {side: [as_number(row.get(key)) for row in record.results] for side, key in sides.items()}
    return distributions({side: [value for value in values if value is not None] for side, values in named.items()})


def _lengths(record: RunRecord) -> dict[str, Any] | None:
    """Lengths in tokens; in characters for evaluations of earlier versions, which did not write tokens."""
    if found := _both_sides(record, "length"):
        return {"unit": "tokens", **found}
    texts = {"model": "completion", "against": "completion_against"}
    found = distributions({side: [len(str(row.get(key, ""))) for row in record.results] for side, key in texts.items()})
    return found and {"unit": "characters", **found}


def _why_empty(record: RunRecord) -> str:
    if record.state == "running":
        return "The evaluation is running. Its result comes at the end."
    return "The evaluation stopped before it had a result."
