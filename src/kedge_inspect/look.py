"""The look of a stage: how reports, sweeps and the doctor show its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from kedge_inspect.record import RunRecord

if TYPE_CHECKING:
    from kedge_inspect.doctor.rule import Rule


@dataclass(frozen=True)
class Row:
    """A metric of the table: label, unit, and the direction of improvement, if any."""

    metric: str
    label: str
    unit: str = ""
    good: Literal["up", "down", ""] = ""


@dataclass(frozen=True)
class Panel:
    """One chart of the page.

    Attributes:
        group: Its heading.
        title: Its title.
        unit: Unit of the y axis.
        lines: Labels by metric; a pattern that ends in `*` matches all metrics with that prefix, labeled by the rest.
        note: The expected course.
        level: A baseline to draw.
        floor: Lower limit of the axis, so that one extreme value does not flatten the rest.
        logarithmic: Whether values span orders of magnitude.
        stacked: Whether the lines add up to a whole.
        fewest: Minimum number of lines for the chart to be shown.
        key: Whether it belongs next to the verdict.
    """

    group: str
    title: str
    unit: str
    lines: Mapping[str, str]
    note: str = ""
    level: float | None = None
    floor: float | None = None
    logarithmic: bool = False
    stacked: bool = False
    fewest: int = 1
    key: bool = False

    def as_json(self, names: Iterable[str]) -> dict[str, Any]:
        """The panel with the lines that have data, and whether it may have several, so that one needs its label."""
        lines = [
            {"metric": name, "label": label.replace("*", name.removeprefix(pattern.removesuffix("*")))}
            for pattern, label in self.lines.items()
            for name in sorted(names)
            if matches(pattern, name)
        ]
        return {**vars(self), "lines": lines, "several": len(self.lines) > 1 or "*" in next(iter(self.lines))}


@dataclass(frozen=True)
class Look:
    """A stage's view in reports and in the doctor.

    Attributes:
        title: The stage's name in sentences.
        unit: Unit of a row of `metrics.jsonl`: an `update` or a `step`.
        rows: The table of first and last values.
        panels: The charts.
        sentences: Describes a run in one or more sentences, from its record and a description of its progress.
        parts: The sections of the page that its runs can fill.
        size: The fields whose product is the number of items in an update or step.
        items: The items' name; empty if texts do not count them.
        total: The configured number of updates; None if unknown.
        goals: The metrics that a sweep compares by; it uses the first that the runs have.
        rules: The doctor's rules for this stage; it has no others.
    """

    title: str = "The run"
    unit: str = "step"
    rows: tuple[Row, ...] = ()
    panels: tuple[Panel, ...] = ()
    sentences: Callable[[RunRecord, str], list[str]] = lambda record, progress: [f"{progress}."]
    parts: frozenset[str] = frozenset()
    size: tuple[str, ...] = ()
    items: str = ""
    total: Callable[[RunRecord], int | None] = lambda record: None
    goals: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    def panels_of(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Return the charts that have data, in JSON types.

        Args:
            names: Metrics that some run of the stage has.
        """
        known = set(names)
        shown = [(panel, panel.as_json(known)) for panel in self.panels]
        return [found for panel, found in shown if len(found["lines"]) >= panel.fewest]

    def items_per_update(self, record: RunRecord) -> float | None:
        """Responses or environment steps of an update, or rows of a step; None if they are not known."""
        if sampled := record.series("group/sampled")[1]:
            return fmean(sampled)
        sizes = [record.setting(name) for name in self.size]
        return math.prod(sizes) if sizes and all(isinstance(each, int) for each in sizes) else None


def matches(pattern: str, name: str) -> bool:
    """True if a pattern of `Panel.lines` matches a metric."""
    return name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))
