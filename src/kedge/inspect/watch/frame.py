"""One frame of the terminal view: progress, metrics, the doctor's findings, the newest response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kedge.inspect.doctor import Finding
from kedge.inspect.doctor.terminal import STYLES
from kedge.inspect.record import RunRecord
from kedge.inspect.watch.follower import Snapshot
from kedge.inspect.watch.results import draw_phase, draw_results, newest_result
from kedge.inspect.watch.series import labeled_series
from kedge.inspect.watch.sparkline import sparkline
from kedge.logs.progress import format_duration, format_figure
from kedge.system.texts import printable

__all__ = ["draw_frame"]

STATES = {"running": ("● running", "bold green"), "finished": ("■ finished", "bold blue"),
          "stopped": ("✕ stopped", "bold red")}  # fmt: skip
NARROW, WIDE = 72, 120
"""Columns: below the first, ranges are left out; from the second on, metrics take two columns."""

LOW, OTHER_LINES, FEWEST_METRICS = 36, 16, 4
"""Below `LOW` lines, metrics get what is left of the height after `OTHER_LINES`, but at least `FEWEST_METRICS`."""

MOST_FINDINGS, FINDINGS_IN_BRIEF = 6, 2
REMEDY_LINES = 3
VALUE_WIDTH, RANGE_WIDTH = 9, 21
PROMPT_LINES = 3
FEWEST_LINES = 6
"""Of prompt and response together, however low the terminal."""

RECENT = 20
"""Updates whose mean time gives the time left."""


def draw_frame(snapshot: Snapshot, console: Console, *, height: int | None = None) -> Group:
    """A frame as wide as the console.

    Text of models, file names and configurations is shown literally: rich markup is not interpreted, and control
    characters are escaped.

    Args:
        snapshot: The run to draw.
        console: The console it will be shown on.
        height: Lines available; the newest response is shortened to fit. None shows it whole.
    """
    record, is_low = snapshot.record, height is not None and height < LOW
    most = max(FEWEST_METRICS, (height or 0) - OTHER_LINES) if is_low else None
    series = labeled_series(record)[:most]
    measured = _metrics(series, console.width) if record.has_updates else draw_results(record)
    above: list[RenderableType] = [*_head(snapshot), *measured]
    above += [*_findings(snapshot, brief=is_low), *_incidents(record)]
    if height is None:
        return Group(*above, *_sample(record, None))
    used = sum(len(console.render_lines(part)) for part in above)
    return Group(*above, *_sample(record, max(FEWEST_LINES, height - used - 2)))


def _head(snapshot: Snapshot) -> Iterator[RenderableType]:
    record = snapshot.record
    state, style = STATES[record.state]
    title = Table.grid(expand=True)
    title.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    name = Text.assemble((printable(record.stage) or "run", "bold"), "  ", (printable(str(record.folder)), "dim"))
    title.add_row(name, Text.assemble((state, style), (f", wrote {format_duration(snapshot.age)} ago", "dim")))
    yield title
    yield _progress(record) if record.has_updates else draw_phase(record)
    if snapshot.skipped:
        yield Text(f"{snapshot.skipped:,} damaged lines in its files are left out", style="yellow")
    if record.ended_early:
        yield Text(printable(f"ended early: {record.ended_early}"), style="yellow")


def _progress(record: RunRecord) -> RenderableType:
    done = record.metrics[-1]["update"] if record.metrics else 0
    total = record.num_updates
    seconds = [_number(row.get("time/update")) for row in record.metrics]
    spent = f"{format_duration(sum(seconds))} so far"
    unit = "update" if record.stage in ("ppo", "control") else "step"
    if total is None or total < 1:
        return Text(f"{unit} {done:,}  {spent}")
    recent = seconds[-RECENT:]
    left = sum(recent) / len(recent) * max(0, total - done) if recent else None
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    remaining = f", {format_duration(left)} left" if record.state == "running" and left is not None else ""
    grid.add_row(f"{unit} {done:,}/{total:,}", ProgressBar(total, min(done, total)), f"{spent}{remaining}")
    return grid


def _metrics(series: Sequence[tuple[str, Sequence[float]]], width: int) -> Iterator[RenderableType]:
    if not series:
        yield Text("\nno metrics yet: waiting for the first update", style="dim")
        return
    yield Rule("metrics", align="left", style="dim")
    if width < WIDE:
        yield _table(series, width, with_range=width >= NARROW)
        return
    half = (len(series) + 1) // 2
    grid = Table.grid(padding=(0, 4))
    grid.add_row(*(_table(part, width // 2 - 2, with_range=True) for part in (series[:half], series[half:])))
    yield grid


def _table(series: Sequence[tuple[str, Sequence[float]]], width: int, *, with_range: bool) -> Table:
    """Label, newest value, sparkline and, if there is room, the range."""
    table = Table.grid(padding=(0, 2))
    label_width = max(len(label) for label, _ in series)
    range_width = RANGE_WIDTH if with_range else 0
    room = width - label_width - VALUE_WIDTH - range_width - 6
    for label, values in series:
        low, high = format_figure(min(values)), format_figure(max(values))
        cells = [Text(label), Text(format_figure(values[-1]), style="bold", justify="right"),
                 Text(sparkline(values, max(8, room)), style="cyan")]  # fmt: skip
        table.add_row(*cells, *([Text(f"{low} to {high}", style="dim")] if with_range else []))
    return table


def _findings(snapshot: Snapshot, *, brief: bool) -> Iterator[RenderableType]:
    """The most severe findings, with the remedy of the first; in brief, fewer of them on one line each."""
    most = FINDINGS_IN_BRIEF if brief else MOST_FINDINGS
    yield Rule("doctor", align="left", style="dim")
    if not snapshot.findings:
        style = "green" if snapshot.examination.is_clean else "dim"
        yield Text(printable(snapshot.examination.verdict), style=style)
    for number, finding in enumerate(snapshot.findings[:most]):
        yield _finding(finding, brief=brief, with_remedy=number == 0 and not brief)
    if (more := len(snapshot.findings) - most) > 0:
        hint = f"and {more} more: kedge doctor {printable(str(snapshot.record.folder))}"
        yield Text(hint, style="dim", no_wrap=True, overflow="ellipsis")


def _finding(finding: Finding, *, brief: bool, with_remedy: bool) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=len("serious"))
    grid.add_column(no_wrap=brief, overflow="ellipsis")
    text = Text.assemble((finding.rule, "bold"), "  ", printable(finding.seen))
    grid.add_row(Text(finding.severity, style=STYLES[finding.severity]), text)
    if with_remedy and finding.try_:
        grid.add_row(Text("try", style="dim"), _Shortened(Text(printable(finding.try_)), REMEDY_LINES))
    return grid


def _incidents(record: RunRecord) -> Iterator[RenderableType]:
    if not record.incidents:
        return
    newest = record.incidents[-1]
    count = len(record.incidents)
    yield Rule("1 incident" if count == 1 else f"{count} incidents, the newest", align="left", style="dim")
    text = f"update {newest['update']}: {newest.get('what', newest.get('kind', ''))}; {newest.get('consequence', '')}"
    yield Text(printable(text).rstrip("; "), style="yellow")


def _sample(record: RunRecord, most_lines: int | None) -> Iterator[RenderableType]:
    sample = _newest_sample(record) if record.has_updates else newest_result(record)
    if sample is None:
        return
    score = sample.get("score")
    scored = f"score {format_figure(score)}" if isinstance(score, (int, float)) else "no score"
    stopped = "" if sample.get("stopped", True) else ", cut at the token limit"
    update = f", update {sample['update']}" if "update" in sample else ""
    yield Rule(f"newest response{update}: {scored}{stopped}", align="left", style="dim")
    prompt, response = (Text(_literal(str(sample.get(part, "")))) for part in ("prompt", "response"))
    prompt.stylize("dim")
    yield _Shortened(prompt, most_lines and PROMPT_LINES, from_end=True)
    answer = Text.assemble(("▶ ", "bold"), response)
    yield _Shortened(answer, most_lines and max(1, most_lines - PROMPT_LINES))


@dataclass(frozen=True)
class _Shortened:
    """The first or last lines of a text; None for all of them."""

    text: Text
    most_lines: int | None
    from_end: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(self.text.wrap(console, options.max_width))
        if self.most_lines is not None and len(lines) > self.most_lines:
            left, kept = len(lines) - self.most_lines + 1, self.most_lines - 1
            more = Text(f"… {left} more lines", style="dim italic")
            lines = [more, *lines[len(lines) - kept :]] if self.from_end else [*lines[:kept], more]
        yield from lines


def _newest_sample(record: RunRecord) -> dict[str, Any] | None:
    """The first response of the newest update; one to a fixed prompt only if there is no other."""
    if not record.samples:
        return None
    newest = [row for row in record.samples if row["update"] == record.samples[-1]["update"]]
    return next((row for row in newest if row.get("fixed") is None), newest[0])


def _literal(text: str) -> str:
    """Text with line breaks kept and other control characters escaped."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
