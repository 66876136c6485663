"""The verdict: sentences and a table of first and last values."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from kedge_inspect.look import Row
from kedge_inspect.page.changes import ends_of
from kedge_inspect.page.looks import look_of
from kedge_inspect.page.numbers import numbers_of, rounded
from kedge_inspect.record import RESULTS, RunRecord
from kedge_inspect.resolved import KL_COSTS, charges_kl


def first_and_last(record: RunRecord) -> list[dict[str, Any]]:
    """Rows of the table: first and last value of each metric.

    `change` is `better` or `worse` if the metric has a good direction and moved by more than noise, or else empty.
    """
    rows = look_of(record.stage).rows
    if not charges_kl(record):
        rows = tuple(row for row in rows if row.metric not in KL_COSTS)
    judged = tuple(Row(metric, f"Judge {metric.removeprefix('score/')}", good="up") for metric in record.judges)
    found = ((row, ends_of(record, row.metric)) for row in (*rows[:1], *judged, *rows[1:]))
    return [
        {
            "label": row.label,
            "unit": row.unit,
            **rounded({"first": ends.first, "last": ends.last}),
            "change": ("better" if (ends.last > ends.first) == (row.good == "up") else "worse")
            if row.good and ends.is_change
            else "",
        }
        for row, ends in found
        if ends
    ]


def describe_run(record: RunRecord) -> list[str]:
    """One or two sentences about the run, with further ones if responses were thrown away or it ended early."""
    sentences = look_of(record.stage).sentences
    progress = _progress(record)
    if record.stage in RESULTS:
        return sentences(record, progress)
    if not record.metrics:
        return [f"{progress}.", "No metrics yet."]
    ended = [f"It ended early: {record.ended_early}."] if record.ended_early else []
    return [*sentences(record, progress), *ended]


def data_sentences(record: RunRecord) -> list[str]:
    """One sentence per role of the data; none for runs that did not write `data.json`."""
    lines = {role: usage.get("line") for role, usage in record.data.items() if isinstance(usage, Mapping)}
    return [f"{role.replace('_', ' ').capitalize()}: {line}." for role, line in lines.items() if isinstance(line, str)]


def _progress(record: RunRecord) -> str:
    """The run's progress: `PPO is at update 12 of 60`."""
    look = look_of(record.stage)
    title = record.trainer.title if record.trainer else look.title
    # Other libraries may log every tenth step only.
    count = record.metrics[-1]["update"] if record.trainer else len(record.metrics)
    total = look.total(record)
    of = "" if total is None else f" of {total:,}"
    if record.state == "running":
        return f"{title} is at {look.unit} {count:,}{of}"
    if record.state == "stopped":
        return f"{title} stopped after {look.unit} {count:,}{of}"
    each = look.items_per_update(record)
    given = record.arguments
    if each and (passes := given.get("steps_per_generation")):  # TRL counts these backward passes num_iterations times
        each *= given.get("gradient_accumulation_steps", 1) / passes / given.get("num_iterations", 1)
    times = numbers_of(record.metrics, "time/update")
    done = [_duration(fmean(times) * count)] if times else []
    done += [f"{count * each:,.0f} {look.items}"] if each and look.items else []
    steps = f"{of} {look.unit}s" if record.ended_early and of else f" {look.unit}" if count == 1 else f" {look.unit}s"
    return f"{title} ran {count:,}{steps}" + (f" ({', '.join(done)})" if done else "")


def _duration(seconds: float) -> str:
    """A time in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
