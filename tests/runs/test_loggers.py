"""Loggers of every stage receive the content of its files, and cannot stop the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kedge.cli import main
from kedge.config import Config, config_from_settings
from kedge.logs.loggers import LoggedRun, group
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.run_folder.record_format import read_metrics, read_samples
from tests.tiny import save_tiny_policy

ROWS = [{"prompt": f"Deck {number}:", "completion": " the sea", "chosen": " sea", "rejected": " rope rope"}
        for number in range(6)]  # fmt: skip


class Keeping:
    last_update = None

    def __init__(self, run: LoggedRun) -> None:
        self.run = run
        self.metrics: dict[int, Any] = {}
        self.samples: dict[int, list[str]] = {}
        self.closed = False

    def write(self, update: int, metrics: Any) -> None:
        self.metrics[update] = dict(metrics)

    def write_samples(self, update: int, samples: Any) -> None:
        self.samples.setdefault(update, []).extend(sample.response for sample in samples)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("models") / "policy"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Keeping]:
    keeping: list[Keeping] = []

    def open_logger(name: str, run: LoggedRun) -> Keeping:
        keeping.append(Keeping(run))
        return keeping[-1]

    monkeypatch.setattr(group, "open_logger", open_logger)
    return keeping


def settings(stage: str, policy: str, out: Path, **more: Any) -> Config:
    small = {
        "model": policy,
        "out": str(out),
        "runtime.report": False,
        "runtime.loggers": ["tensorboard"],
    }
    return config_from_settings(stage, {**small, **more})


def vowels(completions: list[str]) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def ppo(policy: str, out: Path, prompts: Sequence[str] = ("The boat",), **more: Any) -> None:
    small = {"num_updates": 2, "num_prompts": 4, "max_new_tokens": 4, "num_samples": 2}
    run_ppo(settings("ppo", policy, out, **small, **more), prompts=list(prompts), reward=vowels)


def test_loggers_receive_the_content_of_the_files(policy, tmp_path, opened):
    half = {"data.eval_fraction": 0.5, "batch_size": 2}
    run_sft(settings("sft", policy, tmp_path / "sft", **half), demonstrations=ROWS)
    run_reward(settings("reward", policy, tmp_path / "reward", **half), comparisons=ROWS)
    ppo(policy, tmp_path / "ppo", **{"runtime.loggers": {"tensorboard": "tides"}})
    assert [each.run.stage for each in opened] == ["sft", "reward", "ppo"]
    assert opened[-1].run.project == "tides"
    assert opened[-1].run.settings["rollout"]["num_prompts"] == 4
    for each in opened:
        rows = read_metrics(each.run.folder)
        held = {row.pop("update"): {name: value for name, value in row.items() if value is not None} for row in rows}
        assert each.metrics == held
        assert each.closed
    kept = read_samples(tmp_path / "ppo")
    told = opened[-1].samples
    assert {update: [row["response"] for row in kept if row["update"] == update] for update in told} == told
    assert {1, 2} <= told.keys()


def test_the_evaluation_before_the_first_update_is_step_0(policy, tmp_path, opened):
    ppo(policy, tmp_path / "run", eval_every=2, **{"data.eval_fraction": 0.5}, prompts=["The boat", "A sailor"])
    written = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["update"] for row in written] == [0, 2]
    [keeping] = opened
    assert list(keeping.metrics) == [0, 1, 2]
    for row in written:
        figures = {name: value for name, value in row.items() if name.startswith("eval/")}
        assert figures
        assert keeping.metrics[row["update"]].items() >= figures.items()
    assert [row["update"] for row in read_metrics(tmp_path / "run")] == [1, 2]


def test_tensorboard_shows_a_ppo_run(policy, tmp_path):
    ppo(policy, tmp_path / "run")
    log = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for row in read_metrics(tmp_path / "run"):
        for name, value in row.items():
            if name != "update" and value is not None:
                assert value == pytest.approx(log.Scalars(name)[row["update"] - 1].value, rel=1e-6)  # float32 there


def test_a_logger_that_fails_does_not_end_a_run(policy, tmp_path, monkeypatch, capsys):
    def refuse(name: str, run: LoggedRun) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(group, "open_logger", refuse)
    ppo(policy, tmp_path / "run")
    assert len(read_metrics(tmp_path / "run")) == 2
    assert capsys.readouterr().err.count("tensorboard failed and is disabled") == 1


def test_a_missing_package_is_reported_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    def refuse(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(group, "distribution", refuse)
    out = tmp_path / "run"
    command = ["kedge", "sft", "--model", str(tmp_path / "none"), "--data", "none.jsonl", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "runtime.loggers=wandb"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: runtime.loggers: wandb is not installed; pip install -e '.[wandb]'\n"
    assert not out.exists()
