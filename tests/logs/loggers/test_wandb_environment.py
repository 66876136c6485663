"""W&B's environment variables, as a stand-in for the package sees them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.logs.loggers import LoggedRun


def given_to_wandb(monkeypatch: pytest.MonkeyPatch, folder: Path, project: str) -> dict[str, Any]:
    given: dict[str, Any] = {}

    def init(**arguments: Any) -> Any:
        given.update(arguments)
        return SimpleNamespace(log=print, finish=print, resumed=False, starting_step=0)

    stand_in: Any = SimpleNamespace(init=init, Settings=dict, Table=list)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.delitem(sys.modules, "kedge.logs.loggers.wandb", raising=False)
    module = importlib.import_module("kedge.logs.loggers.wandb")
    monkeypatch.setattr(module, "_last_step", lambda _: None)
    module.open_log(LoggedRun(folder, "ppo", project, "01234567", {}))
    monkeypatch.delitem(sys.modules, "kedge.logs.loggers.wandb")
    return given


@pytest.mark.parametrize(
    ("variables", "project", "expected"),
    [
        ({}, "kedge", ("kedge", "run-01234567", "offline")),
        ({"WANDB_PROJECT": "sea", "WANDB_NAME": "boat"}, "kedge", ("sea", "boat", "offline")),
        ({"WANDB_PROJECT": "sea"}, "tides", ("tides", "run-01234567", "offline")),
        ({"WANDB_DISABLED": "true"}, "kedge", ("kedge", "run-01234567", "disabled")),
        ({"WANDB_DISABLED": "false"}, "kedge", ("kedge", "run-01234567", "offline")),
        ({"WANDB_DISABLED": "true", "WANDB_MODE": "online"}, "kedge", ("kedge", "run-01234567", "online")),
    ],
)
def test_the_variables_count_where_no_setting_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], project: str, expected: tuple[str, ...]
) -> None:
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DISABLED", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    given = given_to_wandb(monkeypatch, tmp_path / "run", project)
    assert (given["project"], given["name"], given["mode"]) == expected
