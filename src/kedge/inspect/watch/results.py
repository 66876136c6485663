"""The terminal view of stages without updates: how far they are, and what came out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kedge.inspect.record import RunRecord
from kedge.logs.phases import JUDGING
from kedge.logs.progress import format_duration, format_figure
from kedge.system.texts import printable

__all__ = ["draw_phase", "draw_results", "newest_result"]

OUTCOMES = {"won": ("█", "green"), "tied": ("▒", "dim"), "lost": ("░", "red")}
"""The character and the color of each part of the bar."""
BAR_WIDTH = 48
FIGURES = {"score": "score", "kl": "KL to it", "length": "tokens", "eos_rate": "stopped", "longer_wins": "longer wins"}

OF_A_CRITIC = {
    "pairs_across": "pairs, different prompts",
    "pairs_within": "pairs, same prompt",
    "explained_variance": "explained variance",
    "prompt_explained_variance": "of the prompt's mean",
}


def draw_phase(record: RunRecord) -> RenderableType:
    """The phase of a running stage with its progress, or how long a finished one took."""
    if not record.progress:
        return Text("finished" if record.state == "finished" else "no responses yet", style="dim")
    newest = record.progress[-1]
    done, total, spent = newest["done"], newest["total"], format_duration(newest["seconds"])
    if record.state == "finished":
        return Text(f"took {spent}")
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    if newest["phase"] == JUDGING:
        grid.add_row(f"judging {total:,} responses", "", f"{spent} so far")
    else:
        grid.add_row(f"{printable(newest['phase'])} {done:,}/{total:,}", ProgressBar(total, done), f"{spent} so far")
    return grid


def draw_results(record: RunRecord) -> Iterator[RenderableType]:
    """The figures of a finished stage."""
    if not record.summary:
        waiting = "no result yet: it comes at the end" if record.state == "running" else "it stopped without a result"
        yield Text(f"\n{waiting}", style="dim")
        return
    yield Rule("result", align="left", style="dim")
    if record.stage == "evaluate" and "win_rate" in record.summary:
        yield from _outcomes(record.summary)
    table = Table.grid(padding=(0, 2))
    for label, text in _figures(record.summary).items():
        table.add_row(Text(label), Text(text))
    yield table


def newest_result(record: RunRecord) -> dict[str, Any] | None:
    """The newest response, as a row like those of `samples.jsonl`."""
    if not record.results:
        return None
    newest = record.results[-1]
    return {
        "prompt": newest.get("prompt", ""),
        "response": newest.get("completion", ""),
        "score": newest.get("score"),
        "stopped": newest.get("stopped", True),
    }


def _outcomes(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    counts = {name: int(summary.get(name) or 0) for name in OUTCOMES}
    total = sum(counts.values())
    bar = Text()
    for name, count in counts.items():
        block, style = OUTCOMES[name]
        bar.append(block * round(BAR_WIDTH * count / max(1, total)), style=style)
    yield bar
    yield Text(", ".join(f"{name} {count:,}" for name, count in counts.items()) + f" of {total:,}", style="bold")


def _figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """Labels and values; a value of the opponent follows that of the policy."""
    found = {"model": printable(str(summary.get("model", "")))}
    if "win_rate" in summary:
        found["against"] = printable(str(summary.get("against", "")))
        found["win rate"] = f"{_shown(summary['win_rate'])}, judged by {printable(str(summary.get('judge', '')))}"
    if "critic" in summary:
        found["critic"] = printable(str(summary["critic"]))
    for name, label in {**FIGURES, **(OF_A_CRITIC if "critic" in summary else {})}.items():
        if summary.get(name) is not None:
            other = summary.get(f"{name}_against")
            found[label] = _shown(summary[name]) + ("" if other is None else f", against {_shown(other)}")
    if isinstance(bias := summary.get("position_bias"), Mapping):
        found["the other order"] = f"another winner for {bias['contradicted']:.0%}"
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        low, high = (value.get(end) for end in ("low", "high"))
        limits = "" if low is None else f" ({format_figure(low)} to {format_figure(high)})"
        return f"{format_figure(value.get('value'))}{limits}"
    return format_figure(value) if isinstance(value, (int, float)) else printable(str(value))
