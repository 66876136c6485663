"""Sweeps: runs by setting, results over seeds, the mean curves and their bands, and the page about all of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge_base.errors import DataError
from kedge_inspect.page.curves import mean_curves
from kedge_inspect.page.document import render_page
from kedge_inspect.page.sweep import colors_of, field_plots
from kedge_inspect.report import collect_page, write_report
from kedge_inspect.sweeps import (
    Goal,
    Setting,
    Sweep,
    SweptRun,
    compare,
    final_value,
    find_goal,
    read_sweep,
)
from tests.inspect.page.records import metric_row, ppo_record
from tests.inspect.sweeps import name, write_sweep

SCORE = "reward/score_mean"


def swept(seed: int, **values: str) -> SweptRun:
    label = "_".join([*(f"{key}={value}" for key, value in values.items()), f"seed={seed}"])
    return SweptRun(label, {f"ppo.{key}": value for key, value in values.items()}, seed, Path(label))


def seeds(*scores: dict[int, float | None]) -> list[Any]:
    """Runs of one setting with these scores by update."""
    return [ppo_record(metrics=[metric_row(update, **{SCORE: score}) for update, score in run.items()])
            for run in scores]  # fmt: skip


def test_runs_with_the_same_values_are_one_setting():
    runs = [swept(seed, rate=rate) for seed in (0, 1) for rate in ("1e-5", "1e-4")]
    settings = Sweep(Path("sweep"), "ppo", runs).settings
    assert [setting.label for setting in settings] == ["ppo.rate=1e-5", "ppo.rate=1e-4"]
    assert [[run.seed for run in setting.runs] for setting in settings] == [[0, 1], [0, 1]]
    assert [setting.label for setting in Sweep(Path("sweep"), "ppo", [swept(0), swept(7)]).settings] == [""]


def test_the_metric_and_its_direction():
    known = ["update", "loss", SCORE, "objective/kl"]
    assert find_goal("ppo", known, None, None) == Goal(SCORE, higher_is_better=True)
    assert find_goal("ppo", known, "objective/kl", None) == Goal("objective/kl", higher_is_better=False)
    assert find_goal("ppo", known, "objective/kl", "max") == Goal("objective/kl", higher_is_better=True)
    assert find_goal("sft", known, None, None) == Goal("loss", higher_is_better=False)
    assert find_goal("control", ["episode/return_mean"], None, None) == Goal(
        "episode/return_mean", higher_is_better=True
    )
    for term in ("score/quickly", "eval/score/glossary"):
        assert find_goal("ppo", [term], term, None) == Goal(term, higher_is_better=True)
    assert find_goal("ppo", known, "eval/score", None) is None


def test_the_final_value_is_that_of_the_last_tenth():
    rows = [{"update": n, "score": float(n)} for n in range(1, 31)]
    assert final_value(rows, "score") == 29  # of 28, 29 and 30
    assert final_value([*rows, {"update": 31}, {"update": 32, "score": math.nan}], "score") == 29
    assert final_value(rows, "loss") is None


def test_settings_are_compared_by_their_finished_runs_alone():
    runs = [swept(seed, rate=rate) for rate in ("a", "b", "c") for seed in (0, 1)]
    settings = Sweep(Path("sweep"), "ppo", runs).settings
    finished = {run.name: [{SCORE: value, "objective/kl": 2.0}] for run, value in zip(runs, (1, 2, 4), strict=False)}
    best, second, last = compare(settings, finished, Goal(SCORE, higher_is_better=True))
    assert [row.label for row in (best, second, last)] == ["ppo.rate=b", "ppo.rate=a", "ppo.rate=c"]
    assert (best.values, second.values, last.interval) == ([4], [1, 2], None)
    assert second.kl == 2


def test_settings_with_the_same_result_tie(tmp_path: Path):
    scores = {("1e-5", 0): [0.1, 0.3, 0.3], ("1e-4", 0): [0.2, 0.1, 0.3]}
    folder = write_sweep(tmp_path / "sweep", scores, finished=list(scores), num_seeds=1)
    assert collect_page([folder])["sweep"]["sentences"][1] == (
        "2 settings tie for the highest reward/score_mean, 0.3: learning_rate=1e-5; learning_rate=1e-4."
    )


def test_a_band_is_students_interval_at_every_update():
    # Update 2: mean 3, s = 2, three seeds: 3 ± 4.30265 · 2 / √3 = 3 ± 4.9683.
    found = mean_curves(seeds({1: 1.0, 2: 1.0}, {1: 1.0, 2: 3.0}, {1: 1.0, 2: 5.0}), most_points=10)
    assert (found["update"], found["items"]) == ([1, 2], [8, 16])
    assert found["columns"][SCORE] == [1, 3]
    assert found["low"][SCORE] == pytest.approx([1, -1.9683], abs=1e-4)
    assert found["high"][SCORE] == pytest.approx([1, 7.9683], abs=1e-4)
    assert found["seeds"][SCORE] == [3, 3]


def test_a_band_ends_where_fewer_than_two_seeds_go_on():
    found = mean_curves(seeds({1: 0.0, 2: 1.0, 3: 4.0, 4: 5.0}, {1: 2.0, 2: 3.0}, {1: 1.0}), most_points=10)
    assert found["seeds"][SCORE] == [3, 2, 1, 1]
    assert found["columns"][SCORE] == [1, 2, None, None]
    assert found["tails"][SCORE] == [None, None, 4, 5]
    # Update 2: mean 2, s = √2, two seeds: 2 ± 12.706 · √2 / √2.
    assert (found["low"][SCORE][1], found["high"][SCORE][1]) == pytest.approx((-10.706, 14.706))
    assert found["low"][SCORE][2:] == found["high"][SCORE][2:] == [None, None]
    assert found["seconds"] == [4, 8, 12, 16]


def test_a_single_seed_is_its_own_mean_and_a_missing_value_counts_for_no_seed():
    alone = mean_curves(seeds({1: 3.0, 2: None, 3: 5.0}), most_points=10)
    assert (alone["columns"][SCORE], alone["tails"][SCORE]) == ([3, None, 5], [None] * 3)
    found = mean_curves(seeds({1: 1.0, 2: None}, {1: 3.0, 2: 9.0}), most_points=10)
    assert (found["columns"][SCORE], found["tails"][SCORE]) == ([2, None], [None, 9])


def test_long_curves_are_thinned_seed_by_seed():
    # Updates 1 and 2 are one point: the seeds' means are 2 and 6, whose mean is 4 and s = 2.8284.
    found = mean_curves(seeds({1: 1.0, 2: 3.0, 3: 0.0}, {1: 5.0, 2: 7.0, 3: 0.0}), most_points=2)
    assert (found["update"], found["every"]) == ([2, 3], 2)
    assert found["columns"][SCORE] == [4, 0]
    assert found["high"][SCORE][0] == pytest.approx(4 + 12.706 * 2)


def test_a_slow_seed_that_ends_early_does_not_turn_time_back():
    slow, fast = seeds({1: 0.0}, {1: 0.0, 2: 0.0, 3: 0.0})
    slow = replace(slow, metrics=[{**slow.metrics[0], "time/update": 100.0}])
    assert mean_curves([slow, fast], most_points=10)["seconds"] == [52, 56, 60]


def test_results_are_plotted_over_fields_with_numbers():
    values = [{"rate": rate, "loss": loss} for rate in ("1e-6", "1e-5") for loss in ("clipped", "unclipped")]
    plots = field_plots([Setting(each, ()) for each in values])
    assert plots == [{"field": "rate", "values": [1e-6, 1e-6, 1e-5, 1e-5], "log": True, "lines": [[0, 2], [1, 3]]}]
    few = field_plots([Setting({"epochs": epochs}, ()) for epochs in ("4", "1", "2")])
    assert (few[0]["log"], few[0]["lines"]) == (False, [[1, 2, 0]])


def test_of_many_settings_the_best_have_colors():
    assert colors_of([1, 0]) == [0, 1]
    colors = colors_of([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    assert colors[9] == 0
    assert colors[:2] == [None, None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first rate, both seeds have finished; of the second, one has failed and one has not begun."""
    scores = {("1e-5", 0): [1.0, 2.0], ("1e-5", 1): [1.0, 4.0], ("1e-4", 0): [9.0]}
    return write_sweep(
        tmp_path_factory.mktemp("runs") / "rates",
        scores,
        finished=[("1e-5", 0), ("1e-5", 1)],
        failed={("1e-4", 0): "error: <b>the loss</b> is not finite"},
    )


def test_the_page_of_a_sweep_overlays_its_settings(folder: Path):
    data = collect_page([folder])
    sweep = data["sweep"]
    assert [run["name"] for run in data["runs"]] == [name("1e-5", 0), name("1e-5", 1), name("1e-4", 0)]
    assert [run["color"] for run in data["runs"]] == [0, 0, 1]
    assert sweep["metric"] == SCORE
    first, second = sweep["settings"]
    assert (first["value"], first["num_values"], first["runs"]) == (3, 2, [0, 1])
    # A failed run has no result, however high its score was.
    assert (second["value"], second["num_values"], second["num_seeds"]) == (None, 0, 2)
    assert sweep["order"] == [0, 1]
    assert [trial["state"] for trial in sweep["trials"]] == ["finished", "finished", "failed", "not started"]
    assert sweep["sentences"][0] == "2 of 4 runs finished, 1 failed, 1 not started."
    page = render_page(data).decode()
    assert "learning_rate=1e-5 has the highest reward/score_mean: 3" in page
    assert "<b>the loss" not in page
    assert write_report([folder]) == folder / "report.html"


def test_a_sweep_that_has_not_begun_has_a_page(tmp_path: Path):
    data = collect_page([write_sweep(tmp_path / "rates", {})])
    assert data["sweep"]["sentences"][0] == "0 of 4 runs finished, 4 not started."
    assert data["sweep"]["settings"][0]["curves"] is None
    render_page(data)


def test_a_damaged_sweep_is_one_line(tmp_path: Path):
    (tmp_path / "sweep.json").write_text('{"stage": "ppo", "runs": [{}]}', encoding="utf-8")
    with pytest.raises(DataError, match=r"sweep.json' is damaged: KeyError: 'name'"):
        read_sweep(tmp_path)
