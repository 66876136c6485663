"""Plots: which files a run gets, what they hold, and that odd figures never stop a run at its end."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from kedge.algorithm.statistics import Interval
from kedge.logs.plots import style as drawing
from kedge.logs.plots.results import plot_calibration, plot_frontier, plot_intervals, plot_overoptimization
from kedge.logs.plots.style import Line, draw_lines, new_axes
from kedge.logs.plots.training import plot_curves, plot_training

KL = [0.0, 1.0, 4.0, 9.0]


def ppo_rows(count):
    return [
        {
            "update": update,
            "reward/score_mean": math.log(update),
            "objective/kl": 0.1 * update,
            "policy/entropy": 2.0,
            "policy/clip_fraction": 0.1,
            "value/clip_fraction": 0.05,
            "value/explained_variance": math.nan if update == 1 else 0.3,
            "policy/loss": -0.01,
            "value/loss": None if update == 2 else 0.4,
            "time/update": 1.0,
        }
        for update in range(1, count + 1)
    ]


def is_drawn(path):
    """A PNG of some size that is not one flat colour."""
    pixels = imread(path)
    return pixels.shape[1] >= 600 and pixels.std() > 0.01


def test_a_ppo_run_gets_its_plots_and_an_overview(tmp_path):
    paths = plot_training(ppo_rows(3), tmp_path)
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    subjects = ("reward", "kl", "entropy", "clip_fraction", "explained_variance", "policy_loss", "value_loss")
    assert names == {f"{subject}.png" for subject in (*subjects, "overview")}
    assert sorted(path.name for path in paths) == sorted(names)
    assert all(is_drawn(path) for path in paths)


def test_a_supervised_run_gets_losses_and_accuracy(tmp_path):
    rows = [{"update": step, "loss": 1 / step, "accuracy": 0.6} for step in range(1, 50)]
    rows[24] |= {"eval/loss": 0.5, "eval/accuracy": 0.6}
    plot_training(rows, tmp_path, x_label="step")
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"loss.png", "accuracy.png", "overview.png"}


@pytest.mark.parametrize("rows", [[], [{"update": 1}], [{"update": 1, "loss": None, "policy/entropy": math.inf}]])
def test_a_run_that_measured_nothing_gets_no_plots(tmp_path, rows):
    assert plot_training(rows, tmp_path) == []
    assert not (tmp_path / "plots").exists()


def test_the_same_rows_give_the_same_picture(tmp_path):
    first, second = (plot_training([{"update": 1, "loss": 2.5}], tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_lines_carry_their_label_and_last_figure():
    _, (axes,) = new_axes()
    draw_lines(axes, [Line([1, 2], [0.5, 2.0], "train"), Line([1, 2], [1.0, math.nan])], levels={"base": 1.5, "": 0.0})
    assert texts(axes) == ["1", "base 1.5", "train 2"]


def test_labels_never_touch():
    _, (axes,) = new_axes()
    draw_lines(axes, [Line([0, 1], [0.0, 1.0 + index / 1_000], str(index)) for index in range(6)])
    heights = [text.xy[1] for text in axes.texts]
    assert np.diff(heights).min() >= drawing.LABEL_GAP - 1e-9
    assert max(heights) <= 1.0


def test_long_lines_are_smoothed_and_keep_a_constant():
    _, (axes,) = new_axes()
    noise = np.random.default_rng(0).normal(size=200)
    draw_lines(axes, [Line(range(200), noise.tolist()), Line(range(200), [3.0] * 200)])
    raw, smooth, _, constant = (np.asarray(line.get_ydata()) for line in axes.lines)
    assert np.array_equal(raw, noise)
    # The mean of 11 independent figures has a deviation of 1/√11 = 0.30.
    assert smooth.std() < 0.4
    assert constant == pytest.approx(3.0)


def test_a_wild_value_is_drawn_at_the_floor(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("kedge.logs.plots.training.draw_lines", lambda axes, lines, **_: drawn.extend(lines))
    plot_training([{"update": 1, "value/explained_variance": -500.0}], tmp_path)
    assert drawn[0].y == (-1.0,)


def test_result_plots_are_drawn(tmp_path):
    gold = [4.0, 5.0, 5.5, 5.2]
    band = ([g - 0.1 for g in gold], [g + 0.1 for g in gold])
    paths = [
        plot_curves({"a": ([1, 2], [1, 2]), "b": ([1, 2], [2, 1])}, tmp_path / "c.png", title="t", levels={"l": 1.5}),
        plot_calibration([1.0, -0.5, 2.0, 0.0], tmp_path / "calibration.png"),
        plot_frontier([-0.1, *KL[1:]], {"gold": gold, "proxy": KL}, tmp_path / "new" / "f.png", bands={"gold": band}),
        plot_overoptimization(KL, KL, gold, tmp_path / "o.png", gold_band=band, levels={"references": 4.6}),
        plot_intervals(
            {"Quality": dict.fromkeys(("SFT", "PPO"), Interval(1, 0.9, 1.1)), "Win": {"a": Interval(0.6, 0.5, 0.7)}},
            tmp_path / "i.png",
            levels={"Win": 0.5},
        ),
    ]  # fmt: skip
    assert all(is_drawn(path) for path in paths)


def test_plotting_never_touches_pyplot():
    """pyplot's global figures leak between runs and ask for a display."""
    program = "import sys, kedge.logs.plots.training; print('matplotlib.pyplot' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
