"""Saves a figure as SVG, and turns it into its counterpart for dark pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kedge.logs.plots.palette import DARK
from kedge.logs.plots.style import wrap_labels

__all__ = ["dark_svg", "save_svg"]

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


def dark_svg(svg: str) -> str:
    """The picture with each color replaced by its counterpart on a dark page, and without a background."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda color: DARK.get(color[0], color[0]), svg)
