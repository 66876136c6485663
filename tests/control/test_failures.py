"""Environments that raise errors, or give what cannot be used: one line, here and in separate processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FlattenObservation, TransformObservation

import kedge
from kedge_base.errors import ConfigError, EnvError
from kedge_control.environments import Environments, Record
from kedge_control.making import make_environments
from tests.control.line_world import LineWorld


class FallsOver(LineWorld):
    def step(self, action: Any) -> Any:
        raise ValueError("the robot\nfell over")


class SmallerObservation(LineWorld):
    def step(self, action: Any) -> Any:
        return (np.zeros(1), *super().step(action)[1:])  # numpy would repeat it


class NoReward(LineWorld):
    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, None, *others


class FromAnOlderGym(LineWorld):
    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


class BeginsNothing(LineWorld):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise RuntimeError("no simulator")


class BeginsElsewhere(LineWorld):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(5), {}


class TakesNoSeed(LineWorld):
    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.zeros(2), {}


def step_once(environments: Environments) -> None:
    try:
        environments.step(np.zeros(environments.num_envs, np.int64), 0, Record.empty(1, environments.num_envs))
    finally:
        environments.close()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (FallsOver, r"step\(\) raised ValueError: the robot fell over \(test_failures.py:\d+\)"),
        (SmallerObservation, r"step\(\) cannot be used: an observation of shape \(1,\); .* of shape \(2,\)"),
        (NoReward, r"step\(\) cannot be used: .*NoneType"),
        (FromAnOlderGym, r"step\(\) cannot be used: not enough values .*truncated"),
        (BeginsNothing, r"reset\(\) raised RuntimeError: no simulator \(test_failures.py:\d+\)"),
        (BeginsElsewhere, r"reset\(\) cannot be used: an observation of shape \(5,\)"),
        (TakesNoSeed, r"reset\(\) cannot be used: .*'seed'; expected reset\(seed=…\)"),
    ],
)
def test_one_line_says_which_call_and_why(environment: type[LineWorld], message: str) -> None:
    with pytest.raises(EnvError, match=f"environment '{environment.__name__}': {message}"):
        step_once(make_environments(environment))


@pytest.mark.filterwarnings("ignore:.*")
def test_a_worker_process_passes_its_error_on() -> None:
    with pytest.raises(EnvError, match=r"the robot fell over \(see above\)"):
        step_once(make_environments(FallsOver, 2, vectorization="async"))


def without_space() -> LineWorld:
    environment = LineWorld()
    environment.action_space = None  # pyright: ignore[reportAttributeAccessIssue]
    return environment


def without_licence() -> LineWorld:
    raise OSError("no licence")


def test_an_environment_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"control\.env is given twice"):
        kedge.control(env=LineWorld, total_steps=64, **{"control.env": "CartPole-v1"})


def test_a_function_that_returns_one_environment_again_is_refused(tmp_path: Path) -> None:
    one = TransformObservation(LineWorld(), lambda observation: observation, None)
    several = SyncVectorEnv([LineWorld, LineWorld], autoreset_mode=AutoresetMode.DISABLED)

    def same() -> gymnasium.Env[Any, Any]:
        return FlattenObservation(one)

    said = "its function returns the same one again; make a new one in it"
    with pytest.raises(ConfigError, match=f"environment 'same': {said}"):
        make_environments(same, 2)
    with pytest.raises(ConfigError, match=said):
        make_environments(lambda: several, 2, beside=make_environments(lambda: several, 2))
    small = {"num_steps": 8, "total_steps": 16, "num_minibatches": 1, "report": False}
    assert len(kedge.control(env=same, out=tmp_path / "alone", **small).metrics) == 2
    with pytest.raises(ConfigError, match=said):
        kedge.control(env=same, out=tmp_path / "evaluated", eval_every=1, **small)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_space, "'without_space' has no action_space"),
        (without_licence, r"'without_licence' cannot be made: OSError: no licence \(test_failures.py:\d+\)"),
    ],
)
def test_what_cannot_be_made_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environments(make)
