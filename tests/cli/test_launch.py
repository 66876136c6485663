"""`kedge launch`: torchrun's lines, and what it refuses."""

from __future__ import annotations

import sys

import pytest

from kedge.cli import main

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


@pytest.mark.parametrize(
    ("options", "stage", "shown"),
    [
        ([], ["sft", "--model", "m"], "torchrun --standalone --nproc-per-node 2 -m kedge sft --model m"),
        (
            ["--max-restarts", "3"],
            ["ppo", "--out", "run"],
            "torchrun --standalone --max-restarts 3 --nproc-per-node 2 -m kedge ppo --out run --resume auto",
        ),
        (
            ["--max-restarts", "3"],
            ["ppo", "--resume=run"],
            "torchrun --standalone --max-restarts 3 --nproc-per-node 2 -m kedge ppo --resume=run",
        ),
    ],
)
def test_the_line_for_one_machine(
    options: list[str],
    stage: list[str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch(monkeypatch, "--devices", "2", *options, "--", *stage) == 0
    assert capsys.readouterr().out == f"{shown}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "2", "ppo", "--out", "runs/ppo"], "write the command after --"),
        (["--devices", "2", "--max-restarts", "2", "--", "ppo", "--model", "m"], "the command needs --out DIR"),
        (["--devices", "2", "--head", "first", *PPO], "several machines meet: add --nodes N, or leave them out"),
        (["--devices", "2", "--port", "29400", *PPO], "several machines meet: add --nodes N, or leave them out"),
        (["--devices", "2", "--", "demo"], "kedge demo runs as a single process; kedge launch starts one"),
        (["--devices", "2", "--max-restarts", "2", "--", "evaluate", "--model", "m"], "evaluate cannot be resumed"),
    ],
)
def test_a_wrong_launch_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(monkeypatch, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
