"""Evaluation during PPO: it changes nothing that is trained, keeps the best checkpoint, and can end the run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kedge.config import load_config, schedule_in_words
from kedge.logs.json_lines import MetricsLog
from kedge.models import find_model
from kedge.rewards import RewardTerm, Verdict
from kedge.runs.run import Resume
from kedge.stages.ppo import measurements, run_ppo
from kedge.training.runtime import Terminated
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import best_checkpoint, kept_checkpoints
from kedge_base.run_folder.record_format import CRITIC_CHECKS_FILE, EVALUATIONS_FILE, read_json_lines
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times
from tests.tiny import save_tiny_policy

HELD_OUT = ["The crew", "A rope", "Then the sun"]
CHECK = {"critic_check": 2, "ppo.critic_check.size": [32, 2, 2]}
EVAL = {**CHECK, "eval_every": 2, "num_updates": 5, "kl_controller": {"ziegler": {"target": 0.5}}, "entropy_coef": 0.01}
JUDGE = """
def longer(prompts, completions_a, completions_b, **_):
    return [float(len(a) > len(b)) if a != b else 0.5 for a, b in zip(completions_a, completions_b)]

def length(completions, **_):
    return [float(len(text)) for text in completions]

def brevity(completions, **_):
    return [-float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


async def draws(completions: list[str], **_: Any) -> list[float]:
    """A reward that draws from the global generators, which an evaluation must not disturb; a plain one is seeded."""
    return [len(text) / 20 + random.random() + float(torch.rand(())) for text in completions]


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]


REWARDS = [draws, RewardTerm(vowels, weight=0.0, name="vowels")]


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory) -> Path:
    """A run that evaluates; a judge scores the responses."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "judge.py").write_text(JUDGE)
    judge = {"evaluate.judge": f"{folder / 'judge.py'}:length", "checkpoint.keep_best": "eval/win_rate"}
    config = configure(policy, folder / "whole", **EVAL, **judge)
    run_ppo(config, prompts=PROMPTS, eval_prompts=HELD_OUT, reward=REWARDS)
    return folder / "whole"


def test_training_is_the_same_to_the_bit_without_evaluation(whole, policy, tmp_path):
    off = {"eval_every": None, "critic_check": None}
    run_ppo(configure(policy, tmp_path / "plain", **{**EVAL, **off}), prompts=PROMPTS, reward=REWARDS)
    evaluated = [
        {name: value for name, value in row.items() if not name.startswith(("eval/", "critic/"))}
        for row in metrics_without_times(whole)
    ]
    assert evaluated == metrics_without_times(tmp_path / "plain")
    weights = "model/model.safetensors"
    assert (whole / weights).read_bytes() == (tmp_path / "plain" / weights).read_bytes()


@pytest.mark.parametrize("kl_in", [{"reward": "k2"}, {"reward": "k3"}, {"loss": "k3"}])
def test_every_evaluation_charges_the_same_for_the_kl(policy, tmp_path, kl_in):
    """Whatever a controller and the estimator in the reward make of it."""
    settings = {"kl_in": kl_in, "kl_controller": {"schulman": {"target": 0.2, "wait": 0.0}}, "kl_coef": 0.05}
    settings |= {"num_updates": 4, "eval_every": 2, "learning_rate": 3e-3}
    run_ppo(configure(policy, tmp_path / "run", **settings), prompts=PROMPTS, eval_prompts=HELD_OUT, reward=vowels)
    rows = read_json_lines(tmp_path / "run" / EVALUATIONS_FILE)
    assert metrics_without_times(tmp_path / "run")[-1]["objective/kl_coef"] != 0.05
    assert abs(rows[-1]["eval/kl"]) > 0.01
    assert [row["eval/total"] for row in rows] == pytest.approx(
        [row["eval/score"] - 0.05 * row["eval/kl"] for row in rows], abs=1e-6
    )


def test_training_is_the_same_to_the_bit_without_fixed_prompts(policy, tmp_path):
    for number in (0, 2):
        config = configure(policy, tmp_path / f"{number}", num_updates=3, num_fixed_prompts=number)
        run_ppo(config, prompts=PROMPTS, reward=REWARDS)
    assert metrics_without_times(tmp_path / "0") == metrics_without_times(tmp_path / "2")


def test_a_reward_that_draws_in_the_background_is_neither_disturbed_nor_disturbs(policy, tmp_path):
    def slow(completions: list[str], **_: Any) -> list[float]:
        found = []
        for text in completions:
            time.sleep(0.01)
            found.append(len(text) / 20 + float(np.random.random()))  # the checks of types draw from Python's
        return found

    settings = {"num_updates": 4, "max_staleness": 1}
    for name, more in {"plain": {}, "measured": {"eval_every": 1}}.items():
        held_out = HELD_OUT if more else None
        config = configure(policy, tmp_path / name, **settings, **more)
        run_ppo(config, prompts=PROMPTS, eval_prompts=held_out, reward=slow)
    measured = [
        {key: value for key, value in row.items() if not key.startswith("eval/")}
        for row in metrics_without_times(tmp_path / "measured")
    ]
    assert metrics_without_times(tmp_path / "plain") == measured


def test_the_start_every_interval_and_the_end_are_measured(whole):
    rows = read_json_lines(whole / EVALUATIONS_FILE)
    assert [row["update"] for row in rows] == [0, 2, 4, 5]
    measured = {"eval/score", "eval/kl", "eval/total", "eval/length", "eval/eos_rate", "eval/win_rate"}
    measured |= {"eval/score/draws", "eval/score/vowels"}
    assert all(measured == row.keys() - {"update", "responses"} for row in rows)
    assert rows[0]["eval/kl"] == pytest.approx(0.0, abs=1e-5)
    assert rows[0]["eval/win_rate"] == 0.5
    # At the configured price, although the controller has changed it meanwhile.
    assert all(row["eval/total"] == pytest.approx(row["eval/score"] - 0.05 * row["eval/kl"], abs=1e-6) for row in rows)
    assert abs(rows[-1]["eval/kl"]) > 1e-3  # an estimate from three responses may be negative
    logged = {row["update"]: row for row in metrics_without_times(whole)}
    assert "eval/score" not in logged[3]
    assert all("responses" not in row for row in logged.values())
    for row in rows:
        assert [(each["number"], each["prompt"]) for each in row["responses"]] == list(enumerate(HELD_OUT))
        assert row["eval/score"] == pytest.approx(sum(each["score"] for each in row["responses"]) / len(HELD_OUT))
        assert row["eval/length"] == pytest.approx(sum(each["length"] for each in row["responses"]) / len(HELD_OUT))
    judged = [len(each["completion"]) for each in rows[0]["responses"]]
    assert sum(judged) > 0
    assert rows[0]["responses"] != rows[-1]["responses"]
    assert all(logged[row["update"]]["eval/score"] == row["eval/score"] for row in rows[1:])


def test_the_best_checkpoint_is_kept_and_named(whole):
    rates = {row["update"]: row["eval/win_rate"] for row in read_json_lines(whole / EVALUATIONS_FILE)}
    best = max(rates, key=lambda update: rates[update])  # the first of equal ones
    assert best_checkpoint(whole) == best
    assert {best, 5} <= set(kept_checkpoints(whole))
    assert find_model(f"{whole}@best") == str(whole / f"checkpoints/update-{best:06d}/model")
    finished = json.loads((whole / "finished.json").read_text())
    assert finished["best"] == {"update": best, "metric": "eval/win_rate", "value": rates[best]}


def test_a_resumed_run_is_the_same_to_the_bit(whole, policy, tmp_path, monkeypatch, capsys):
    write = MetricsLog.write

    def stop(log: MetricsLog, update: int, metrics: Any) -> None:
        write(log, update, metrics)
        if update == 3:
            monkeypatch.setattr(MetricsLog, "write", write)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsLog, "write", stop)
    judge = {"evaluate.judge": f"{whole.parent / 'judge.py'}:length", "checkpoint.keep_best": "eval/win_rate"}
    config = configure(policy, tmp_path / "split", **EVAL, **judge)
    data = {"prompts": PROMPTS, "eval_prompts": HELD_OUT, "reward": REWARDS}
    with pytest.raises(Terminated):
        run_ppo(config, **data)
    run_ppo(config, **data, resume=Resume())
    assert metrics_without_times(tmp_path / "split") == metrics_without_times(whole)
    for name in (
        "evaluations.jsonl",
        "critic_checks.jsonl",
        "finished.json",
        "checkpoints/best.json",
        "model/model.safetensors",
    ):
        assert (tmp_path / "split" / name).read_bytes() == (whole / name).read_bytes()
    # The resumed process did not see the start, and compares with it all the same.
    first, *_, last = read_json_lines(whole / EVALUATIONS_FILE)
    line = f"score {first['eval/score']:.2f} (", f" at the start, {last['eval/score']:.2f} ("
    [said] = [each for each in capsys.readouterr().err.splitlines() if each.startswith("held-out prompts: ")]
    assert all(part in said for part in line)


@pytest.mark.parametrize(
    ("changed", "metric"),
    [
        ("data.eval_prompts", "eval/win_rate"),
        ("data.eval_prompts", "eval/total"),
        ("evaluate.judge", "eval/win_rate"),
        ("evaluate.judge", "eval/total"),
        ("reward", "eval/win_rate"),
        ("reward", "eval/total"),
    ],
)
def test_nothing_is_compared_with_what_is_of_other_inputs(whole, policy, tmp_path, changed, metric):
    def function(setting: str) -> dict[str, str]:
        name = "brevity" if (changed, done) == (setting, 2) else "length"
        return {setting: f"{whole.parent / 'judge.py'}:{name}"}

    for done in (0, 2):
        own = {**function("evaluate.judge"), **function("reward"), "checkpoint.keep_best": metric}
        config = configure(policy, tmp_path / "run", **{**EVAL, "critic_check": None, "num_updates": done + 2, **own})
        prompts = HELD_OUT[:2] if (changed, done) == ("data.eval_prompts", 2) else HELD_OUT
        resume = Resume((changed,)) if done else None
        run_ppo(config, prompts=PROMPTS, eval_prompts=prompts, resume=resume)
    found = read_json_lines(tmp_path / "run" / EVALUATIONS_FILE)
    rates = {row["update"]: row["eval/win_rate"] for row in found}
    assert rates[0] == 0.5
    lengths = {row["update"]: [len(each["completion"]) for each in row["responses"]] for row in found}
    if changed == "data.eval_prompts":
        assert rates[4] == 0.5  # there are no responses of the start to compare with
    else:
        sign = -1 if changed == "evaluate.judge" else 1
        pairs = [(sign * now, sign * then) for now, then in zip(lengths[4], lengths[0], strict=True)]
        assert rates[4] == sum((now > then) + (now == then) / 2 for now, then in pairs) / len(pairs)
        assert rates[4] != 0.5 or changed == "reward"
    is_comparable = (changed, metric) in {("evaluate.judge", "eval/total"), ("reward", "eval/win_rate")}
    comparable = [row[metric] for row in found if is_comparable or row["update"] > 2]
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["best"]["value"] == max(comparable)


def test_a_response_without_a_score_keeps_the_reasons_of_the_others(policy, tmp_path):
    def judged(prompts: list[str], **_: Any) -> list[Verdict | None]:
        return [None if text == HELD_OUT[0] else Verdict(1.0, f"because of {text}") for text in prompts]

    config = configure(policy, tmp_path / "run", eval_every=1, num_updates=1)
    run_ppo(config, prompts=PROMPTS, eval_prompts=HELD_OUT, reward=judged)
    found = [
        [(each["number"], each["reason"]) for each in row["responses"]]
        for row in read_json_lines(tmp_path / "run" / EVALUATIONS_FILE)
    ]
    assert found == [[(number, f"because of {HELD_OUT[number]}") for number in (1, 2)]] * 2, "before and after"


def scripted(monkeypatch, scores: list[float]) -> None:
    """Replace the evaluations by given scores."""
    left = iter(scores)

    def evaluate(self: Any, update: int) -> dict[str, float]:
        metrics = {"eval/score": next(left), "eval/kl": 0.0}
        self._log.evaluations.append(update, metrics)
        return metrics

    monkeypatch.setattr(measurements.Measurements, "_evaluate", evaluate)


def test_the_run_ends_when_the_held_out_metric_has_not_improved(policy, tmp_path, monkeypatch, capsys):
    scripted(monkeypatch, [0.1, 0.3, 0.2, 0.3, 0.9])
    config = configure(policy, tmp_path / "run", eval_every=1, eval_patience=2, num_updates=9, **{"checkpoint.keep": 1})
    result = run_ppo(config, prompts=PROMPTS, eval_prompts=HELD_OUT, reward=vowels)
    assert [row["update"] for row in result.metrics] == [1, 2, 3]
    finished = json.loads((tmp_path / "run/finished.json").read_text())
    assert finished["updates"] == 3
    assert finished["best"]["update"] == 1
    assert finished["ended"] == (
        "eval/score has not improved in 2 evaluations (ppo.eval_patience); its best value is 0.3, after update 1"
    )
    assert "The run ends after update 3: eval/score has not improved" in capsys.readouterr().err
    assert kept_checkpoints(tmp_path / "run") == [1, 3]
    assert (result.model / "config.json").is_file()


def test_the_run_ends_when_the_kl_passes_its_bound(policy, tmp_path):
    config = configure(policy, tmp_path / "run", max_kl=1e-4, learning_rate=1e-2, num_updates=9)
    result = run_ppo(config, prompts=PROMPTS, reward=vowels)
    assert [row["update"] for row in result.metrics] == [1, 2]  # the first update's responses are the start's
    assert "above ppo.max_kl=0.0001" in json.loads((tmp_path / "run/finished.json").read_text())["ended"]


def evaluated(run: Path) -> list[int]:
    return [row["update"] for row in read_json_lines(run / EVALUATIONS_FILE)]


def test_patience_begins_when_the_critics_warm_up_has_ended(policy, tmp_path):
    """Until then every evaluation is the start's."""
    settings = {"eval_every": 1, "eval_patience": 2, "num_updates": 5, "value_warmup_updates": 3}
    run_ppo(configure(policy, tmp_path / "run", **settings), prompts=PROMPTS, eval_prompts=HELD_OUT, reward=vowels)
    assert len(evaluated(tmp_path / "run")) > 5


def test_a_run_that_ends_early_is_measured_at_its_end(policy, tmp_path):
    settings = {"max_kl": 1e-4, "learning_rate": 1e-2, "num_updates": 9, "eval_every": 5, "num_fixed_prompts": 1}
    settings |= {"critic_check": 2, "ppo.critic_check.size": [32, 2, 2]}
    out = tmp_path / "run"
    run_ppo(configure(policy, out, **settings), prompts=PROMPTS, eval_prompts=HELD_OUT, reward=vowels)
    end = json.loads((out / "finished.json").read_text())["updates"]
    assert end == 2
    assert evaluated(out) == [0, end]
    assert [row["update"] for row in read_json_lines(out / "critic_checks.jsonl")] == [0, 2]
    fixed = [row["update"] for row in read_json_lines(out / "samples.jsonl") if row.get("fixed") is not None]
    assert fixed == [0, end]


def test_the_best_at_an_early_end_is_kept_when_the_run_goes_on(policy, tmp_path, monkeypatch):
    scripted(monkeypatch, [0.1, 0.9, 0.2, 0.3])  # at the start, the early end, and two updates later
    settings = {"eval_every": 4, "num_updates": 4, "learning_rate": 1e-2, "checkpoint.keep": 1}
    run_ppo(
        configure(policy, tmp_path / "run", max_kl=1e-4, **settings),
        prompts=PROMPTS, eval_prompts=HELD_OUT, reward=vowels,
    )  # fmt: skip
    assert best_checkpoint(tmp_path / "run") == 2
    config = configure(policy, tmp_path / "run", max_kl=None, **settings)
    run_ppo(config, prompts=PROMPTS, eval_prompts=HELD_OUT, reward=vowels, resume=Resume(("ppo.max_kl",)))
    assert evaluated(tmp_path / "run") == [0, 2, 4]
    assert best_checkpoint(tmp_path / "run") == 2
    assert kept_checkpoints(tmp_path / "run") == [2, 4]


def test_a_last_update_that_is_dropped_is_measured(policy, tmp_path):
    calls = count()

    def broken(completions: list[str], **_: Any) -> list[float]:
        is_second_update = 2 <= next(calls) < 5  # with its retries
        return [float("nan") if is_second_update else len(text) / 10 for text in completions]

    settings = {"eval_every": 2, "num_updates": 2, "on_nonfinite": "skip", "num_epochs": 4}
    settings |= {"schedules": {"ppo.num_epochs": {1: 1}}}
    out = tmp_path / "run"
    result = run_ppo(configure(policy, out, **settings), prompts=PROMPTS, eval_prompts=HELD_OUT, reward=broken)
    assert evaluated(out) == [0, 2]
    dropped = result.metrics[-1]
    assert "reward/score_mean" not in dropped
    assert "eval/score" in dropped
    assert dropped["guard/skipped_steps"] == result.metrics[0]["policy/optimizer_steps"]


def test_prompts_are_held_out_where_there_are_none_of_their_own(policy, tmp_path):
    config = configure(policy, tmp_path / "run", eval_every={"updates": 1, "num_prompts": 2}, num_updates=1, **{
        "data.eval_fraction": 0.5, "checkpoint.keep_best": "none", "checkpoint.keep_last": False,
    })  # fmt: skip
    run_ppo(config, prompts=PROMPTS, reward=vowels)
    assert json.loads((tmp_path / "run/data.json").read_text())["prompts"]["held_out"] == 2
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("eval_prompts", [[PROMPTS[0], "A new one", PROMPTS[1]], ["A new one"]])
def test_held_out_prompts_that_are_trained_on_are_counted(policy, tmp_path, capsys, eval_prompts):
    config = configure(policy, tmp_path / "run", eval_every={"updates": 1, "num_prompts": 3}, num_updates=1)
    run_ppo(config, prompts=PROMPTS, eval_prompts=eval_prompts, reward=vowels)
    line = "2 of the 3 held-out prompts are also among those trained on"
    assert (line in "".join(capsys.readouterr())) == (len(eval_prompts) == 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpoint.keep_best": "eval/scor", "eval_every": 2}, "did you mean eval/score?"),
        ({"checkpoint.keep_best": "eval/accuracy", "eval_every": 2}, "eval/accuracy is not a metric of ppo"),
        ({"checkpoint.keep_best": "eval/score"}, "set ppo.eval_every"),
        (
            {"checkpoint.keep_best": "eval/score", "eval_every": {"updates": None, "num_prompts": 9}},
            "set ppo.eval_every",
        ),
        *(
            ({"checkpoint.keep_best": name, "eval_every": 2}, f"{name} is not a metric of ppo that tells which model")
            for name in (
                "eval/kl",
                "objective/kl",
                "eval/eos_rate",
                "response/eos_rate",
                "eval/length",
                "policy/entropy",
            )
        ),
        (
            {"checkpoint.keep_best": "eval/score/vowels", "eval_every": 2, "reward": {"judge.py:vowels": -1.0}},
            "the weight of this term is negative",
        ),
        (
            {"checkpoint.keep_best": "eval/score/cost", "eval_every": 2, "reward": {"runs/cost": -1.0, "r.py:f": 1.0}},
            "the weight of this term is negative",
        ),
        (
            {"checkpoint.keep_best": "eval/score/f-2", "eval_every": 2, "reward": {"a.py:f": 1.0, "b.py:f": -1.0}},
            "the weight of this term is negative",
        ),
        ({"checkpoint.keep_best": "eval/win_rate", "eval_every": 2}, "set evaluate.judge"),
        ({"eval_patience": 2}, "set ppo.eval_every"),
        ({"eval_every": 1, "eval_patience": 2, "checkpoint.keep_best": "reward/score_mean"}, "a held-out metric"),
        ({"eval_every": 1, "data.eval_fraction": 0.0}, "set data.eval_prompts, or data.eval_fraction > 0"),
        ({"data.eval_prompts": "x.jsonl"}, "only read with ppo.eval_every"),
    ],
)
def test_mistakes_are_one_line(policy, tmp_path, settings, said):
    with pytest.raises(ConfigError) as error:
        run_ppo(configure(policy, tmp_path / "run", **settings), prompts=PROMPTS, reward=vowels)
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_schedule_says_what_the_evaluations_cost():
    said = schedule_in_words(load_config(None, ["ppo.eval_every=30", "ppo.num_updates=100", "rollout.num_prompts=64"]))
    assert "At most 64 held-out prompts are answered before the first update, every 30 updates and at the end" in said
    assert "5 evaluations, at most 320 responses (5.0% of those trained on)" in said


def test_a_judge_that_judges_nothing_is_said(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file can have it for `kedge evaluate`."""
    config = configure(policy, tmp_path / "run", num_updates=1, **{"evaluate.judge": "judge.py:length"})
    run_ppo(config, prompts=PROMPTS, reward=vowels)
    assert "evaluate.judge=judge.py:length has no effect here without ppo.eval_every\n" in capsys.readouterr().err


def test_a_resumed_run_measures_a_start_that_no_update_has_reached_yet(policy, tmp_path):
    """The first update is dropped because of its score, so that the second one measures the untrained policy."""
    (tmp_path / "judge.py").write_text(JUDGE)
    guard = {"on_nonfinite": "skip", "reward_functions.retries": 0}
    settings = {**EVAL, **guard, "evaluate.judge": f"{tmp_path / 'judge.py'}:length"}

    def run(name: str, stop_at: int | None, resume: Resume | None = None) -> Path:
        calls = count(1 if resume is None else 2)

        def alarming(completions: list[str], **_: Any) -> list[float]:
            call = next(calls)
            if call == stop_at:
                raise KeyboardInterrupt
            return [float("nan")] * len(completions) if call == 1 else vowels(completions)

        config = configure(policy, tmp_path / name, **settings)
        run_ppo(config, prompts=PROMPTS, eval_prompts=HELD_OUT, reward=alarming, resume=resume)
        return tmp_path / name

    whole = run("whole", None)
    with pytest.raises(KeyboardInterrupt):
        run("split", 2)
    split = run("split", None, Resume())
    for log in (EVALUATIONS_FILE, CRITIC_CHECKS_FILE):
        assert [row["update"] for row in read_json_lines(whole / log)] == [0, 2, 4, 5]
        assert read_json_lines(split / log) == read_json_lines(whole / log)
    assert metrics_without_times(split) == metrics_without_times(whole)
