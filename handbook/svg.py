"""Saves a figure as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from handbook.style import wrap_labels

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kedge",
    "font.family": ["DejaVu Sans", "sans-serif"],
}
"""Text stays text, and the same values give the same file."""


def save_svg(figure: Figure, path: Path) -> None:
    """Write the figure; its folder is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        wrap_labels(figure)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
