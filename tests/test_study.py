"""The study's statistics, sorting world and page, on numbers worked out by hand; no run."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.processes import BenchError
from bench.study.child import outcome_of, with_critic
from bench.study.page import draw_page, write_page
from bench.study.plan import PLAN, Plan, read_plan
from bench.study.sorting import character_tokenizer, demonstrations, numbers, scratchpad, verify
from bench.study.statistics import improvement, interquartile_mean, with_interval
from bench.study.study import PARTS, Study
from bench.study.unit import Budget, Outcome, Unit, append_outcome, read_outcomes
from kedge.config import config_from_settings

DOCS = PLAN.parents[2] / "docs"


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean([[8.0, 1.0, 2.0, 100.0, 3.0, -50.0, 4.0, 5.0]]) == 3.5  # the middle four: 2, 3, 4, 5
    assert interquartile_mean([[1.0, 2.0], [3.0, 10.0, 4.0]]) == 3.0  # ⌊5/4⌋ = 1 cut at either end: 2, 3, 4
    assert interquartile_mean([[7.0]]) == 7.0


def test_probability_of_improvement_counts_pairs_within_tasks() -> None:
    ours, theirs = [[3.0, 1.0], [5.0]], [[2.0, 1.0], [9.0, 0.0]]
    # Task one: 3>2, 3>1, 1<2, 1=1: 2.5 of 4. Task two: 5<9, 5>0: 1 of 2.
    assert improvement(ours, theirs) == pytest.approx((2.5 / 4 + 1 / 2) / 2)
    assert improvement(theirs, ours) == pytest.approx(1 - (2.5 / 4 + 1 / 2) / 2)


def test_the_interval_resamples_seeds_within_a_task() -> None:
    """Two tasks of constant scores have no spread; pooled resamples would have mixed them."""
    constant = with_interval(interquartile_mean, [[1.0] * 4, [3.0] * 4])
    assert (constant.value, constant.low, constant.high) == (2.0, 2.0, 2.0)
    # Of one seed in two, the share of ones is Bernoulli: 0 and 1 occur in more than 2.5 % of the resamples each.
    wide = with_interval(interquartile_mean, [[0.0, 1.0]])
    assert (wide.value, wide.low, wide.high) == (0.5, 0.0, 1.0)


def test_the_scratchpad_sorts_and_only_its_end_is_checked() -> None:
    text = scratchpad("503921")
    assert text == "0|53921,1|5392,2|539,3|59,5|9,9|=012359"
    nonsense = "whatever=012359"
    assert verify(["503921:"] * 4, [text, nonsense, text + "0", "012359"]) == [1.0, 1.0, 0.0, 1.0]


def test_a_slip_is_never_right_and_steps_after_it_are() -> None:
    prompts = numbers(300, seed=0)
    rows = demonstrations(prompts, seed=0)
    right = [scratchpad(each[:-1]) == row["completion"] for each, row in zip(prompts, rows, strict=True)]
    assert verify(prompts, [row["completion"] for row in rows]) == [float(each) for each in right]
    assert 0.25 < sum(right) / len(right) < 0.42  # 0.8 to the power of 5 is 0.33; four standard errors
    assert {len(row["completion"]) for row in rows} == {39}
    assert scratchpad("99", random.Random(0)).endswith(("=99", "=90", "=91", "=92", "=93", "=94", "=95", "=96", "=97"))


def test_prompts_are_distinct_and_leave_out_the_held_out_ones() -> None:
    held_out = numbers(100, seed=0)
    prompts = numbers(100, seed=0, without=held_out)
    assert len({*held_out, *prompts}) == 200


def test_a_character_is_a_token() -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer("503:0|53,=")["input_ids"]
    assert len(ids) == 10
    assert tokenizer.decode(ids) == "503:0|53,="


UNIT = Unit("sort", {"rollout.num_prompts": 4, "rollout.num_responses": 2}, 0, Budget(400.0, 100.0))
ROWS: list[dict[str, Any]] = [
    {
        "response/length": length,
        "flops/rollout": 10.0,
        "flops/train": 20.0,
        "flops/judge": 5.0,
        "cost/sft_steps": 2.0,
        "value/explained_variance": explained,
    }
    for length, explained in [(10.0, 0.0), (20.0, 0.4), (30.0, 0.6), (40.0, 0.8)]
]
EVALUATIONS = [{"update": update, "eval/score": score} for update, score in [(0, 0.2), (2, 0.4), (4, 0.8)]]


def outcome(**changed: Any) -> Outcome:
    found = outcome_of(UNIT, ROWS, EVALUATIONS, score="eval/score", start="abc", seconds=1.0, cpu_seconds=0.5)
    return replace(found, **changed)


def test_a_curve_is_over_what_was_spent_before_each_evaluation() -> None:
    """8 responses per update; a judge of weight 0 costs nothing."""
    found = outcome()
    assert found.tokens == [0.0, 240.0, 800.0]
    assert found.flops == [0.0, 60.0, 120.0]
    assert found.explained == [None, pytest.approx(0.2), pytest.approx(0.7)]
    assert found.explained_late == pytest.approx(0.7)
    assert found.checked("pairs_within") is None
    assert replace(found, checks=[{"critic/pairs_within": 0.5}, {"critic/pairs_within": 0.7}]).checked(
        "pairs_within"
    ) == pytest.approx(0.6)
    assert found.score_at("tokens", 120.0) == pytest.approx(0.3)
    assert found.score_at("flops", 90.0) == pytest.approx(0.6)
    with pytest.raises(BenchError, match="ended at 120 flops, before 121"):
        found.score_at("flops", 121.0)
    assert found.spent_until("tokens", 0.3) == pytest.approx(120.0)
    assert found.spent_until("flops", 0.6) == pytest.approx(90.0)
    assert found.spent_until("flops", 0.1) == 0.0
    assert found.spent_until("flops", 0.9) == math.inf
    assert replace(found, scores=[0.2, 0.5, 0.3]).spent_until("tokens", 0.4) == pytest.approx(160.0)


def test_the_record_has_a_line_per_run_and_one_start_per_task(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    append_outcome(outcome(seconds=1 / 3), record)
    append_outcome(outcome(key="other"), record)
    assert read_outcomes(record)[UNIT.key].seconds == 0.333333
    append_outcome(outcome(key="third", start="def"), record)
    with pytest.raises(BenchError, match="different weights, abc and def"):
        read_outcomes(record)


def recorded(plan: Plan, score: float) -> Study:
    """Every run of a plan; the score is the same everywhere but higher at the smallest learning rate of RLOO."""
    study = Study(plan, tuple(plan.tasks))
    for part in PARTS:
        for unit in study.missing(part).values():
            high = unit.settings["ppo.advantage"] == "rloo" and unit.settings["ppo.learning_rate"] < 3e-4
            ends = [0.1, score + high * 0.1]
            spent = {"tokens": [0.0, unit.budget.tokens], "flops": [0.0, unit.budget.flops]}
            study.outcomes[unit.key] = outcome(
                key=unit.key, updates=[0, 9], scores=ends, explained=[None, 0.5], last={"cost/sft_steps": 2.0}, **spent
            )
    return study


def test_every_algorithm_is_tuned_by_the_same_number_of_runs_and_no_seed_is_used_twice() -> None:
    plan = read_plan()
    study = Study(plan, ("sort",))
    tuning = study.units("tuning")
    counts = {name: sum(f", {name}," in text for text in tuning) for name in plan.algorithms}
    assert set(counts.values()) == {len(plan.grid("sort")) * len(plan.tuning_seeds)}
    assert not set(plan.tuning_seeds) & set(plan.seeds)
    assert {unit.responses for unit in tuning.values()} == {plan.tasks["sort"].responses}
    assert study.units("comparison") == {}  # nothing is tuned yet


def test_every_run_of_the_plan_has_valid_settings() -> None:
    """Each algorithm on each task, and each change, at one point of the grid."""
    plan = read_plan()
    units = [unit for task in plan.tasks for name in plan.algorithms for unit in runs(plan, task, name)]
    units += [plan.changed("sort", change, plan.grid("sort")[0])[0] for change in plan.ablation.changes]
    assert len({unit.key for unit in units}) == len(units)
    for unit in units:
        config_from_settings("ppo", {"model": "m", **with_critic(unit.settings, Path("critic"))})


def runs(plan: Plan, task: str, algorithm: str) -> list[Unit]:
    """The first run of an algorithm's tuning and of its comparison."""
    point = plan.grid(task)[0]
    return [plan.tuning(task, algorithm, point)[0], plan.comparison(task, algorithm, point)[0]]


def test_a_separate_critic_has_its_settings_and_a_pretrained_one_its_folder() -> None:
    plan = read_plan()
    [shared, separate] = (runs(plan, "sort", name)[1].settings for name in ("ppo", "ppo-pretrained"))
    assert "ppo.critic_learning_rate" not in shared
    assert separate["ppo.critic_learning_rate"] == 1e-3
    assert with_critic(separate, Path("/models/critic"))["ppo.critic_init"] == str(Path("/models/critic"))
    assert {each["ppo.critic_check"] for each in (shared, separate)} == {12}
    assert "ppo.critic_check" not in runs(plan, "sort", "grpo")[1].settings


def test_the_small_study_goes_through_every_part_to_its_page() -> None:
    study = recorded(read_plan(small=True), 0.5)
    assert [study.missing(part) for part in PARTS] == [{}, {}, {}]
    assert study.tuned("sort", "rloo") == {"ppo.learning_rate": 2e-4, "ppo.num_epochs": 2}
    page = write_page(study)
    assert re.search(r"^\| rloo +\| 0\.600 \(0\.600–0\.600\) +\|", page, re.MULTILINE)
    assert "| none: ppo-stack" in page
    assert "](study-sort.svg)" in page


def test_a_picture_has_both_budgets_and_a_line_per_algorithm(tmp_path: Path) -> None:
    study = recorded(read_plan(small=True), 0.5)
    draw_page(study, tmp_path)
    [file] = tmp_path.iterdir()
    text = file.read_text(encoding="utf-8")
    assert file.name == "study-sort.svg"
    for words in ("At equal FLOPs", "At equal sampled tokens", *study.plan.algorithms):
        assert words in text


def test_the_page_is_up_to_date() -> None:
    from bench.study.__main__ import RECORD

    plan = read_plan()
    fresh = write_page(Study.of(plan, tuple(plan.tasks), RECORD))
    assert (DOCS.parent / "bench" / "study" / "RESULTS.md").read_text(encoding="utf-8") == fresh, (
        "run `python -m bench.study --page`"
    )
