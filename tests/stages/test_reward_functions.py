"""Reward functions that fail during PPO: the run continues without the failing responses, or ends in time."""

from __future__ import annotations

import pytest

from kedge.config import config_from_settings
from kedge.stages.critic import run_critic
from kedge.stages.ppo import run_ppo
from kedge_base.errors import RewardError, UnscoredError
from kedge_base.run_folder.record_format import read_metrics
from kedge_lab.generate import run_generate
from tests.processes import children_with_a_group
from tests.tiny import save_tiny_policy

FUNCTIONS = """
import os, random, time

def picky(prompts, completions):
    if "bad" in prompts:
        raise ValueError("not that one")
    return [5.0] * len(prompts)

def constant(completions):
    return [1.0] * len(completions)

def hangs(completions):
    print("before the hang")
    time.sleep(1000)

def dies(completions):
    os._exit(1)

def draws(completions):
    return [random.random() for _ in completions]
"""
PROMPTS = ["one", "bad", "two", "three"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture
def configure(policy, tmp_path):
    (tmp_path / "misbehaving.py").write_text(FUNCTIONS)

    def configured(stage, *functions, **settings):
        shared = {"model": str(policy), "out": str(tmp_path / "run"), "reward_functions.retries": 0}
        if stage == "ppo":
            shared |= {
                "num_prompts": 4,
                "num_updates": 1,
                "max_new_tokens": 4,
                "report": False,
                "num_minibatches": 1,
            }
        sources = [f"{tmp_path}/misbehaving.py:{function}" for function in functions]
        return config_from_settings(stage, {**shared, "reward": sources, **settings})

    return configured


def test_the_response_that_a_function_fails_on_takes_no_part(configure, tmp_path):
    run_ppo(configure("ppo", "picky", "constant", on_error="drop"), prompts=PROMPTS)
    [row] = read_metrics(tmp_path / "run")
    assert (row["reward/unscored"], row["reward/picky_given_up"], row["reward/constant_given_up"]) == (1, 1, 0)
    assert row["reward/picky_failures"] == 3
    assert (row["reward/score_mean"], row["score/picky"], row["score/constant"]) == (6.0, 5.0, 1.0)
    assert "picky: ValueError: not that one" in (tmp_path / "run" / "reward.log").read_text()


def test_it_is_given_the_value_where_that_is_wanted(configure, tmp_path):
    run_ppo(configure("ppo", "picky", on_error=-3.0), prompts=PROMPTS)
    [row] = read_metrics(tmp_path / "run")
    assert (row["reward/unscored"], row["reward/picky_given_up"]) == (0, 1)
    assert row["reward/score_mean"] == (5.0 * 3 - 3.0) / 4


def test_a_hang_ends_the_run_in_time_and_leaves_its_log_alone(configure, tmp_path):
    config = configure("ppo", "hangs", timeout=1.0)
    with pytest.raises(RewardError, match="hangs: a call took over 1 s; it was killed"):
        run_ppo(config, prompts=PROMPTS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["reward.log"]
    assert (tmp_path / "run" / "reward.log").read_text().startswith("hangs: before the hang\n")
    run_ppo(configure("ppo", "constant"), prompts=PROMPTS)
    assert "hang" not in "".join(path.read_text() for path in (tmp_path / "run").glob("reward.log"))


def test_a_hang_ends_the_sampling_for_a_critic_as_well(configure, tmp_path):
    config = configure("critic", "hangs", **{"timeout": 0.5, "rollout.max_new_tokens": 4, "data.eval_fraction": 0})
    with pytest.raises(RewardError, match=r"hangs: a call took over 0.5 s; it was killed"):
        run_critic(config, prompts=PROMPTS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["reward.log"]


def test_where_nothing_has_a_score_the_run_says_so(configure):
    with pytest.raises(UnscoredError, match="reward 'dies' scored none of 4 responses"):
        run_ppo(configure("ppo", "dies", on_error="drop"), prompts=PROMPTS)


def test_a_run_leaves_no_process(configure):
    # Another test's error may still hold a worker until it is garbage-collected.
    before = children_with_a_group()
    run_ppo(configure("ppo", "constant"), prompts=PROMPTS)
    assert children_with_a_group() <= before


def test_a_function_draws_the_same_numbers_in_every_run_of_a_seed(configure, tmp_path):
    first, again, other = (
        run_generate(configure("generate", "draws", out=str(tmp_path / name), seed=seed), prompts=PROMPTS)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    scores = [[row["score"] for row in result.responses] for result in (first, again, other)]
    assert scores[0] == scores[1] != scores[2]
