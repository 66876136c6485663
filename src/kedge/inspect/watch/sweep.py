"""The terminal view of a sweep: a line for each run, and the best setting so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kedge.inspect.doctor import Examination
from kedge.inspect.record import RunRecord
from kedge.inspect.sweeps import Goal, Sweep, SweptRun, compare, find_goal, leaders, read_sweep
from kedge.inspect.watch.follower import Follower
from kedge.inspect.watch.sparkline import sparkline
from kedge.logs.progress import format_figure
from kedge.system.output import is_run
from kedge.system.texts import printable

__all__ = ["SweepFollower", "SweepSnapshot", "draw_sweep"]

STATES = {"running": ("● running", "bold green"), "failed": ("✕ failed", "bold red"),
          "stopped": ("✕ stopped", "bold red"), "finished": ("■ finished", "bold blue"),
          "waiting": ("○ not started", "dim")}  # fmt: skip
"""How each state is shown; on a low terminal, runs of the first ones are shown first."""

SPARKLINE_WIDTH = 24
WIDE = 100
MOST_METRIC = 24
"""Columns of the metric's name."""

OTHER_LINES = 7


@dataclass(frozen=True)
class SweepSnapshot:
    """A sweep at one moment: the sweep, and the runs that have begun, by name."""

    sweep: Sweep
    records: dict[str, RunRecord]

    def state(self, run: SweptRun) -> str:
        """`running`, `failed`, `stopped`, `finished` or `waiting`."""
        if run.error is not None:
            return "failed"
        return self.records[run.name].state if run.name in self.records else "waiting"

    @property
    def goal(self) -> Goal | None:
        """What the runs are compared by; None until one of them has the metric."""
        known = {name for record in self.records.values() for row in record.metrics for name in row}
        return find_goal(self.sweep.stage, known, self.sweep.metric, self.sweep.goal)


class SweepFollower:
    """Follows the runs of a sweep; each row is read once.

    Args:
        folder: The sweep's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._followers: dict[str, Follower] = {}

    def look(self) -> SweepSnapshot:
        """The current state of the sweep.

        Raises:
            DataError: A file is damaged.
        """
        sweep, records = read_sweep(self.folder), dict[str, RunRecord]()
        for run in sweep.runs:
            if is_run(run.folder):
                follower = self._followers.setdefault(run.name, Follower(run.folder, lambda _: Examination((), 0)))
                records[run.name] = follower.look().record
        return SweepSnapshot(sweep, records)


def draw_sweep(snapshot: SweepSnapshot, console: Console, *, height: int | None = None) -> Group:
    """A frame as wide as the console.

    Args:
        snapshot: The sweep to draw.
        console: The console it will be shown on.
        height: Lines available; if there are more runs, those that run or failed are shown. None shows all.
    """
    sweep, runs = snapshot.sweep, snapshot.sweep.runs
    shown = runs if height is None else _most_important(snapshot, max(1, height - OTHER_LINES))
    parts: list[RenderableType] = [_head(snapshot), _table(snapshot, shown, console.width)]
    if len(shown) < len(runs):
        parts.append(Text(f"and {len(runs) - len(shown)} more runs", style="dim"))
    failed = [run for run in shown if run.error is not None]
    parts += [Text(printable(f"{run.name} failed: {run.error}"), style="red") for run in failed]
    parts += _best(snapshot)
    if sweep.is_over:
        hint = f"The sweep is over: kedge report {printable(str(sweep.folder))} compares its settings"
        parts.append(Text(hint, style="dim"))
    return Group(*parts)


def _head(snapshot: SweepSnapshot) -> RenderableType:
    states = [snapshot.state(run) for run in snapshot.sweep.runs]
    counts = ", ".join(f"{states.count(state)} {label.partition(' ')[2]}" for state, (label, _) in STATES.items()
                       if state in states)  # fmt: skip
    title = Text.assemble(
        (f"sweep of {printable(snapshot.sweep.stage)}", "bold"), "  ", (printable(str(snapshot.sweep.folder)), "dim")
    )
    return Text.assemble(title, f"\n{len(states)} runs: {counts}\n")


def _table(snapshot: SweepSnapshot, runs: Sequence[SweptRun], width: int) -> Table:
    """A line for each run: state, updates, the newest value of the metric."""
    goal, table = snapshot.goal, Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    measured = goal.metric if goal else "result"
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True, min_width=max(len(label) for label, _ in STATES.values()))
    table.add_column("update", justify="right", no_wrap=True, min_width=len("update"))
    table.add_column(measured, justify="right", no_wrap=True, min_width=min(len(measured), MOST_METRIC))
    if width >= WIDE:
        table.add_column("", no_wrap=True)
    for run in runs:
        state, style = STATES[snapshot.state(run)]
        record = snapshot.records.get(run.name)
        values = record.series(goal.metric)[1] if record and goal else []
        cells = [Text(printable(run.name)), Text(state, style=style), Text(_progress(record)),
                 Text(format_figure(values[-1]) if values else "–", style="bold")]  # fmt: skip
        curve = [Text(sparkline(values, SPARKLINE_WIDTH) if values else "", style="cyan")] if width >= WIDE else []
        table.add_row(*cells, *curve)
    return table


def _progress(record: RunRecord | None) -> str:
    if record is None:
        return ""
    done = record.metrics[-1]["update"] if record.metrics else 0
    return f"{done:,}" if record.num_updates is None else f"{done:,}/{record.num_updates:,}"


def _best(snapshot: SweepSnapshot) -> Iterator[RenderableType]:
    """The best setting among those with a finished run."""
    finished = {name: record.metrics for name, record in snapshot.records.items() if record.state == "finished"}
    rows = compare(snapshot.sweep.settings, finished, goal) if (goal := snapshot.goal) else []
    if goal is None or not rows or rows[0].interval is None:
        yield Text("\nno result yet: a result is that of a finished run", style="dim")
        return
    best, interval = rows[0], rows[0].interval
    limits = f" ({format_figure(interval.low)} to {format_figure(interval.high)})" if interval.is_known else ""
    seeds = "1 seed" if len(best.values) == 1 else f"{len(best.values)} seeds"
    others = len(leaders(rows)) - 1
    tied = "" if not others else f", tied with {others} other setting{'s' if others > 1 else ''}"
    yield Text.assemble(
        f"\nbest {'' if snapshot.sweep.is_over else 'so far'}".rstrip() + ": ",
        (printable(best.label) or "as configured", "bold"),
        f", {goal.metric} {format_figure(interval.value)}{limits} at the end, {seeds}{tied}",
    )


def _most_important(snapshot: SweepSnapshot, most: int) -> list[SweptRun]:
    """As many runs as fit, in the sweep's order: running and failed ones before those that are done or wait."""
    rank = list(STATES)
    ordered = sorted(snapshot.sweep.runs, key=lambda run: rank.index(snapshot.state(run)))
    kept = {run.name for run in ordered[:most]}
    return [run for run in snapshot.sweep.runs if run.name in kept]
