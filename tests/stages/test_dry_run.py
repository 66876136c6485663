"""A dry run loads and times, estimates by proportion, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kedge
from kedge.cli.stages import time_dry_run
from kedge.config import Config, config_from_settings
from kedge.errors import ConfigError, RewardError
from kedge.stages.dry_run import TimedPhase, dry_run
from kedge.stages.planning.plan import count_stage
from kedge.stages.ppo.trainer import Trainer
from kedge.training.update import UpdateResult
from tests.tiny import save_tiny_policy

ROW = '{"prompt": "Deck %s:", "completion": " sea", "chosen": " sea", "rejected": " rope"}\n'
SMALL: dict[str, Any] = {
    "rollout.num_prompts": 4,
    "rollout.max_new_tokens": 4,
    "ppo.num_updates": 3,
    "ppo.num_epochs": 2,
    "runtime.precision": "fp32",
    "data.eval_fraction": 0.25,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    save_tiny_policy(folder / "policy")
    (folder / "rows.jsonl").write_text("".join(ROW % number for number in range(8)))
    (folder / "f.py").write_text("def count(completions, **_):\n    return [float(len(t)) for t in completions]\n")
    return folder


def config(stage: str, place: Path, **changes: Any) -> Config:
    data = {"data.demonstrations": str(place / "rows.jsonl"), "data.comparisons": str(place / "rows.jsonl"),
            "data.prompts": str(place / "rows.jsonl")}  # fmt: skip
    return config_from_settings(stage, {"model": str(place / "policy"), **data, **SMALL, **changes})


@pytest.mark.parametrize("stage", ["ppo", "rlhf"])
def test_a_stage_is_timed_and_leaves_nothing(
    stage: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path.parent / f"{tmp_path.name}-scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    critic = {"rlhf.train_critic": True} if stage == "rlhf" else {}
    assert dry_run(config(stage, place, reward=f"{place / 'f.py'}:count", **critic), stage).seconds > 0
    shown = capsys.readouterr()
    for phase in ("ppo: rollout", "ppo: reward", "ppo: experience", "ppo: train", "nothing was written"):
        assert phase in shown.out
    assert ("sft: train" in shown.out and "reward: train" in shown.out) == (stage == "rlhf")
    assert ("critic: train" in shown.out) == (stage == "rlhf")
    assert "The run makes 3 updates" in shown.err
    assert [*tmp_path.iterdir(), *scratch.iterdir()] == []


def test_from_python_with_a_loaded_model_rows_and_a_function(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(place / "policy")
    model = kedge.LoadedModel(policy, AutoTokenizer.from_pretrained(place / "policy"))
    scored: list[int] = []
    given: dict[str, Any] = {
        "prompts": ["Deck 1:", "Deck 2:"],
        "reward": lambda completions, **_: scored.append(len(completions)) or [1.0] * len(completions),
        "advantage": "remax",  # which also samples and scores a greedy response per prompt
    }
    found = kedge.dry_run("ppo", model=model, **given, **SMALL)
    assert scored == 2 * [scored[0], scored[0]]
    assert "nothing was written" in capsys.readouterr().out
    assert repr(found).startswith("DryRun of ppo: about 0:0")
    assert 0 < found.seconds == pytest.approx(sum(phase.whole for phase in found.phases))
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(ConfigError, match="dry_run starts a new run; leave resume out"):
        kedge.dry_run("ppo", model=place / "policy", resume=True, **given)
    with pytest.raises(ConfigError, match=r"dry_run is a function: kedge.dry_run\('ppo', "):
        kedge.ppo(dry_run=True, model=place / "policy", **given)
    with pytest.raises(ConfigError, match=r"kedge\.dry_run times sft, reward, critic, ppo, rlhf, not generate"):
        kedge.dry_run("generate", model=place / "policy", **given)


def test_the_estimate_is_proportional_to_the_rows() -> None:
    assert TimedPhase("ppo: train", seconds=0.5, rows=4, total_rows=4 * 3 * 2).whole == pytest.approx(3.0)


def test_a_mistake_is_found_as_by_the_stage_itself(place: Path) -> None:
    with pytest.raises(RewardError, match="the module has no 'cuont'; did you mean 'count'"):
        dry_run(config("ppo", place, reward=f"{place / 'f.py'}:cuont"), "ppo")
    with pytest.raises(ConfigError, match="--dry-run starts a new run"):
        time_dry_run(Config(), "ppo", "auto")


def test_a_run_without_updates_is_timed_and_planned(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    empty = config("ppo", place, reward=f"{place / 'f.py'}:count", num_updates=0)
    assert dry_run(empty, "ppo").seconds == 0
    assert count_stage(empty, "ppo").plan().peak.bytes > 0


def test_a_schedule_of_the_epochs_is_timed_in_one_and_counted_in_all(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4, 3 and 2 epochs in three updates of 4 responses read 36 rows; a trial makes one step."""
    monkeypatch.chdir(tmp_path)
    steps = list[int]()
    improve = Trainer.improve

    def noting(trainer: Trainer, *arguments: Any, **options: Any) -> UpdateResult:
        result = improve(trainer, *arguments, **options)
        steps.append(result.num_steps)
        return result

    monkeypatch.setattr(Trainer, "improve", noting)
    schedules = {"ppo.num_epochs": {1: 4, 3: 2}}
    found = dry_run(config("ppo", place, reward=f"{place / 'f.py'}:count", schedules=schedules), "ppo")
    assert steps == [1, 1]
    assert {phase.name: phase.total_rows for phase in found.phases}["ppo: train"] == 36
