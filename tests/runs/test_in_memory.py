"""In-memory rewards in a run's configuration, and resuming such a run in another process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kedge.config import config_from_settings, load_config
from kedge.rewards import RewardTerm, load_reward
from kedge.runs.fingerprint import input_hashes
from kedge.runs.run import describe_in_memory
from kedge.stages.ppo import run_ppo
from kedge_inspect.record import RunRecord, read_run
from tests.stages.ppo.test_ppo import PROMPTS, configure, vowels
from tests.tiny import save_tiny_policy


class Judge:
    def __call__(self, completions, **_):
        return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (vowels, [("python:vowels", 1.0, None)]),
        ("models/reward", [("models/reward", 1.0, None)]),
        ([Path("models/reward"), Judge()], [("models/reward", 1.0, None), ("python:Judge", 1.0, None)]),
        (RewardTerm(vowels, weight=0.5, name="v"), [("python:vowels", 0.5, "v")]),
    ],
)
def test_each_term_keeps_its_name_and_weight(reward, expected):
    words = describe_in_memory({"reward": reward, "data.prompts": ["a"]})
    assert [(term["source"], term["weight"], term["name"]) for term in words["reward"]] == expected
    assert words["data.prompts"] == "python:in_memory"
    assert load_config(None, [], words).reward[0].source == expected[0][0]


def test_a_judge_is_logged_without_effect_on_training(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy")
    judged = [RewardTerm(vowels), RewardTerm(Judge(), weight=0.0, name="judge")]
    with_judge = run_ppo(configure(policy, tmp_path / "with"), prompts=PROMPTS, reward=judged).metrics
    without = run_ppo(configure(policy, tmp_path / "without"), prompts=PROMPTS, reward=vowels).metrics
    assert [row["policy/loss"] for row in with_judge] == [row["policy/loss"] for row in without]
    assert all(row["score/judge"] > 0 for row in with_judge)
    record = read_run(tmp_path / "with")
    assert [(term["name"], term["weight"]) for term in record.config["reward"]] == [(None, 1.0), ("judge", 0.0)]


def test_judges_are_known_by_the_names_that_their_scores_have(tmp_path):
    """Also where the reward that is trained on has the same name, and where a function has none of its own."""
    files = [tmp_path / name for name in ("reward.py", "judge.py")]
    for file in files:
        file.write_text("def score(completions, **_):\n    return [1.0] * len(completions)\n")
    rewards = [f"{file}:score" for file in files] + [lambda completions, **_: [2.0] * len(completions), partial(vowels)]
    terms = [RewardTerm(reward, weight=float(place == 0)) for place, reward in enumerate(rewards)]
    names = load_reward(terms).names
    assert names == ["score", "score-2", "lambda", "vowels"]
    row = {"update": 1, **{f"score/{name}": 1.0 for name in names}}
    record = RunRecord(tmp_path, config=describe_in_memory({"reward": terms}), metrics=[row])
    assert record.judges == ["score/lambda", "score/score-2", "score/vowels"]


def test_the_fingerprint_does_not_depend_on_a_functions_address():
    first, second = (
        input_hashes(load_config(), {"reward": [RewardTerm(Judge())], "data.prompts": ["a"]}) for _ in "ab"
    )
    assert first == second
    assert list(first) == ["data.prompts"]


@pytest.mark.parametrize(
    ("file", "source"), [("train.ndjson", ""), ("train.jsonl", ":train"), ("deep/test.parquet", ":test")]
)
def test_a_changed_file_in_a_folder_of_data_is_noticed(tmp_path, file, source):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    config = config_from_settings("sft", {"data.demonstrations": [f"{tmp_path}{source}"]})
    hashes: list[str] = []
    for text in ("one", "two", "two"):
        path.write_text(text)
        hashes.append(input_hashes(config)["data.demonstrations"])
    assert hashes[0] != hashes[1] == hashes[2]
