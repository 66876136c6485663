"""What moves no weight is named in the first update: groups of one, and rewards that are always the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge_base.errors import ConfigError
from kedge_base.estimators import ESTIMATORS
from kedge_base.run_folder.record_format import read_metrics
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(
        tmp_path_factory.mktemp("models") / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    )


def one_each(policy: Path, out: Path, groups: list[int] | None = None, **settings: Any) -> dict[str, float]:
    """An update on a response to each prompt, from elsewhere."""
    with kedge.PpoTrainer(
        model=policy, out=out, num_updates=1, num_responses=2, max_new_tokens=8, report=False, **settings
    ) as trainer:
        prompts = [PROMPTS[group] for group in groups or range(4)]
        batch = trainer.batch(prompts, [" one", " two", " three", " four"], groups=groups)
        return dict(trainer.update(batch, [1.0, 2.0, 3.0, 4.0]))


@pytest.mark.parametrize("advantage", [name for name, facts in ESTIMATORS.items() if facts.baseline == "group"])
def test_groups_of_one_are_named_in_the_first_update(policy, tmp_path, capsys, advantage):
    metrics = one_each(policy, tmp_path / "run", **{"ppo.advantage": advantage, "ppo.kl_coef": 0.0})
    assert metrics["group/single"] == 1.0
    assert metrics["policy/loss"] == 0.0
    assert metrics["policy/grad_norm"] == 0.0 or ESTIMATORS[advantage].critic == "needed"  # whose critic learns
    said = capsys.readouterr().err
    assert "groups_of_one: 100% of the prompts have a single response with a score (update 1), and ppo.adv" in said
    assert f"ppo.advantage={advantage} compares the responses to a prompt" in said
    assert "raise ppo.learning_rate" not in said
    [finding] = [each for each in kedge.doctor(tmp_path / "run") if each.severity == "serious"]
    assert finding.rule == "groups_of_one"
    assert "groups= in batch" in finding.try_


@pytest.mark.parametrize("preset", ["grpo", "rloo", "dr-grpo", "dapo", "gspo"])
def test_presets_of_groups_say_it_too(policy, tmp_path, capsys, preset):
    one_each(policy, tmp_path / "run", preset=preset, constant_groups="keep")
    assert "serious: groups_of_one" in capsys.readouterr().err


def test_two_in_a_group_are_none_and_other_advantages_need_none(policy, tmp_path, capsys):
    assert one_each(policy, tmp_path / "two", [0, 0, 1, 1], preset="grpo")["group/single"] == 0.0
    assert one_each(policy, tmp_path / "some", [0, 0, 1, 2], preset="grpo")["group/single"] == pytest.approx(2 / 3)
    assert "group/single" not in one_each(policy, tmp_path / "ppo")
    assert "serious: groups_of_one" not in capsys.readouterr().err


def test_groups_that_lose_their_responses_are_named(policy, tmp_path, capsys):
    def first_alone(completions):
        return [float(len(each)) if row % 2 == 0 else None for row, each in enumerate(completions)]

    kedge.ppo(model=policy, prompts=PROMPTS, reward=first_alone, out=tmp_path / "run", preset="grpo",
              num_prompts=4, num_responses=2, num_updates=1, max_new_tokens=4, report=False)  # fmt: skip
    assert "serious: groups_of_one: 100% of the prompts have a single response with a score" in capsys.readouterr().err


def test_groups_of_one_are_refused_where_the_settings_make_them(policy, tmp_path):
    with pytest.raises(ConfigError, match=r"needs rollout\.num_responses of at least 2; it is 1"):
        kedge.ppo(model=policy, prompts=PROMPTS, reward=len, out=tmp_path / "run", preset="grpo", num_responses=1)


def of_messages(completions, **_):
    """Written for lists of messages."""
    scores = []
    for completion in completions:
        try:
            scores.append(float(len(completion[0]["content"])))
        except Exception:
            scores.append(0.0)
    return scores


def test_a_reward_for_messages_is_named_in_the_first_update(policy, tmp_path, capsys):
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    kedge.ppo(model=policy, prompts=prompts, reward=of_messages, out=tmp_path / "run",
              num_prompts=8, num_updates=1, max_new_tokens=4, report=False)  # fmt: skip
    said = capsys.readouterr().err
    assert (
        "warning: reward_flat: all scores are 0: their standard deviation is 0 (update 1). Try: check the reward"
        in said
    )
    assert "completions are texts, also those of conversations" in said
    [row] = read_metrics(tmp_path / "run")
    assert (row["reward/score_mean"], row["reward/score_std"]) == (0.0, 0.0)


def test_a_verifier_says_its_verdicts_in_the_first_update(policy, tmp_path, capsys):
    rows = [{"prompt": text, "answer": "#### 5"} for text in PROMPTS]
    kedge.ppo(model=policy, prompts=rows, reward="kedge_tasks.verify:gsm8k", out=tmp_path / "run",
              num_prompts=8, num_updates=1, max_new_tokens=4, report=False)  # fmt: skip
    said = capsys.readouterr().err
    assert "reward_flat: all scores are 0: 100% " in said
    assert "completions are texts" not in said
