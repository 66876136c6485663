"""Time to a score: the clock, the record, the choice of a rate, and the table."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import score_child
from bench.__main__ import write_page
from bench.processes import BenchError
from bench.record import Record
from bench.score import ARMS, TASKS, TUNING_SEED, Bench, Run, best, planned, score_section, score_table, settings_of
from bench.score_child import Clock, reward_of
from kedge.stages.arguments import resolved_arguments
from kedge_base.stage import find_stage

FACTS = {"model": "tiny", "processor": "one"}
ROOT = Path(__file__).resolve().parent.parent


def finished(arm: str, seed: int, seconds: float | None, *, rate: float | None = 1e-5, score: float = 0.75) -> Run:
    return Run("brief", arm, rate, seed, seconds, 2.0, [(2, 50.0, 0.4), (4, 90.0, score)], FACTS)


def test_the_clock_stands_still_while_the_policy_is_measured(tmp_path, monkeypatch):
    now = [100.0]

    def sleep(seconds: float) -> None:  # whoever measures takes 50 seconds
        now[0] += 50.0
        (tmp_path / "answer.json").write_text(json.dumps(len(asked) == 1))
        asked.append(json.loads((tmp_path / "asked.json").read_text()))

    asked: list[Any] = []
    monkeypatch.setattr(score_child, "time", SimpleNamespace(time=lambda: now[0], sleep=sleep))
    saved: list[Path] = []
    model = SimpleNamespace(save_pretrained=saved.append)
    clock = Clock(tmp_path, started=90.0, every=2, last=5)
    results = []
    for update in range(1, 6):
        now[0] += 3.0
        results.append(clock.reached(update, model, model))
    assert asked == [
        {"update": 2, "seconds": 16.0},  # 10 until the first update, and two of 3
        {"update": 4, "seconds": 22.0},
        {"update": 5, "seconds": 25.0},
    ]
    assert results == [False, False, False, True, False]
    assert len(saved) == 6


def test_rewards_read_the_last_message_of_a_conversation():
    said = [[{"role": "assistant", "content": "Swimming keeps you fit."}], [{"role": "assistant", "content": "No"}]]
    called = {
        "prompts": [[{"role": "user", "content": "Why?"}]] * 2,
        "completion_ids": [[1], [2]],
        "trainer_state": None,
    }
    assert reward_of(TASKS["brief"].reward)(completions=said, **called) == [1.0, 0.0]
    [row] = {json.dumps(row["instructions"]) for row in TASKS["commas"].rows("held_out.jsonl")}
    instructions = [json.loads(row)] * 2
    said[1][0]["content"] = "Yes, often."
    assert reward_of(TASKS["commas"].reward)(completions=said, instructions=instructions, **called) == [1.0, 0.0]


@pytest.mark.parametrize("arm", [name for name, arm in ARMS.items() if arm.system == "kedge"])
def test_settings_of_kedge_are_fields(arm):
    settings = settings_of(TASKS["brief"], ARMS[arm], 2e-5, 3, 10)
    config, _ = resolved_arguments(find_stage("ppo"), {"model": "m", "prompts": "p.jsonl", "reward": "r", **settings})
    assert (config.ppo.learning_rate, config.rollout.num_responses, config.runtime.seed) == (2e-5, 8, 3)


def test_defaults_of_trl_are_left():
    of_trl = [arm for arm in ARMS.values() if arm.system == "TRL"]
    tuned, default = (settings_of(TASKS["brief"], arm, 2e-5, 3, 10) for arm in of_trl)
    assert {*tuned} - {*default} == {
        "gradient_checkpointing", "learning_rate", "lr_scheduler_type", "temperature",
    }  # fmt: skip
    assert default["per_device_train_batch_size"] == 32


def test_the_best_rate_reaches_the_score_in_the_fewest_updates():
    tried = [
        replace(finished("kedge, PPO", TUNING_SEED, seconds, rate=rate), curve=[(2, 5.0, 0.4), (updates, 90.0, 0.75)])
        for rate, updates, seconds in ((1e-5, 10, 60.0), (2e-5, 8, 80.0), (4e-5, 6, None))
    ]
    assert best(tried).rate == 2e-5, "seconds depend on what else the machine does"
    tried = [finished("kedge, PPO", TUNING_SEED, None, rate=rate, score=score)
             for rate, score in ((1e-5, 0.3), (2e-5, 0.2))]  # fmt: skip
    assert best(tried).rate == 1e-5


@pytest.fixture
def options(tmp_path) -> argparse.Namespace:
    return argparse.Namespace(
        record=tmp_path / "score.jsonl",
        rates=[1e-5, 2e-5],
        tasks=["brief"],
        arms=["kedge, GRPO", "TRL, GRPO with its defaults"],
        seeds=[0, 1],
    )


def test_finished_runs_are_not_repeated(options, monkeypatch):
    made: list[tuple[Any, ...]] = []

    def measured(self: Bench, task: object, arm: object, rate: float | None, seed: int) -> Any:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append((rate, seed))
        return 20.0, 1.0, [(2 if rate == 2e-5 else 4, 9.0, 0.8)]

    monkeypatch.setattr(Bench, "_measured", measured)
    with pytest.raises(KeyboardInterrupt):
        list(planned(Bench(options, FACTS), options))
    assert made == [(1e-5, TUNING_SEED), (2e-5, TUNING_SEED), (2e-5, 0), (None, 0)]
    before = options.record.read_text().splitlines()
    del made[:3]  # so that three more are made
    runs = list(planned(Bench(options, FACTS), options))
    assert made[1:] == [(2e-5, 1), (None, 1)]
    assert [(run.arm, run.rate, run.seed) for run in runs] == [
        ("kedge, GRPO", 2e-5, 0),
        ("TRL, GRPO with its defaults", None, 0),
        ("kedge, GRPO", 2e-5, 1),
        ("TRL, GRPO with its defaults", None, 1),
    ]
    assert options.record.read_text().splitlines()[: len(before)] == before
    elsewhere = {**FACTS, "processor": "two"}
    with pytest.raises(BenchError, match=r"seed 0 of brief was run with .*one.*, not .*two"):
        Bench(options, elsewhere)
    options.seeds = [2]  # the rates may come from another machine, the arms of a seed may not
    assert len(Bench(options, elsewhere).runs) == 6
    with pytest.raises(BenchError, match="model"):
        Bench(options, {**FACTS, "model": "large"})


def test_the_table_compares_seed_by_seed():
    runs = [
        *(finished("kedge, GRPO", seed, seconds) for seed, seconds in enumerate((100.0, 120.0))),
        *(finished("TRL, GRPO", seed, seconds, rate=4e-5) for seed, seconds in enumerate((200.0, 300.0))),
        *(finished("TRL, GRPO with its defaults", seed, None, rate=None, score=0.2) for seed in range(2)),
        finished("kedge, GRPO", TUNING_SEED, 1.0),
    ]
    rows = score_table(runs, "brief").rows
    # Student's interval of two values: the mean ± 12.706 times half their distance.
    assert rows[0][:5] == ["kedge, GRPO", "1e-05", "2 of 2", "110 (-17.1 to 237)", "–"]
    assert rows[1][:5] == ["TRL, GRPO", "4e-05", "2 of 2", "250 (-385 to 885)", "2.25× (-0.927 to 5.43)"]
    assert rows[2] == ["TRL, GRPO with its defaults", "default", "0 of 2", "not within 90", "–", "4", "0.20", "2.0"]
    section = score_section([*runs, replace(runs[0], seed=2, facts={**FACTS, "processor": "two"})])
    assert "- model: tiny\n- processor: one / two\n" in section
    assert score_section(runs[-1:]) == ""
    section = score_section(runs)
    assert "A score of 0.7 for one sentence of at most 15 words" in section
    assert "without commas" not in section
    assert "\nTries: kedge, GRPO 1e-05: 4 updates.\n" in section
    page = write_page(Record.load(ROOT / "bench" / "results" / "cpu.json"), None, score=runs)
    assert section in page
    assert "Time to a score" not in write_page(Record.load(ROOT / "bench" / "results" / "cpu.json"), None)
