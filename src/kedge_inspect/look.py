"""The look of a stage: what reports, sweeps and the doctor show of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kedge_base.stage import imported, stages
from kedge_inspect.record import RunRecord

if TYPE_CHECKING:
    from kedge_inspect.doctor.rule import Rule


@dataclass(frozen=True)
class Row:
    """A metric of the table: label, unit, and the direction that is good, if there is one."""

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
        fewest: Number of lines below which the chart is left out.
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
        """The panel with the lines that have data."""
        lines = [
            {"metric": name, "label": label.replace("*", name.removeprefix(pattern.removesuffix("*")))}
            for pattern, label in self.lines.items()
            for name in sorted(names)
            if matches(pattern, name)
        ]
        shown = ("group", "title", "unit", "note", "level", "floor", "logarithmic", "stacked", "key")
        return {**{name: getattr(self, name) for name in shown}, "lines": lines}


@dataclass(frozen=True)
class Look:
    """A stage's view in reports and in the doctor.

    Attributes:
        rows: The table of first and last values.
        panels: The charts.
        sentences: Describes a run in one or more sentences, from its record and how far it is in words.
        parts: The sections of the page that its runs can fill.
        size: The fields with the number of items in an update or step as their product.
        items: The items' name; empty if they are not counted in words.
        total: The updates of a whole run, as it is configured; None if that is not known.
        goals: The metrics that a sweep compares by; the first that the runs have.
        rules: The doctor's rules for this stage; it has no others.
    """

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
        """The charts that have data, in JSON types.

        Args:
            names: Metrics that some run of the stage has.
        """
        known = set(names)
        shown = [(panel, panel.as_json(known)) for panel in self.panels]
        return [found for panel, found in shown if len(found["lines"]) >= panel.fewest]

    def items_per_update(self, record: RunRecord) -> int | None:
        """Responses or environment steps of an update, or rows of a step; None if the configuration lacks them."""
        sizes = [record.setting(name) for name in self.size]
        return math.prod(sizes) if sizes and all(isinstance(each, int) for each in sizes) else None


def look_of(stage: str) -> Look:
    """The look of a stage, kedge's own or a registered one."""
    from kedge_inspect.page.looks import LOOKS, OTHER

    if stage in LOOKS:
        return LOOKS[stage]
    known = stages().get(stage)
    return imported(known.looks) if known and known.looks else OTHER


def has_part(record: RunRecord, part: str) -> bool:
    """True if the runs of a record's stage can fill a section of the page."""
    return part in look_of(record.stage).parts


def matches(pattern: str, name: str) -> bool:
    """True if a pattern of `Panel.lines` matches a metric."""
    return name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))
