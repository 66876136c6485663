"""A preview of data: what a stage would read, how long it is, and what it would drop."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kedge.data.example import Part, example_lines
from kedge.data.usage import DataUsage

__all__ = ["Preview"]

BARS = "▁▂▃▄▅▆▇█"
NUM_BINS = 16
PLAIN_WIDTH = 100
LINES_PER_PART = 3


@dataclass(frozen=True)
class Preview:
    """What a stage would read of a source. `print` shows it.

    Attributes:
        stage: the stage.
        usage: rows, and how many of them are dropped for which reason.
        columns: columns of the first row, each with the kind of its value.
        lengths: length of each part of every usable row, by the part's name, and of whole rows as `row`.
        examples: the first usable rows, in parts.
        unit: what is counted: `tokens`, or `characters` without a model.
    """

    stage: str
    usage: DataUsage
    columns: Mapping[str, str]
    lengths: Mapping[str, Sequence[int]]
    examples: Sequence[Sequence[Part]]
    unit: str

    def lines(self, width: int) -> list[str]:
        """The preview as text.

        Args:
            width: characters per line; longer examples lose their middle.
        """
        columns = ", ".join(f"{name} ({kind})" for name, kind in self.columns.items()) or "none: bare texts"
        note = "" if self.unit == "tokens" else "; without a model, no limit of length is checked"
        return [
            f"as data of {self.stage}: {self.usage.line}",
            f"columns: {columns}",
            f"lengths in {self.unit}{note}:" if self.lengths else self._remedy(),
            *_table(self.lengths),
            *(
                line
                for number, parts in enumerate(self.examples, start=1)
                for line in ("", f"example {number}, in {self.unit}:", *self._shown(parts, width))
            ),
        ]

    def _shown(self, parts: Sequence[Part], width: int) -> list[str]:
        separator = "|" if self.unit == "tokens" else ""
        return example_lines(parts, width=width, num_lines=LINES_PER_PART, separator=separator)

    def _remedy(self) -> str:
        missing = [re.fullmatch(r"field '(\w+)' is missing", reason) for reason in self.usage.dropped]
        names = [f"data.columns.{match[1]}=…" for match in missing if match]
        return f"no usable row{f'; {names[0]} names the column that holds it' if names else ''}"

    def __str__(self) -> str:
        return "\n".join(self.lines(shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns))

    __repr__ = __str__


def _table(lengths: Mapping[str, Sequence[int]]) -> list[str]:
    """Smallest, median and largest length, and a histogram between the smallest and the largest."""
    names = max((len(name) for name in lengths), default=0)
    return [
        f"  {name:{names}}  min {min(values):,}  median {median(values):,.0f}  max {max(values):,}  {histogram(values)}"
        for name, values in lengths.items()
    ]


def histogram(values: Sequence[int]) -> str:
    """Bars of equal width from the smallest value to the largest; a bin with any value is never empty."""
    low, high = min(values), max(values)
    if low == high:
        return BARS[-1]
    counts = [0] * NUM_BINS
    for value in values:
        counts[min(NUM_BINS - 1, (value - low) * NUM_BINS // (high - low))] += 1
    most = max(counts)
    return "".join(" " if not count else BARS[(count * len(BARS) - 1) // most] for count in counts)
