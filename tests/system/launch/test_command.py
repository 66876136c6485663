"""`kedge launch`: torchrun's lines, and what it refuses before anything starts."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kedge.cli import main
from kedge.errors import ConfigError
from kedge.system.launch.on_ray import _layout

PPO = ["--", "ppo", "--model", "my model", "--out", "runs/ppo", "num_updates=3"]


def launch(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kedge", "launch", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_line_for_several_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(monkeypatch, "--nodes", "2", "--devices", "8", "--head", "first", *PPO) == 0
    shown = capsys.readouterr()
    assert shown.out == (
        "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:29500 --nproc-per-node 8"
        " -m kedge ppo --model 'my model' --out runs/ppo num_updates=3\n"
    )
    assert shown.err == "on each of 2 machines:\n"


def test_the_line_for_one_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(monkeypatch, "--nodes", "1", "--devices", "2", "--", "sft", "--model", "m") == 0
    assert capsys.readouterr().out == "torchrun --standalone --nproc-per-node 2 -m kedge sft --model m\n"


def test_ray_is_given_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        "kedge.system.launch.on_ray.launch_on_ray", lambda command, **more: calls.append((command, more)) or 7
    )
    assert launch(monkeypatch, "--ray", "--actors", "2", *PPO) == 7
    assert launch(monkeypatch, "--ray", "head:6379", "--max-restarts", "0", *PPO) == 7
    assert launch(monkeypatch, "--ray", "--actors", "2", "--", "generate", "--model", "m") == 7
    assert calls == [
        (PPO[1:], {"address": None, "actors": 2, "max_restarts": 3}),
        (PPO[1:], {"address": "head:6379", "actors": None, "max_restarts": 0}),
        (["generate", "--model", "m"], {"address": None, "actors": 2, "max_restarts": 0}),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (PPO, "needs one of --nodes N and --ray"),
        (["--nodes", "2", "--ray", *PPO], "needs one of --nodes N and --ray"),
        (["--nodes", "2", *PPO], "--nodes needs --devices N"),
        (["--nodes", "2", "--devices", "2", "--actors", "2", *PPO], "--actors needs --ray"),
        (["--ray", "--head", "first", *PPO], "--head needs --nodes"),
        (["--ray", "ppo", "--out", "runs/ppo"], "write the command after --"),
        (["--ray", "--", "ppo", "--model", "m"], "with --ray the command needs --out DIR"),
        (
            ["--ray", "--", "demo"],
            "kedge demo runs as a single process; kedge launch starts one",
        ),
        (["--ray", "--max-restarts", "2", "--", "evaluate", "--model", "m"], "kedge evaluate cannot be resumed"),
        (["--ray", *PPO, "--dry-run"], "--dry-run runs as a single process"),
    ],
)
def test_a_wrong_launch_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(monkeypatch, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "unset afterwards")
    assert launch(monkeypatch, "--ray", "--actors", "2", *PPO) == 2
    assert "--ray needs Ray: pip install -e '.[ray]'" in capsys.readouterr().err


def test_ranks_get_gpus_where_there_are_any() -> None:
    assert _layout({"CPU": 64.0, "GPU": 8.0}, None) == (8, {"GPU": 1.0, "CPU": 1.0})
    assert _layout({"CPU": 4.0}, 2) == (2, {"CPU": 1.0})
    with pytest.raises(ConfigError, match="no GPUs; give the number of ranks"):
        _layout({"CPU": 4.0}, None)
    with pytest.raises(ConfigError, match="--actors 9 needs 9 GPUs; the Ray cluster has 8"):
        _layout({"CPU": 64.0, "GPU": 8.0}, 9)
