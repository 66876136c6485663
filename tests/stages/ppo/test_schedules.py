"""A PPO run with scheduled fields: each update has the values of its time."""

from pathlib import Path
from typing import Any

import pytest

from kedge.config import config_from_settings
from kedge.stages.ppo import run_ppo
from kedge_base.run_folder.record_format import MEASURED, read_metrics
from tests.tiny import save_tiny_policy

PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time"]


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("models") / "policy"))


def metrics(policy: str, out: Path, num_updates: int = 2, **settings: Any) -> list[dict[str, Any]]:
    sizes = {
        "num_prompts": 4,
        "learning_rate": 1e-2,
        "num_fixed_prompts": 0,
        "report": False,
        "num_updates": num_updates,
    }
    config = config_from_settings(
        "ppo", {"model": policy, "out": str(out), "max_new_tokens": 8, "runtime.precision": "fp32", **sizes, **settings}
    )
    rows = run_ppo(config, prompts=PROMPTS, reward=vowels).metrics
    return [{name: row[name] for name in row if not name.startswith((*MEASURED, "schedule/"))} for row in rows]


def test_each_update_has_the_values_of_its_time(policy: str, tmp_path: Path) -> None:
    first = {
        "ppo.kl_coef": 0.2,
        "ppo.entropy_coef": 0.01,
        "ppo.clip_range": 0.02,
        "ppo.value_coef": 0.5,
        "ppo.gae_lambda": 0.5,
        "ppo.num_epochs": 2,
        "ppo.learning_rate": 1e-3,
        "rollout.temperature": 0.5,
    }
    constant = metrics(policy, tmp_path / "constant", num_updates=1, **first)
    points = {field: {1: value, 2: 1.0 if field == "ppo.gae_lambda" else value * 2} for field, value in first.items()}
    points |= {"rollout.max_new_tokens": {1: 8, 2: 3}}
    run = tmp_path / "scheduled"
    scheduled = metrics(policy, run, schedules=points)
    assert scheduled[0] == constant[0]
    assert [row["schedule/ppo.num_epochs"] for row in read_metrics(run)] == [2, 4]
    assert [row["policy/optimizer_steps"] for row in scheduled] == [2, 4]
    assert [row["objective/kl_coef"] for row in scheduled] == [0.2, 0.4]
    assert [row["objective/entropy_coef"] for row in scheduled] == [0.01, 0.02]
    # Twice the rate, and half of it by ppo.schedule=linear in the second of two updates.
    assert [row["policy/learning_rate"] for row in scheduled] == pytest.approx([1e-3, 1e-3])
    assert scheduled[1]["response/length"] <= 3 < scheduled[0]["response/length"]


def test_a_constant_schedule_changes_nothing(policy: str, tmp_path: Path) -> None:
    plain = metrics(policy, tmp_path / "plain")
    assert metrics(policy, tmp_path / "scheduled", schedules={"ppo.clip_range": {1: 0.2}}) == plain
