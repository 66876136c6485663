"""The part of the page about a sweep: its settings with their results, curves, and the result over each field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kedge_base.texts import counted
from kedge_inspect.page.changes import figure
from kedge_inspect.page.curves import mean_curves
from kedge_inspect.page.numbers import rounded
from kedge_inspect.record import RunRecord
from kedge_inspect.sweeps import Goal, Row, Setting, Sweep, SweptRun, compare, final_value, find_goal, leaders

MOST_COLORS = 8
MOST_TIED = 4
LOG_RATIO = 10
"""Ratio of a field's largest and smallest value from which its axis is logarithmic."""

STATES = ("finished", "running", "stopped", "failed", "not started")


def sweep_part(sweep: Sweep, records: Mapping[str, RunRecord], *, most_points: int) -> dict[str, Any]:
    """The sweep's settings and runs in JSON types.

    Args:
        sweep: The sweep.
        records: The runs that have started, by name, in the order of the page.
        most_points: Largest number of points of a curve.
    """
    settings = sweep.settings
    finished = {name: record.metrics for name, record in records.items() if record.state == "finished"}
    known = {name for record in records.values() for row in record.metrics for name in row}
    goal = find_goal(sweep.stage, known, sweep.metric, sweep.goal)
    rows = compare(settings, finished, goal) if goal else [Row(setting, (), None, None) for setting in settings]
    order = [settings.index(row.setting) for row in rows]
    trials = [_trial(run, place, records.get(run.name), goal)
              for place, setting in enumerate(settings) for run in setting.runs]  # fmt: skip
    shown = [
        _setting(rows[order.index(place)], color, records, most_points) for place, color in enumerate(colors_of(order))
    ]
    return {
        "stage": sweep.stage,
        "metric": goal.metric if goal else sweep.metric,
        "fields": [{"name": name, "short": name.rpartition(".")[2]} for name in sweep.fields],
        "settings": shown,
        "order": order,
        "trials": trials,
        "plots": field_plots(settings),
        "sentences": _sentences(trials, rows, goal),
    }


def colors_of(order: Sequence[int]) -> list[int | None]:
    """The color of each setting; of many settings, only the best have one."""
    if len(order) <= MOST_COLORS:
        return list(range(len(order)))
    return [rank if (rank := order.index(place)) < MOST_COLORS else None for place in range(len(order))]


def field_plots(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Make a plot for each field with numeric values, with lines of settings that differ only in that field.

    Returns:
        Plots with the `field`, its `values` by setting, whether its axis is `log`, and `lines`: settings in the order
        of their values that agree in all other fields.
    """
    fields = list(dict.fromkeys(field for setting in settings for field in setting.values))
    plots: list[dict[str, Any]] = []
    for field in fields:
        numbers = [_number(setting.values.get(field)) for setting in settings]
        values = [number for number in numbers if number is not None]
        if len(values) < len(settings) or len(set(values)) < 2:
            continue
        lines: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for place, setting in enumerate(settings):
            rest = tuple((name, value) for name, value in setting.values.items() if name != field)
            lines.setdefault(rest, []).append(place)
        ordered = [sorted(line, key=values.__getitem__) for line in lines.values() if len(line) > 1]
        is_log = min(values) > 0 and max(values) / min(values) >= LOG_RATIO
        plots.append({"field": field, "values": values, "log": is_log, "lines": ordered})
    return plots


def _setting(row: Row, color: int | None, records: Mapping[str, RunRecord], most_points: int) -> dict[str, Any]:
    names = [run.name for run in row.setting.runs]
    begun = [records[name] for name in names if name in records]
    none: dict[str, float | None] = dict.fromkeys(("value", "low", "high"))
    result = row.interval.as_json() if row.interval else none
    return {
        "name": _short(row.setting) or "as configured",
        "brief": ", ".join(row.setting.values.values()) or "mean",
        "values": dict(row.setting.values),
        "color": color,
        **rounded({**result, "kl": row.kl}),
        "num_seeds": len(names),
        "num_values": len(row.values),
        "runs": [list(records).index(name) for name in names if name in records],
        "curves": mean_curves(begun, most_points=most_points) if begun else None,
    }


def _trial(run: SweptRun, setting: int, record: RunRecord | None, goal: Goal | None) -> dict[str, Any]:
    state = "failed" if run.error is not None else record.state if record else "not started"
    value = final_value(record.metrics, goal.metric) if record and goal else None
    kl = final_value(record.metrics, "objective/kl") if record else None
    return {
        "name": run.name,
        "setting": setting,
        "state": state,
        "update": record.metrics[-1]["update"] if record and record.metrics else 0,
        "value": rounded(value),
        "kl": rounded(kl),
        "error": run.error,
    }


def _sentences(trials: Sequence[Mapping[str, Any]], rows: Sequence[Row], goal: Goal | None) -> list[str]:
    """Sentences on the finished runs, the best setting and its certainty."""
    counts = [(state, sum(trial["state"] == state for trial in trials)) for state in STATES]
    others = [f"{count} {state}" for state, count in counts[1:] if count]
    first = ", ".join([f"{counts[0][1]} of {counted(len(trials), 'run')} finished", *others]) + "."
    compared = [row for row in rows if row.interval is not None]
    if goal is None or not compared or compared[0].interval is None:
        return [first, "No result yet: a setting's result is the mean over its finished runs."]
    if len(rows) == 1:
        return [first]
    best = compared[0]
    value = figure(compared[0].interval.value)
    direction = "highest" if goal.higher_is_better else "lowest"
    if (tied := len(leaders(compared))) > 1:
        names = "; ".join(_short(row.setting) for row in compared[: min(tied, MOST_TIED)])
        more = f"; and {tied - MOST_TIED} more" if tied > MOST_TIED else ""
        return [first, f"{tied} settings tie for the {direction} {goal.metric}, {value}: {names}{more}."]
    return [
        first,
        f"{_short(best.setting)} has the {direction} {goal.metric}: {value}{_range(best)}. {_doubt(compared)}",
    ]


def _range(row: Row) -> str:
    if row.interval is None or not row.interval.is_known:
        return ""
    return f" ({figure(row.interval.low)} to {figure(row.interval.high)}, {len(row.values)} seeds)"


def _doubt(compared: Sequence[Row]) -> str:
    """Say whether other settings may be as good as the best; empty for a single setting."""
    if any(row.interval is None or not row.interval.is_known for row in compared):
        return "With one seed, a difference may be noise."
    best, *others = [row.interval for row in compared if row.interval]
    overlapping = sum(other.low <= best.high and best.low <= other.high for other in others)
    if not overlapping:
        return "Its interval overlaps no other." if others else ""
    return f"Its interval overlaps {counted(overlapping, 'other')}: more seeds may change the order."


def _short(setting: Setting) -> str:
    """The setting without the sections of its fields."""
    return ", ".join(f"{field.rpartition('.')[2]}={value}" for field, value in setting.values.items())


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
