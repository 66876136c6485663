"""Plots of results: labels, and that each plot is drawn."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
from matplotlib.image import imread

from kedge.algorithm.statistics import Interval
from kedge.logs.plots import style as drawing
from kedge.logs.plots.results import plot_frontier, plot_intervals, plot_overoptimization
from kedge.logs.plots.style import Line, draw_lines, new_axes

KL = [0.0, 1.0, 4.0, 9.0]


def is_drawn(path):
    """A PNG of some size that is not one flat color."""
    pixels = imread(path)
    return pixels.shape[1] >= 600 and pixels.std() > 0.01


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_lines_end_in_their_label_and_last_value():
    _, (axes,) = new_axes()
    draw_lines(axes, [Line([1, 2], [0.5, 2.0], "train"), Line([1, 2], [1.0, math.nan])], levels={"base": 1.5})
    assert texts(axes) == ["1", "base 1.5", "train 2"]


def test_labels_do_not_overlap():
    _, (axes,) = new_axes()
    draw_lines(axes, [Line([0, 1], [0.0, 1.0 + index / 1_000], str(index)) for index in range(6)])
    heights = [text.xy[1] for text in axes.texts]
    assert np.diff(heights).min() >= drawing.LABEL_GAP - 1e-9
    assert max(heights) <= 1.0


def test_result_plots_are_drawn(tmp_path):
    gold = [4.0, 5.0, 5.5, 5.2]
    band = ([g - 0.1 for g in gold], [g + 0.1 for g in gold])
    paths = [
        plot_frontier([-0.1, *KL[1:]], {"gold": gold, "proxy": KL}, tmp_path / "new" / "f.png", bands={"gold": band}),
        plot_overoptimization(KL, KL, gold, tmp_path / "o.png", gold_band=band, levels={"references": 4.6}),
        plot_intervals(
            {"Quality": dict.fromkeys(("SFT", "PPO"), Interval(1, 0.9, 1.1)), "Win": {"a": Interval(0.6, 0.5, 0.7)}},
            tmp_path / "i.png",
            levels={"Win": 0.5},
        ),
    ]  # fmt: skip
    assert all(is_drawn(path) for path in paths)


def test_plotting_does_not_import_pyplot():
    """pyplot's global figures leak between runs and need a display."""
    program = "import sys, kedge.logs.plots.results; print('matplotlib.pyplot' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
