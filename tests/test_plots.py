"""The handbook's pictures: labels, colors, and limits of the axes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from handbook import lines as drawing
from handbook import palette
from handbook.demo import draw_curve
from handbook.lines import Level, Line, draw_lines
from handbook.palette import POLICY, QUALITY, REFERENCES, SCORE, START, WIN_RATE
from handbook.style import label_axes, new_axes, wrap_labels
from kedge_base.intervals import Interval
from kedge_lab.demo.gold_evaluation import CurvePoint

KL = [0.0, 1.0, 4.0, 9.0]
LONG = "Share of the held-out posts on which the policy wins"


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


def test_points_at_distance_zero_and_intervals_at_the_end_of_a_share_stay_in_range():
    gold = [Interval(each, each - 0.1, each) for each in (0.2, 0.9, 1.0, 0.5)]
    curve = [CurvePoint(at, kl, kl, each) for at, (kl, each) in enumerate(zip([-0.1, *KL[1:]], gold, strict=True))]
    above, below = draw_curve(curve, {}).axes
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
    figure, (left, right) = new_axes(1, 2, width=9.6, height=2.0)
    label_axes(left, title=LONG, y_label="score by runs/some-long-folder/reward/model, " * 2)
    label_axes(right, title=f"{LONG} too")
    wrap_labels(figure)
    figure.draw_without_rendering()
    titles = [next(each.get_window_extent() for each in axes.findobj(Text) if LONG[:9] in each.get_text())
              for axes in figure.axes]  # fmt: skip
    neighbor = right.get_tightbbox()
    assert neighbor is not None
    assert titles[0].x1 < min(titles[1].x0, neighbor.x0)
    assert titles[1].x1 < figure.bbox.x1
    assert left.yaxis.label.get_window_extent().height <= figure.bbox.height
