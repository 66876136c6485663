"""One frame of the terminal view: where a run stands, its figures, the doctor's findings, the newest response."""

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
from kedge.inspect.watch.figures import shown_figures
from kedge.inspect.watch.follower import Sight
from kedge.inspect.watch.sparkline import sparkline
from kedge.logs.progress import format_duration, format_figure
from kedge.texts import printable

__all__ = ["draw_frame"]

STATES = {"running": ("● running", "bold green"), "finished": ("■ finished", "bold blue"),
          "stopped": ("✕ stopped", "bold red")}  # fmt: skip
NARROW, WIDE = 72, 120
"""Columns: below the one a figure's range is left out, from the other on the figures stand side by side."""

LOW, OTHER_LINES, FEWEST_FIGURES = 36, 16, 4
"""Lines of a terminal that has no room for everything, what it keeps for all but the figures, the fewest figures."""

MOST_FINDINGS, FINDINGS_IN_BRIEF = 6, 2
REMEDY_LINES = 3
FIGURE_WIDTH, RANGE_WIDTH = 9, 21
PROMPT_LINES = 3
FEWEST_LINES = 6
"""Of prompt and response, also where the terminal is low."""

RECENT = 20
"""Updates whose mean time tells the time to come."""


def draw_frame(sight: Sight, console: Console, *, height: int | None = None) -> Group:
    """The frame as wide as the console.

    Whatever a model, a file name or a configuration says is shown as it is: rich's markup means nothing in it, and
    control characters are written out.

    Args:
        sight: What is seen.
        console: Where it will be shown.
        height: Lines that there are; the newest response is shortened to them. None shows it whole.
    """
    record, is_low = sight.record, height is not None and height < LOW
    most = max(FEWEST_FIGURES, (height or 0) - OTHER_LINES) if is_low else None
    figures = shown_figures(record)[:most]
    above: list[RenderableType] = [*_head(sight), *_figures(figures, console.width), *_findings(sight, brief=is_low)]
    above += _incidents(record)
    if height is None:
        return Group(*above, *_sample(record, None))
    used = sum(len(console.render_lines(part)) for part in above)
    return Group(*above, *_sample(record, max(FEWEST_LINES, height - used - 2)))


def _head(sight: Sight) -> Iterator[RenderableType]:
    record = sight.record
    state, style = STATES[record.state]
    title = Table.grid(expand=True)
    title.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    name = Text.assemble((printable(record.stage) or "run", "bold"), "  ", (printable(str(record.folder)), "dim"))
    title.add_row(name, Text.assemble((state, style), (f", wrote {format_duration(sight.age)} ago", "dim")))
    yield title
    yield _progress(record)


def _progress(record: RunRecord) -> RenderableType:
    done = record.metrics[-1]["update"] if record.metrics else 0
    total = record.setting("ppo.num_updates") if record.stage == "ppo" else None
    seconds = [_number(row.get("time/update")) for row in record.metrics]
    spent = f"{format_duration(sum(seconds))} so far"
    unit = "update" if record.stage == "ppo" else "step"
    if not isinstance(total, int) or total < 1:
        return Text(f"{unit} {done:,}  {spent}")
    recent = seconds[-RECENT:]
    left = sum(recent) / len(recent) * max(0, total - done) if recent else None
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    to_come = f", {format_duration(left)} to come" if record.state == "running" and left is not None else ""
    grid.add_row(f"{unit} {done:,}/{total:,}", ProgressBar(total, min(done, total)), f"{spent}{to_come}")
    return grid


def _figures(figures: Sequence[tuple[str, Sequence[float]]], width: int) -> Iterator[RenderableType]:
    if not figures:
        yield Text("\nno figures yet: the first come with the first update", style="dim")
        return
    yield Rule("figures", align="left", style="dim")
    if width < WIDE:
        yield _table(figures, width, with_range=width >= NARROW)
        return
    half = (len(figures) + 1) // 2
    grid = Table.grid(padding=(0, 4))
    grid.add_row(*(_table(part, width // 2 - 2, with_range=True) for part in (figures[:half], figures[half:])))
    yield grid


def _table(figures: Sequence[tuple[str, Sequence[float]]], width: int, *, with_range: bool) -> Table:
    """Label, newest figure, course, and where there is room the range."""
    table = Table.grid(padding=(0, 2))
    label_width = max(len(label) for label, _ in figures)
    range_width = RANGE_WIDTH if with_range else 0
    room = width - label_width - FIGURE_WIDTH - range_width - 6
    for label, values in figures:
        low, high = format_figure(min(values)), format_figure(max(values))
        cells = [Text(label), Text(format_figure(values[-1]), style="bold", justify="right"),
                 Text(sparkline(values, max(8, room)), style="cyan")]  # fmt: skip
        table.add_row(*cells, *([Text(f"{low} to {high}", style="dim")] if with_range else []))
    return table


def _findings(sight: Sight, *, brief: bool) -> Iterator[RenderableType]:
    """The gravest findings, with what to try about the first; in brief fewer of them, a line each."""
    most = FINDINGS_IN_BRIEF if brief else MOST_FINDINGS
    yield Rule("doctor", align="left", style="dim")
    if not sight.findings:
        yield Text("nothing that calls for an answer", style="green")
    for number, finding in enumerate(sight.findings[:most]):
        yield _finding(finding, brief=brief, with_remedy=number == 0 and not brief)
    if (more := len(sight.findings) - most) > 0:
        told = f"and {more} more: kedge doctor {printable(str(sight.record.folder))}"
        yield Text(told, style="dim", no_wrap=True, overflow="ellipsis")


def _finding(finding: Finding, *, brief: bool, with_remedy: bool) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=len("serious"))
    grid.add_column(no_wrap=brief, overflow="ellipsis")
    told = Text.assemble((finding.rule, "bold"), "  ", printable(finding.seen))
    grid.add_row(Text(finding.severity, style=STYLES[finding.severity]), told)
    if with_remedy and finding.try_:
        grid.add_row(Text("try", style="dim"), _Shortened(Text(printable(finding.try_)), REMEDY_LINES))
    return grid


def _incidents(record: RunRecord) -> Iterator[RenderableType]:
    if not record.incidents:
        return
    newest = record.incidents[-1]
    count = len(record.incidents)
    yield Rule("1 incident" if count == 1 else f"{count} incidents, the newest", align="left", style="dim")
    told = f"update {newest['update']}: {newest.get('what', newest.get('kind', ''))}; {newest.get('consequence', '')}"
    yield Text(printable(told).rstrip("; "), style="yellow")


def _sample(record: RunRecord, most_lines: int | None) -> Iterator[RenderableType]:
    sample = _newest_sample(record)
    if sample is None:
        return
    score = sample.get("score")
    told = f"score {format_figure(score)}" if isinstance(score, (int, float)) else "no score"
    stopped = "" if sample.get("stopped", True) else ", cut at the longest"
    yield Rule(f"newest response, update {sample['update']}: {told}{stopped}", align="left", style="dim")
    prompt, response = (Text(_as_it_is(str(sample.get(part, "")))) for part in ("prompt", "response"))
    prompt.stylize("dim")
    yield _Shortened(prompt, most_lines and PROMPT_LINES, from_end=True)
    answer = Text.assemble(("▶ ", "bold"), response)
    yield _Shortened(answer, most_lines and max(1, most_lines - PROMPT_LINES))


@dataclass(frozen=True)
class _Shortened:
    """Text of so many lines at most, beginning or end; None leaves it whole."""

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
    """The first response of the newest update; a prompt that is asked again only where there is no other."""
    if not record.samples:
        return None
    newest = [row for row in record.samples if row["update"] == record.samples[-1]["update"]]
    return next((row for row in newest if row.get("fixed") is None), newest[0])


def _as_it_is(text: str) -> str:
    """Lines stay lines; whatever else would move the cursor, change colours or hide text is written out."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
