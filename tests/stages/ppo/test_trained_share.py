"""Runs that train on a share of their responses (`ppo.num_epochs` below 1), with real stages on tiny models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kedge.config import config_from_settings
from kedge.config.explain.schedule import schedule_in_words
from kedge.rollout import experience as rollout_experience
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.trainer import Trainer
from kedge_base.errors import ConfigError
from kedge_base.run_folder.record_format import MEASURED, read_metrics
from tests.tiny import save_tiny_policy

PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time"]
GRPO = {"preset": "grpo", "num_responses": 4, "ppo.kl_coef": 0.1}


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("models") / "policy"))


def settings_of(policy: str, out: Path, **settings: Any) -> Any:
    sizes = {"num_prompts": 4, "learning_rate": 1e-2, "num_fixed_prompts": 0, "report": False, "num_updates": 3}
    return config_from_settings("ppo", {"model": policy, "out": str(out), "max_new_tokens": 6, **sizes, **settings})


def run(policy: str, out: Path, *, resume: Resume | None = None, **settings: Any) -> list[dict[str, Any]]:
    config = settings_of(policy, out, **settings)
    run_ppo(config, prompts=PROMPTS, reward=vowels, resume=resume)
    rows = read_metrics(out)
    return [{name: row[name] for name in row if not name.startswith(MEASURED)} for row in rows]


@pytest.mark.parametrize(
    ("settings", "reads_all", "num_minibatches", "precision"),
    [
        (GRPO, False, 1, "fp32"),
        (GRPO, False, 2, "bf16"),
        ({**GRPO, "rollout.missing_eos_score": "mask"}, True, 1, "bf16"),
        ({"num_responses": 4}, True, 2, "fp32"),
    ],
    ids=["KL in the loss", "KL in the loss, bf16", "masked", "critic, KL in the reward"],
)
def test_what_no_step_needs_is_not_computed(
    settings: dict[str, Any], reads_all: bool, num_minibatches: int, precision: str, policy: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    read: list[int] = []
    found: list[tuple[Any, Any]] = []
    reference_logprobs, improve = rollout_experience.reference_logprobs, Trainer.improve

    def reading(rollout: Any, models: Any) -> Any:
        read.append(rollout.num_responses)
        return reference_logprobs(rollout, models)

    def improving(self: Trainer, experience: Any, **options: Any) -> Any:
        result = improve(self, experience, **options)
        found.append((experience, result))
        return result

    monkeypatch.setattr(rollout_experience, "reference_logprobs", reading)
    monkeypatch.setattr(Trainer, "improve", improving)
    given = {"num_epochs": 0.25, "num_minibatches": num_minibatches, "runtime.precision": precision, **settings}
    rows = run(policy, tmp_path / "run", **given)
    assert read == [16 if reads_all else 4] * 3
    for row, (experience, result) in zip(rows, found, strict=True):
        if "rollout.missing_eos_score" not in settings:  # some updates of which have no response to train on
            assert row["policy/optimizer_steps"] == num_minibatches
        assert (experience.evaluated is None) == reads_all
        if experience.evaluated is None:
            continue
        assert torch.equal(experience.evaluated, result.passes[0].visited)
        assert row["policy/trained_share"] == 0.25
        assert row["objective/kl"] == pytest.approx(float(experience.kl.sum(-1)[experience.evaluated].mean()))
        assert torch.equal(experience.kl[~experience.evaluated], torch.zeros_like(experience.kl[~experience.evaluated]))
        assert row["policy/first_ratio_max"] == pytest.approx(1.0, abs=2e-2)


def test_a_resumed_run_chooses_the_same_rows(policy: str, tmp_path: Path) -> None:
    given = {**GRPO, "num_epochs": 0.5, "checkpoint.every": 1, "checkpoint.keep": 3}
    whole = run(policy, tmp_path / "whole", **given)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    (tmp_path / "again" / "finished.json").unlink()
    for folder in (tmp_path / "again" / "checkpoints").glob("update-*"):
        if folder.name > "update-000001":
            shutil.rmtree(folder)
    weights = load_file(tmp_path / "again" / "model" / "model.safetensors")
    shutil.rmtree(tmp_path / "again" / "model")
    assert run(policy, tmp_path / "again", resume=Resume(), **given) == whole
    resumed = load_file(tmp_path / "again" / "model" / "model.safetensors")
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())


def test_whole_epochs_are_unchanged_and_shares_can_be_scheduled(policy: str, tmp_path: Path) -> None:
    rows = run(policy, tmp_path / "run", **GRPO, schedules={"ppo.num_epochs": {1: 0.5, 3: 2}})
    assert [row["policy/optimizer_steps"] for row in rows] == [1, 1, 2]
    assert [row.get("policy/trained_share") for row in rows] == [0.5, None, None]


def test_the_plan_in_words_says_how_many(policy: str, tmp_path: Path) -> None:
    words = schedule_in_words(settings_of(policy, tmp_path, **GRPO, num_epochs=0.25, num_minibatches=2))
    assert "makes a pass over 4 of them, chosen at random, each in 2 minibatches of 2 responses," in words
    assert "2 optimizer steps per update" in words


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_only_whole_epochs_or_a_share_of_one(value: float, policy: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ppo\.num_epochs must be"):
        settings_of(policy, tmp_path, num_epochs=value)


def test_samples_show_no_reference_that_was_not_computed(policy: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {**GRPO, "num_epochs": 0.25, "runtime.num_samples": 16}
    run(policy, tmp_path / "run", **given)
    lines = (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    known = [json.loads(line).get("ref_logprobs") is not None for line in lines]
    assert len(known) == 48
    assert sum(known) == 12
