"""The evaluations on held-out prompts during PPO as a table, with the best one marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.inspect.page.numbers import as_number, evenly_spaced, rounded
from kedge.inspect.page.wording import figure
from kedge.inspect.record import RunRecord

__all__ = ["held_out"]

MOST_ROWS = 40
COLUMNS = {
    "eval/score": "score",
    "eval/win_rate": "win rate",
    "eval/kl": "KL",
    "eval/length": "length",
    "eval/eos_rate": "EOS rate",
}
SHARES = ("eval/win_rate", "eval/eos_rate")


def held_out(record: RunRecord) -> dict[str, Any]:
    """A row for each evaluation, evenly spaced ones of a long run, with the best one among them.

    `empty` is the reason if there is no evaluation.
    """
    rows = record.evaluations
    if not rows:
        return {"empty": "Set ppo.eval_every to evaluate on held-out prompts." if record.stage == "ppo" else ""}
    best = record.best or _best(rows)
    metrics = {metric: label for metric, label in COLUMNS.items() if any(metric in row for row in rows)}
    decisive = str(best.get("metric", ""))
    if decisive.startswith("eval/") and decisive not in COLUMNS:
        metrics[decisive] = decisive.removeprefix("eval/")
    spaced = set(evenly_spaced(len(rows), MOST_ROWS))
    shown = [row for at, row in enumerate(rows) if at in spaced or row["update"] == best.get("update")]
    return {
        "sentence": _sentence(record, best),
        "left_out": len(rows) - len(shown),
        "columns": [{"label": label, "is_share": metric in SHARES} for metric, label in metrics.items()],
        "rows": [
            {
                "update": row["update"],
                "is_best": row["update"] == best.get("update"),
                "values": rounded([as_number(row.get(metric)) for metric in metrics]),
            }
            for row in shown
        ],
    }


def _best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The best evaluation of a run that marks none: by the win rate, or else by the score; the first of equal ones."""
    metric = next((name for name in ("eval/win_rate", "eval/score") if any(name in row for row in rows)), "")
    valued = [(value, row) for row in rows if (value := as_number(row.get(metric))) is not None]
    if not valued:
        return {}
    value, row = max(valued, key=lambda each: each[0])
    return {"update": row["update"], "metric": metric, "value": value}


def _sentence(record: RunRecord, best: Mapping[str, Any]) -> str:
    value = as_number(best.get("value"))
    if value is None:
        return ""
    place = f"after update {best['update']:,}" if best["update"] else "at the start"
    kept = f"is kept: {record.folder.name}@best is its model" if record.is_best_kept else "is not kept"
    return f"The best {best['metric']} is {figure(value)}, {place}. The checkpoint {kept}."
