"""Typography of the page's sentences: one minus sign everywhere."""

from __future__ import annotations

import re

__all__ = ["figure", "typographic"]

MINUS = "\u2212"
NEGATIVE = re.compile(r"(?<![^\s(\[,~≈])-(?=[\d.]*\d)|(?<=\de)-(?=\d)")
"""A hyphen before a number at the start of a word or in an exponent; not in a range, a date or `field=-1`."""


def figure(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.3g}".replace("-", MINUS)


def typographic(text: str) -> str:
    """A text whose negative numbers have a minus sign; settings such as `field=-1` stay as they are typed."""
    return NEGATIVE.sub(MINUS, text)
