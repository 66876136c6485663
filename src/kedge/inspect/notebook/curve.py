"""A small curve as inline SVG, without scripts, in the colors of the page that shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kedge.logs.progress import format_figure

__all__ = ["svg_curve"]

WIDTH, HEIGHT, MARGIN = 240, 72, 4
MOST_POINTS = 240


def svg_curve(label: str, values: Sequence[float]) -> str:
    """A labeled curve with its first and last value; empty for fewer than two finite values.

    Args:
        label: What it shows.
        values: In order; long series are thinned to means, non-finite values left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in _places(_thinned(finite)))
    title = escape(f"{label}: {format_figure(finite[0])} to {format_figure(finite[-1])}")
    return (
        '<figure style="display:inline-block;margin:0 1em .5em 0">'
        f'<figcaption style="font-size:85%">{title}</figcaption>'
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f'<polyline points="{points}" fill="none" stroke="#1f6fb4" stroke-width="1.8" stroke-linejoin="round"/>'
        "</svg></figure>"
    )


def _thinned(values: Sequence[float]) -> list[float]:
    count = min(MOST_POINTS, len(values))
    parts = [values[at * len(values) // count : (at + 1) * len(values) // count] for at in range(count)]
    return [sum(part) / len(part) for part in parts]


def _places(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points in the picture; equal values lie in its middle."""
    low, spread = min(values), max(values) - min(values)
    across, up = (WIDTH - 2 * MARGIN) / (len(values) - 1), HEIGHT - 2 * MARGIN
    heights = [(value - low) / spread if spread else 0.5 for value in values]
    return [(MARGIN + at * across, HEIGHT - MARGIN - up * height) for at, height in enumerate(heights)]
