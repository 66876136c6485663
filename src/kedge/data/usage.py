"""How many rows of the data a run uses, and why the others are not used: one line, and the same as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DataUsage"]

MOST_NAMED = 3
"""Sources named in the line."""


@dataclass(frozen=True)
class DataUsage:
    """The rows of one role of the data, such as the prompts of a PPO run.

    Attributes:
        sources: Names of files, folders or hub data sets; empty for rows passed from Python.
        rows: Rows that the sources hold.
        used: Rows that the run uses, those held out included.
        held_out: Rows that are measured on but not trained on.
        cut: Rows of which a part was cut to fit.
        dropped: Unusable rows, by reason.
        shares: The share of each source in the rows that are drawn; empty if every row is drawn once per pass.
        notes: Further facts, such as how rows were held out.
    """

    sources: Sequence[str] = ()
    rows: int = 0
    used: int = 0
    held_out: int = 0
    cut: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    shares: Sequence[float] = ()
    notes: Sequence[str] = ()

    @property
    def line(self) -> str:
        """`212 of 400 rows of a.jsonl used, 10 of them held out; 188 dropped: 180 longer than …, 8 empty`."""
        return self._line(self.sources)

    @property
    def public_line(self) -> str:
        """The line with the last part of each local path, which tells a stranger nothing about the machine."""
        return self._line([os.path.basename(name.rstrip("/")) if _is_path(name) else name for name in self.sources])

    def as_json(self) -> dict[str, Any]:
        """The counts, and the line."""
        return {
            "sources": list(self.sources),
            "rows": self.rows,
            "used": self.used,
            "held_out": self.held_out,
            "cut": self.cut,
            "dropped": dict(self.dropped),
            "shares": list(self.shares),
            "notes": list(self.notes),
            "line": self.line,
        }

    def _line(self, names: Sequence[str]) -> str:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        where = f" of {', '.join(names[:MOST_NAMED])}{more}" if names else ""
        count = f"all {self.rows:,}" if self.used == self.rows else f"{self.used:,} of {self.rows:,}"
        head = f"{count} rows{where} used"
        parts = [f"{head}, {self.held_out:,} of them held out" if self.held_out else head]
        if self.dropped:
            counted = [f"{number:,} {reason}" for reason, number in self.dropped.items()]
            reasons = ", ".join(counted if len(counted) > 1 else self.dropped)
            parts.append(f"{sum(self.dropped.values()):,} dropped: {reasons}")
        if self.cut:
            parts.append(f"{self.cut:,} row{'s' * (self.cut > 1)} cut to fit")
        if self.shares:
            drawn = (f"{share:.0%} {name}" for share, name in zip(self.shares, names, strict=True))
            parts.append(f"drawn as {', '.join(drawn)}")
        return "; ".join([*parts, *self.notes])


def _is_path(name: str) -> bool:
    return os.path.exists(name) or name.startswith((".", "~", os.sep))
