"""The table of predicted and measured memory."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from bench.plan.cases import CASES, Case
from bench.tables import renewed

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]


def with_table(page: str, results: Results) -> str:
    """The page with the table between its marks."""
    return renewed(page, "plan", f"{_table(results)}\n\n{summary(results)}")


def summary(results: Results) -> str:
    """Median and worst error of each prediction."""
    lines = []
    for name, errors in _errors(results).items():
        worst = max(errors, key=abs)
        middle = 100 * median(map(abs, errors))
        lines.append(f"- {name}: median {middle:.1f} %, worst {100 * worst:+.1f} %, of {len(errors)} runs")
    grown = [row for row in results.values() if "heap" in row.get("process", {})]
    if grown:
        heaps = sorted(row["process"]["heap"] / row["live"]["live"] for row in grown)
        rest = sorted(row["process"]["process"] - row["process"]["heap"] for row in grown)
        spans = f"{heaps[0]:.2f} to {heaps[-1]:.2f} times the live bytes, median {median(heaps):.2f}"
        others = f"{rest[0]:,.0f} to {rest[-1]:,.0f} MiB, median {median(rest):,.0f}"
        lines.append(f"- the heap: {spans}; what the process grows by besides: {others}; of {len(grown)} runs")
    return "\n".join(lines)


def _errors(results: Results) -> dict[str, list[float]]:
    """Relative errors by what is predicted."""
    found: dict[str, list[float]] = {}
    for case in CASES:
        row = results.get(case.name, {})
        for label, how, predicted, measured in COLUMNS:
            if how in row and "live" in row and measured in (both := {**row["live"], **row.get(how, {})}):
                found.setdefault(label, []).append(both[predicted] / both[measured] - 1)
    return found


COLUMNS = (
    ("planned against live bytes", "live", "planned", "live"),
    ("time of an update", "process", "planned seconds", "seconds"),
)


def _table(results: Results) -> str:
    names = ["model", "adapter, critic", "rows", "planned", "live bytes", "error"]
    names += ["heap", "process", "update", "measured"]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for case in CASES:
        row = results.get(case.name, {})
        if "live" in row:
            lines.append(f"| {' | '.join(_cells(case, row))} |")
    return "\n".join(lines)


def _cells(case: Case, row: Mapping[str, Mapping[str, Any]]) -> list[str]:
    live, process = (row.get(how, {}) for how in ("live", "process"))
    vocabulary = "128k" if case.vocabulary == 128_000 else "2k"
    stage = f": kedge {case.stage}" if case.stage != "ppo" else ""
    recomputed = ", recomputed" if case.checkpointing else ""
    return [
        f"{case.family} {case.layers}×{case.hidden}, {vocabulary}{' in bf16' if case.precision == 'bf16' else ''}",
        f"{case.adapter if case.adapter != 'none' else 'full'}, {case.critic}{recomputed}{stage}",
        f"{case.rows}×({case.prompt}+{case.response})",
        f"{live['planned']:,.1f}",
        f"{live['live']:,.1f}",
        f"{100 * (live['planned'] / live['live'] - 1):+.1f} %",
        f"{process['heap']:,.0f}" if "heap" in process else "–",
        f"{process['process']:,.0f}" if "heap" in process else "–",
        f"{process['planned seconds']:.1f} s" if process else "–",
        f"{process['seconds']:.1f} s" if process else "–",
    ]
