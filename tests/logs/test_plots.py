"""Plots of results: labels, colors, limits of the axes, and that each plot is drawn."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.text import Text

from kedge.logs.plots import lines as drawing
from kedge.logs.plots import palette
from kedge.logs.plots.lines import Level, Line, draw_lines
from kedge.logs.plots.palette import POLICY, QUALITY, REFERENCES, SCORE, START, WIN_RATE
from kedge.logs.plots.results import Panel, Row, draw_intervals, draw_overoptimization, plot_frontier
from kedge.logs.plots.style import label_axes, new_axes, save_figure, wrap_labels
from kedge.stages.demo.gold_evaluation import CurvePoint
from kedge.stages.demo.report import draw_curve
from kedge.system.intervals import Interval

KL = [0.0, 1.0, 4.0, 9.0]
LONG = "Share of the held-out posts on which the policy wins"


def is_drawn(path):
    """A PNG of some size that is not one flat color."""
    pixels = imread(path)
    return pixels.shape[1] >= 600 and pixels.std() > 0.01


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_lines_end_in_their_label_and_last_value():
    _, (axes,) = new_axes()
    lines = [Line([1, 2], [0.5, 2.0], SCORE, "train"), Line([1, 2], [1.0, math.nan], SCORE)]
    draw_lines(axes, lines, levels=[Level("base", 1.5)])
    assert texts(axes) == ["1", "base 1.5", "train 2"]


def test_labels_do_not_overlap():
    _, (axes,) = new_axes()
    draw_lines(axes, [Line([0, 1], [0.0, 1.0 + index / 1_000], SCORE, str(index)) for index in range(6)])
    heights = [text.xy[1] for text in axes.texts]  # pyright: ignore[reportAttributeAccessIssue]
    assert np.diff(heights).min() >= drawing.LABEL_GAP - 1e-9
    assert max(heights) <= 1.0


@pytest.mark.parametrize(
    ("values", "quantities", "inside"),
    [
        ([0.0, 0.4, 1.0], [QUALITY], (0.0, 1.0)),
        ([0.0, 0.0, 0.0], [WIN_RATE], (0.0, 1.0)),
        ([1.0, 1.0, 1.0], [WIN_RATE], (0.0, 1.0)),
        ([-2.0, 0.0, 3.0], [SCORE], (-math.inf, math.inf)),
        ([0.0, 0.5, 1.0], [QUALITY, SCORE], (-math.inf, math.inf)),
    ],
)
def test_an_axis_ends_where_its_quantity_does(values, quantities, inside):
    _, (axes,) = new_axes()
    draw_lines(axes, [Line([0, 1, 2], values, quantity) for quantity in quantities])
    low, high = axes.get_ylim()
    assert inside[0] <= low < high <= inside[1]
    assert low <= min(values) <= max(values) <= high
    if inside[0] == -math.inf:
        assert low < min(values)
        assert high > max(values)


def test_intervals_at_the_ends_of_a_share_and_points_at_distance_zero_stay_in_range():
    rows = [Row("SFT", Interval(0.01, 0.0, 0.03), START), Row("PPO", Interval(1.0, 0.99, 1.0), POLICY)]
    [axes] = draw_intervals([Panel("Quality", QUALITY, rows)]).axes
    assert axes.get_xlim() == (0.0, 1.0)
    gold = [Interval(each, each - 0.1, each) for each in (0.2, 0.9, 1.0, 0.5)]
    above, below = draw_overoptimization([-0.1, *KL[1:]], KL, gold).axes
    assert above.get_xlim()[0] == below.get_xlim()[0] == 0.0
    assert below.get_ylim()[1] == 1.0


def test_each_quantity_and_each_writer_keeps_its_color_in_all_plots():
    curve = [CurvePoint(update, kl, kl, Interval(0.5, 0.4, 0.6)) for update, kl in enumerate(KL)]
    above, below = draw_curve(curve, {"sft": 0.3, "ppo": 0.9, "references": 0.4}).axes
    colors = {text.get_text().rsplit(" ", 1)[0]: text.get_color() for text in below.texts}
    assert (colors["PPO policy"], colors["SFT policy"], colors["references"]) == (POLICY, START, REFERENCES)
    drawn = [to_hex(axes.lines[-1 if axes is above else 3].get_color()) for axes in (above, below)]
    assert drawn == [SCORE.color, QUALITY.color]
    quantities = [palette.SCORE, palette.QUALITY, palette.VALUE, palette.RETURN]
    meanings = [POLICY, START, REFERENCES, palette.MARK, *(each.color for each in quantities)]
    assert len(set(meanings)) == len(meanings)
    assert len(set(palette.DARK.values())) == len(palette.DARK)
    assert set(meanings) <= set(palette.DARK)


def test_long_titles_and_labels_wrap_and_touch_nothing():
    rows = [Row("over references", Interval(0.6, 0.5, 0.7), POLICY)]
    figure = draw_intervals([Panel(LONG, WIN_RATE, rows), Panel(f"{LONG} too", WIN_RATE, rows)])
    label_axes(figure.axes[0], title=LONG, y_label="score by runs/some-long-folder/reward/model, " * 2)
    wrap_labels(figure)
    figure.draw_without_rendering()
    left, right = (next(each.get_window_extent() for each in axes.findobj(Text) if LONG[:9] in each.get_text())
                   for axes in figure.axes)  # fmt: skip
    neighbor = figure.axes[1].get_tightbbox()
    assert neighbor is not None
    assert left.x1 < min(right.x0, neighbor.x0)
    assert right.x1 < figure.bbox.x1
    assert figure.axes[0].yaxis.label.get_window_extent().height <= figure.bbox.height


def test_result_plots_are_drawn(tmp_path):
    band = ([4.0, 4.8, 5.4, 5.0], [4.2, 5.2, 5.6, 5.4])
    gold = [Interval(each, each - 0.1, each + 0.1) for each in (0.4, 0.5, 0.55, 0.52)]
    panels = [
        Panel("Quality", QUALITY, [Row(name, Interval(0.5, 0.4, 0.6), POLICY) for name in ("SFT", "PPO")]),
        Panel("Win", WIN_RATE, [Row("a", Interval(0.6, 0.5, 0.7), POLICY)], level=0.5),
    ]
    paths = [
        plot_frontier([-0.1, *KL[1:]], {"score": KL}, tmp_path / "new" / "f.png", bands={"score": band}),
        save_figure(draw_overoptimization(KL, KL, gold, levels=[Level("SFT", 0.46)]), tmp_path / "o.png"),
        save_figure(draw_intervals(panels), tmp_path / "i.png"),
    ]
    assert all(is_drawn(path) for path in paths)


def test_plotting_does_not_import_pyplot():
    """pyplot's global figures leak between runs and need a display."""
    program = "import sys, kedge.logs.plots.results; print('matplotlib.pyplot' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
