"""How a run's environments end: signals, a trainer that is killed, a `close()` that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kedge
from kedge.training import runtime
from tests.control.test_runs import Bandit, play

SLOW = """
import time
from pathlib import Path

import gymnasium
import numpy as np


class Slow(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        Path("stepped").touch()
        self.steps += 1
        time.sleep(SECONDS)
        return np.zeros(1, np.float32), 1.0, self.steps == 8, False, {}
"""


def started(folder: Path, seconds: float, *arguments: str) -> subprocess.Popen[str]:
    """A run in an environment that takes so long for a step, in its first rollout."""
    (folder / "slow.py").write_text(SLOW.replace("SECONDS", str(seconds)))
    words = ["control", "--env", "slow.py:Slow", "--out", "run", "num_steps=200", "num_minibatches=2", *arguments]
    run = subprocess.Popen(
        [sys.executable, "-m", "kedge", *words], cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (folder / "stepped").exists():
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return run


class Stopped(Bandit):
    """SIGTERM arrives in its third step, and every further step takes long."""

    played = 0

    def step(self, action: Any) -> Any:
        Stopped.played += 1
        if Stopped.played == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if Stopped.played > 3:
            time.sleep(0.2)
        return super().step(action)


def test_sigterm_in_a_slow_rollout_is_no_error_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "GRACE_SECONDS", 0.5)
    with pytest.raises(runtime.Terminated) as caught:
        play(tmp_path / "run", Stopped)
    assert caught.value.code == 128 + signal.SIGTERM
    assert kedge.load_control_policy(tmp_path / "run" / "model").act(np.zeros(2)) in (0, 1)


def test_hanging_workers_end_with_a_killed_trainer(tmp_path: Path) -> None:
    run = started(tmp_path, 600, "num_envs=2", "vectorization=async")
    run.kill()
    run.wait()
    assert run.stderr is not None
    run.stderr.close()
    deadline = time.monotonic() + 30
    while members(run.pid):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.2)


def members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


class FailsToClose(Bandit):
    def close(self) -> None:
        raise OSError("the simulator is gone")


def test_a_close_that_fails_is_one_line_and_costs_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(update: kedge.Update) -> None:
        if update.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "run", FailsToClose, updates=2, on_update=interrupt)
    result = play(tmp_path / "run", FailsToClose, updates=2, resume=True)
    assert len(result.metrics) == 2
    line = "environment 'FailsToClose': close() raised OSError: the simulator is gone (test_ends.py:"
    assert capsys.readouterr().err.count(line) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": {"hidden_sizes": [8] * 100_000}}, "network.hidden_sizes"),
        ({"network": {"hidden_sizes": [10**12]}}, r"network\.hidden_sizes\.0"),
        ({"spaces": {"action_start": ["x"]}}, r"spaces\.action_start\.0"),
        ({"spaces": {"action_start": [0, 0]}}, "contradict its shape"),
        ({"format": 1}, "has the format 1; this version of kedge reads 2"),
    ],
    ids=["layers", "units", "start", "starts", "older"],
)
def test_a_damaged_description_is_one_line_before_anything_is_made(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    result = play(tmp_path / "run", Bandit, updates=1)
    path = result.model / "control.json"
    described = json.loads(path.read_text())
    for name, value in change.items():
        described[name] = {**described[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(described))
    with pytest.raises(kedge.KedgeError, match=message) as caught:
        result.policy()
    assert "\n" not in str(caught.value)
    assert os.fspath(path) in str(caught.value)
