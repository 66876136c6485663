"""Colors of the plots with their meanings, on light and on dark pages, and the range of each kind of quantity.

The only place that names a color or a limit, so that a quantity looks the same in every plot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

INK: Final = "#1f2933"
MUTED: Final = "#66727f"
GRID: Final = "#e4e7eb"
PAPER: Final = "#ffffff"
MARK: Final = "#d1495b"
"""One highlighted item among others: the best checkpoint, the token that a page follows. Never a quantity."""

# The writers of responses. Distinguishable with the common forms of color blindness and in grayscale.
POLICY: Final = "#1f6fb4"
START: Final = "#4a5568"
"""The policy that training started from, also the KL reference."""
REFERENCES: Final = "#2b8a6e"
"""Reference texts of the data."""

DARK: Final[Mapping[str, str]] = {
    INK: "#e6eaf0",
    MUTED: "#a5b0bd",
    GRID: "#3a414d",
    PAPER: "none",
    MARK: "#f47c8b",
    POLICY: "#6cb2ee",
    START: "#c3ccd6",
    REFERENCES: "#5cc4a0",
    "#8656b8": "#b793e6",
    "#b7791f": "#e0ae57",
    "#0e7c8f": "#4cc3d6",
    "#b83280": "#ee7fb8",
}
"""Each color's counterpart on a dark page."""


@dataclass(frozen=True)
class Quantity:
    """A kind of number.

    Attributes:
        color: Color of its lines and points.
        low: Smallest possible value, None if unbounded; an axis never extends below it.
        high: Largest possible value, or None.
    """

    color: str
    low: float | None = None
    high: float | None = None


SCORE: Final = Quantity("#8656b8")
"""A reward model's or judge's score, on its own scale."""
QUALITY: Final = Quantity("#b7791f", low=0.0, high=1.0)
"""The gold judge's quality, a share."""
WIN_RATE: Final = Quantity(POLICY, low=0.0, high=1.0)
KL: Final = Quantity(MUTED, low=0.0)
"""A distance between policies."""
VALUE: Final = Quantity("#0e7c8f")
"""The critic's prediction, in units of the score."""
RETURN: Final = Quantity("#b83280")
"""The critic's target, in units of the score."""
