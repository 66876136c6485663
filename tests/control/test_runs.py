"""Control runs: what they leave, resuming to the bit, the variants, users' mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import kedge
from kedge.cli import main
from kedge_control.stage.result import ControlResult
from kedge_inspect.diagnosis import examine_run
from kedge_inspect.report import write_report

SMALL = {"num_steps": 64, "num_envs": 2, "num_minibatches": 4, "num_epochs": 2, "report": False}
UPDATE = 128
"""Steps of one update of these settings."""

TIMED = ("time/", "memory/", "tokens_per_second")


def play(out: Path, env: Any = "CartPole-v1", updates: int = 4, **changes: Any) -> ControlResult:
    return kedge.control(env=env, out=out, **{**SMALL, "total_steps": updates * UPDATE, **changes})


def untimed(result: ControlResult) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in result.metrics]


def weights_of(result: ControlResult) -> dict[str, torch.Tensor]:
    (file,) = result.model.glob("*.safetensors")
    return load_file(file)


def test_a_run_leaves_a_policy_that_acts(tmp_path: Path) -> None:
    result = play(tmp_path / "run", eval_every=2, report=True)
    best = json.loads((result.folder / "finished.json").read_text())["best"]
    assert best["metric"] == "eval/return_mean"
    assert (result.folder / "checkpoints" / f"update-{best['update']:06d}").is_dir()
    assert [row["update"] for row in result.metrics] == [1, 2, 3, 4]
    assert all(row["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-6) for row in result.metrics)
    assert [row["control/steps"] for row in result.metrics] == [128, 256, 384, 512]
    assert ["eval/return_mean" in row for row in result.metrics] == [False, True, False, True]
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=0)
    assert environment.action_space.contains(result.policy().act(observation))
    assert "CartPole-v1" in (result.model / "README.md").read_text()
    assert json.loads((result.folder / "finished.json").read_text())["stage"] == "control"
    page = write_report([result.folder], tmp_path / "page.html").read_text()
    assert "the return of an episode" in page
    examine_run(result.folder)


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"policy_loss": "kl_penalty_adaptive"}),
        ("Pendulum-v1", {"memory_size": 8, "critic": "shared"}),
    ],
)
def test_an_interrupted_run_goes_on_to_the_bit(tmp_path: Path, env: str, changes: dict[str, Any]) -> None:
    whole = play(tmp_path / "whole", env, **changes)

    def interrupt(update: kedge.Update) -> None:
        if update.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "cut", env, on_update=interrupt, **changes)
    resumed = play(tmp_path / "cut", env, resume=True, **changes)
    assert untimed(resumed) == untimed(whole)
    expected, found = weights_of(whole), weights_of(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("preset", ["trpo", "a2c", "vanilla-pg"])
def test_the_variants_take_the_steps_that_define_them(tmp_path: Path, preset: str) -> None:
    result = kedge.control(
        env="Pendulum-v1",
        out=tmp_path / "run",
        preset=preset,
        num_envs=2,
        num_steps=64,
        total_steps=2 * UPDATE,
        report=False,
        **({"num_minibatches": 4} if preset == "trpo" else {}),
    )
    steps = [row["policy/optimizer_steps"] for row in result.metrics]
    assert steps == [1, 1]
    if preset == "trpo":
        assert all(row["policy/distance_moved"] <= 0.01 for row in result.metrics)


@pytest.mark.parametrize("changes", [{}, {"memory_size": 8}])
def test_trpos_critic_does_not_move_a_policy_that_shares_its_network(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = play(tmp_path / "run", updates=2, preset="trpo", critic="shared", **changes)
    for row in result.metrics:
        assert 0.0 < row["policy/distance_moved"] <= 0.01
        assert row["policy/distance_moved"] == pytest.approx(row["policy/approx_kl"], rel=1e-4)
        assert row["value/grad_norm"] > 0.0


class Bandit(gymnasium.Env):
    """Action 1 pays, action 0 does not, whatever is seen; an episode has 8 steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.left = render_mode, 8

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 8
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.zeros(2, np.float32), float(action), self.left == 0, False, {}

    def render(self) -> Any:
        return np.full((16, 16, 3), 16 * self.left, np.uint8)


class Blind(Bandit):
    """A bandit that cannot be drawn."""

    def render(self) -> Any:
        raise RuntimeError("no renderer")


def test_a_bandit_is_learned_and_an_episode_of_it_is_in_the_report(tmp_path: Path) -> None:
    result = play(tmp_path / "run", Bandit, updates=12, learning_rate=0.01, video=True, report=True)
    assert result.metrics[0]["episode/update_return_mean"] < 5.5
    assert result.metrics[-1]["episode/update_return_mean"] > 7.5
    assert (result.folder / "episode.webp").read_bytes()[8:12] == b"WEBP"
    assert "data:image/webp;base64" in (result.folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env", "CartPol-v1"], "Did you mean: `CartPole`"),
        ([], "control.env"),
        (["--env", "CartPole-v1", "num_minibatches=7"], "does not divide"),
        (["--env", "CartPole-v1", "total_steps=10"], "less than one update"),
        (["--env", "CartPole-v1", "--preset", "trpo", "entropy_coef=0.1"], "control.entropy_coef=0.1 has no effect"),
        (["--env", "CartPole-v1", "--preset", "trpo", "early_stop_kl=0.1"], "control.early_stop_kl=0.1 has no effect"),
        (["--env", "CartPole-v1", "action_bounds=wrap"], "action_bounds"),
        (["--env", "CartPole-v1", "action_bounds=squash"], "action_bounds=squash is for numbers"),
        (["--env", "CartPole-v1", "env_options={gravity_of_mars: 3}"], "gravity_of_mars"),
        (["--env", "CartPole-v1", "memory_size=8"], "critic=shared"),
        (["--env", "nowhere.py:make"], "nowhere.py"),
        (["--env", "CartPole-v1", "adapter.kind=lora"], "language models"),
        (["--env", "CartPole-v1", "optimization.adam_eps=1e-3"], "language models"),
        (["--env", "CartPole-v1", "--preset", "small-cpu"], "those of kedge control are classic-control, atari, "),
        (["--env", "CartPole-v1", "checkpoint.keep_best=eval/return_mean"], "set control.eval_every"),
        (["--env", "CartPole-v1", "checkpoint.keep_best=eval/score"], "choose auto, none, eval/return_mean, "),
        (["--env", "CartPole-v1", "runtime.frozen_dtype=int8"], "language models"),
        (["--env", "CartPole-v1", "activation_checkpointing=true"], "language models"),
        (["--env", f"{__file__}:Blind", "video=true"], "cannot be drawn"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["kedge", "control", *arguments, "--out", str(out)])
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert not out.exists()


class BreaksLater(gymnasium.Env[Any, Any]):
    """Its step after so many raises an error."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, steps: int) -> None:
        self.left = steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ValueError("fell over")
        return np.zeros(1, np.float32), 1.0, self.left % 10 == 0, False, {}


def test_an_environment_that_breaks_leaves_what_was_learned_and_nothing_in_the_first_update(tmp_path: Path) -> None:
    with pytest.raises(kedge.KedgeError, match="fell over"):
        play(tmp_path / "first", lambda: BreaksLater(30))
    assert not (tmp_path / "first").exists()
    with pytest.raises(kedge.KedgeError, match="fell over"):
        play(tmp_path / "third", lambda: BreaksLater(150))  # of each of two environments, 64 in an update
    assert len((tmp_path / "third" / "metrics.jsonl").read_text().splitlines()) == 2
    assert kedge.load_control_policy(tmp_path / "third" / "model").act(np.zeros(1, np.float32)) in (0, 1)
