"""Computes the curves of a run, or of runs that differ only in their seed: the mean with Student's interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kedge_base.intervals import mean_interval
from kedge_inspect.look import matches
from kedge_inspect.page.looks import look_of
from kedge_inspect.page.numbers import Reduce, as_number, blocks, rounded
from kedge_inspect.record import RunRecord
from kedge_inspect.resolved import KL_COSTS, charges_kl


def curves(record: RunRecord, *, most_points: int) -> dict[str, Any]:
    """The metrics of a run as columns, with the update, responses and seconds of each point; see `mean_curves`."""
    found = mean_curves([record], most_points=most_points)
    return {name: found[name] for name in ("update", "seconds", "items", "every", "columns")}


def drawn_metrics(record: RunRecord) -> list[str]:
    """The metrics of a run that some chart shows."""
    patterns = [pattern for panel in look_of(record.stage).panels for pattern in panel.lines]
    hidden = {"update"} if charges_kl(record) else {"update", *KL_COSTS}
    names = dict.fromkeys(name for row in record.metrics for name in row if name not in hidden)
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]


def reduction(name: str) -> Reduce:
    """The reduction of several updates to one value: the maximum, the minimum, or the mean."""
    if name.endswith("_max"):
        return max
    return min if name.endswith("_min") else fmean


Rows = Mapping[int, Mapping[str, Any]]
"""The rows of a run's metrics by update."""


def mean_curves(records: Sequence[RunRecord], *, most_points: int) -> dict[str, Any]:
    """The mean over seeds of every metric, in columns, with a band.

    There is a mean and its 95 % interval where at least two seeds have a value. Where only one of several seeds has a
    value, because it is ahead or the others ended early, the value is in `tails` instead, since it does not continue
    the mean. Long runs are thinned before the seeds are combined, to one value per seed: the mean of `every`
    consecutive updates, or the maximum of `_max` metrics and the minimum of `_min` metrics.

    Args:
        records: The runs of one setting that have started; at least one.
        most_points: Largest number of points of a curve.

    Returns:
        `update`, `seconds` (sums of the mean time of an update), `items`, `every`, and by metric `columns`, `low`,
        `high`, `tails`, and `seeds`, the number of seeds at each point.
    """
    seeds = [{int(row["update"]): row for row in record.metrics} for record in records]
    updates = sorted({update for rows in seeds for update in rows})
    parts = blocks(updates, most_points)
    each = look_of(records[0].stage).items_per_update(records[0])
    names = dict.fromkeys(name for record in records for name in drawn_metrics(record))
    found = {name: _over_seeds(name, seeds, parts) for name in names}
    shown = {name: columns for name, columns in found.items() if any(columns["seeds"])}
    return {
        "update": [part[-1] for part in parts],
        "seconds": rounded(_seconds(seeds, parts), 6),
        "items": None if each is None else [part[-1] * each for part in parts],
        "every": len(parts[0]) if parts else 1,
        **{
            key: rounded({name: columns[key] for name, columns in shown.items()})
            for key in ("columns", "low", "high", "tails", "seeds")
        },
    }


def _over_seeds(name: str, seeds: Sequence[Rows], parts: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    points = [_values(name, seeds, part) for part in parts]
    is_alone = sum(any(as_number(row.get(name)) is not None for row in rows.values()) for rows in seeds) == 1
    intervals = [mean_interval(values) if len(values) > 1 else None for values in points]
    singles = [values[0] if len(values) == 1 else None for values in points]
    means = [interval.value if interval else None for interval in intervals]
    return {
        "columns": singles if is_alone else means,
        "low": [interval.low if interval else None for interval in intervals],
        "high": [interval.high if interval else None for interval in intervals],
        "tails": [None] * len(parts) if is_alone else singles,
        "seeds": [len(values) for values in points],
    }


def _values(name: str, seeds: Sequence[Rows], part: Sequence[int]) -> list[float]:
    """One value per seed that has the metric in these updates."""
    found = [
        [number for update in part if update in rows and (number := as_number(rows[update].get(name))) is not None]
        for rows in seeds
    ]
    return [reduction(name)(numbers) for numbers in found if numbers]


def _seconds(seeds: Sequence[Rows], parts: Sequence[Sequence[int]]) -> list[float]:
    """Time at the end of each part; it never decreases, also where a slow seed ends."""
    total = 0.0
    found = []
    for part in parts:
        for update in part:
            total += fmean(as_number(rows[update].get("time/update")) or 0.0 for rows in seeds if update in rows)
        found.append(total)
    return found
