"""The benchmark on environments: its figures by hand, and runs that are recorded once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bench.control.__main__ as bench_control
from bench import table1
from bench.control import jobs
from bench.control.jobs import Job, Outcome, Peers, read_outcomes, run_jobs
from bench.control.recipes import QUIET, RECIPES, Recipe, kedge_settings
from bench.control.tables import learning_table, speed_table
from bench.processes import BenchError
from bench.table1 import KL, RETURN, TASKS, VARIANTS, scores_of
from kedge.config import config_from_settings, load_config

PAGE = Path(__file__).parents[1] / "bench" / "control" / "RESULTS.md"

MARKS: list[list[float | None]] = [[100, 9.0, 10.0, None], [200, 10.0, 12.0, 400.0], [400, 11.0, 14.0, 480.0]]
"""The first update took long, as one that is compiled does."""


def outcome(**changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "key": "k", "kind": "speed", "system": "kedge", "env": "CartPole-v1", "seed": 1, "name": "", "total_steps": 400,
        "marks": MARKS, "metrics": {}, "load": (1.0, 2.0), "versions": {},
    }  # fmt: skip
    return Outcome(**{**fields, **changes})


def test_a_speed_leaves_out_what_comes_before_its_first_row():
    assert outcome().speed() == pytest.approx(300 / 2.0)
    assert outcome().speed(first_steps=199) == pytest.approx(300 / 2.0)
    assert outcome().speed(first_steps=200) == pytest.approx(200 / 1.0)


def test_a_return_is_reached_at_its_first_row():
    assert outcome().reached(400.0) == (200.0, 10.0)
    assert outcome().reached(450.0) == (400.0, 11.0)
    assert outcome().reached(481.0) is None


def test_speeds_are_compared_by_their_medians():
    fast = [outcome(marks=[[0, 0.0, 0.0, None], [400, cpu, 9.0, None]]) for cpu in (1.0, 2.0, 4.0)]
    slow = [replace(each, system="sb3", marks=[[0, 0.0, 0.0, None], [400, 8.0, 9.0, None]]) for each in fast]
    rows = speed_table([*fast, *slow]).splitlines()
    assert rows[2] == "| CartPole-v1 | kedge | 200 (100–400) | 4.00 | – | – | 3 |"


def test_learning_is_summed_up_by_steps_to_the_return_and_the_return_at_the_end():
    runs = [outcome(kind="learn"), outcome(kind="learn", seed=2, marks=MARKS[:2])]
    row = learning_table(runs, levels={"CartPole-v1": (475.0, 400)}, chosen_on={}).splitlines()[2]
    assert row.startswith("| CartPole-v1 | kedge | 1 to 2 | 400 | 1 of 2 (475) | 400 | 11.0 | 440.00 (")
    row = learning_table(runs, levels={"CartPole-v1": (475.0, 401)}, chosen_on={}).splitlines()[2]
    assert row.startswith("| CartPole-v1 | kedge | 1 to 2 | 400 | – | – | – | 440.00 (")


def test_seeds_on_which_settings_were_chosen_have_rows_of_their_own():
    runs = [outcome(kind="learn", seed=seed) for seed in (3, 1, 2)]
    rows = learning_table(runs, levels={"CartPole-v1": (475.0, 80_000)}, chosen_on={"CartPole-v1": 2}).splitlines()[2:]
    assert [row.split(" | ")[2] for row in rows] == ["1 to 2", "3"]


def test_a_run_is_recorded_once_and_a_failure_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []

    def run(job: Job, *, name: str, work: Path, peers: Peers) -> Outcome:
        seen.append(job.seed)
        if job.seed == 2 and len(seen) <= 3:
            raise BenchError("broken")
        return outcome(key=job.key, seed=job.seed, name=name)

    monkeypatch.setattr(jobs, "run_job", run)
    plan = [("a", Job("learn", "kedge", RECIPES["CartPole-v1"], seed, 100)) for seed in (1, 2, 3)]
    record = tmp_path / "record.jsonl"
    with pytest.raises(BenchError, match="1 of 3 runs failed; the last: broken"):
        run_jobs(plan, record=record, work=tmp_path, peers=Peers())
    run_jobs(plan, record=record, work=tmp_path, peers=Peers())
    assert seen == [1, 2, 3, 2]
    assert sorted(each.seed for each in read_outcomes(record).values()) == [1, 2, 3]


def test_an_environment_alone_is_timed_in_a_process_of_its_own(tmp_path: Path):
    job = Job("speed", "alone", RECIPES["CartPole-v1"], 1, 6000)
    run_jobs([("", job)], record=tmp_path / "record.jsonl", work=tmp_path, peers=Peers())
    [found] = read_outcomes(tmp_path / "record.jsonl").values()
    assert [row[0] for row in found.marks] == [2048, 4096]
    assert found.speed() > 0


@pytest.mark.parametrize("system", ["sb3", "cleanrl"])
def test_a_peer_that_was_not_named_is_an_error_in_one_line(system: str, tmp_path: Path):
    job = Job("speed", system, RECIPES["CartPole-v1"], 1, 100)
    with pytest.raises(BenchError, match=f"{system} needs --"):
        run_jobs([("", job)], record=tmp_path / "r.jsonl", work=tmp_path, peers=Peers())


def test_every_run_of_kedge_has_valid_settings():
    recipes: list[tuple[Recipe, Any]] = [(recipe, {}) for recipe in RECIPES.values()]
    recipes += [
        (replace(Recipe(env), **variant.recipe), {**table1.COMMON, **variant.settings})
        for env in TASKS
        for variant in VARIANTS
    ]
    for recipe, more in recipes:
        config = config_from_settings("control", {**QUIET, **kedge_settings(recipe), **more, "control.env": recipe.env})
        assert config.control.steps_per_update == recipe.steps_per_update
        assert config.control.learning_rate == recipe.learning_rate


def test_scores_are_scaled_from_the_untrained_policy_to_the_best_variant():
    """Two tasks: untrained 10 and 0, best means 30 and 100."""
    first, second = list(TASKS)[:2]

    def run(name: str, env: str, seed: int, start: float, end: float) -> Outcome:
        steps = Recipe(env).steps_per_update
        metrics: Any = {RETURN: [start, None, end], KL: [0.01] * 3}
        return outcome(kind="table", name=name, env=env, seed=seed, metrics=metrics, marks=[[steps, 1.0, 1.0, None]])

    found = scores_of([
        run("a", first, 2, 12.0, 40.0), run("a", first, 1, 8.0, 20.0), run("b", first, 1, 10.0, 0.0),
        run("a", second, 1, 0.0, 50.0), run("b", second, 1, 0.0, 100.0),
    ])  # fmt: skip
    assert found == {"a": [[pytest.approx(0.5), pytest.approx(1.5)], [pytest.approx(0.5)]], "b": [[-0.5], [1.0]]}


def test_the_page_is_that_of_the_recorded_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_control, "PAGE", tmp_path / "page.md")
    bench_control.publish(bench_control.RECORD)
    assert PAGE.read_text(encoding="utf-8") == (tmp_path / "page.md").read_text(encoding="utf-8"), (
        "run `python -m bench.control page`"
    )


def test_a_short_trial_is_not_mixed_with_the_runs_of_full_length():
    full, trial = outcome(total_steps=400), outcome(total_steps=100)
    assert table1.longest([trial, full, replace(trial, env="Hopper-v5")]) == [full, replace(trial, env="Hopper-v5")]


def test_the_table_has_a_row_per_variant_that_was_run():
    names = [VARIANTS[0].name, VARIANTS[2].name]
    runs = [
        outcome(
            kind="table", name=name, env=env, failed="nan" if name == names[1] else "",
            metrics={RETURN: [0.0, end], KL: [0.01, 0.03]}, marks=[[2048, 1.0, 1.0, None]],
        )
        for env in TASKS
        for name, end in zip(names, (100.0, 50.0), strict=True)
    ]  # fmt: skip
    rows = table1.table(runs).splitlines()[2:]
    assert rows == [
        "| clipping, ε = 0.2 | 1.00 (1.00–1.00) | 0.82 | 0.0200 | 1, 1, 1 | – |",
        "| adaptive KL, d = 0.01 | 0.50 (0.50–0.50) | 0.74 | 0.0200 (aim 0.01) | 1, 1, 1 | 3 |",
    ]


def test_cartpoles_recipe_is_the_preset() -> None:
    by_preset = load_config(preset="classic-control", flags={"control.env": "CartPole-v1"}, stage="control")
    steps = {"control.env": "CartPole-v1", "control.total_steps": by_preset.control.total_steps}
    by_recipe = load_config(flags={**steps, **kedge_settings(RECIPES["CartPole-v1"])}, stage="control")
    assert by_preset.control == by_recipe.control
