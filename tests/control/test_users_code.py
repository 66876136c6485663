"""What users' environments and networks do wrong is one line; what they may do works in every way of stepping them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from kedge_base.errors import ConfigError, EnvError, KedgeError, NumericsError
from kedge_control.making import make_environments
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.rollout import collect_steps, play_episodes
from tests.control.line_world import LineWorld

VECTOR = spaces.Box(-1, 1, (3,), np.float32)


class Given(gymnasium.Env[Any, Any]):
    """It shows what it is given, and its episodes are cut off after five steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any = VECTOR, shown: Any = None, last: Any = None) -> None:
        self.observation_space = space
        self.shown = np.zeros(space.shape, space.dtype) if shown is None else shown
        self.last = self.shown if last is None else last
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.shown, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return (self.last if self.steps == 5 else self.shown), 1.0, False, self.steps == 5, {}


def collect(source: Any, num_steps: int = 6, **options: Any) -> None:
    environments = make_environments(source, **options)
    try:
        policy = ControlActorCritic(environments.spaces)
        normalization = Normalization(environments.spaces.observation_size, environments.num_envs)
        generator = torch.Generator().manual_seed(0)
        collect_steps(environments, policy, normalization, num_steps=num_steps, generator=generator)
    finally:
        environments.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Given(shown=np.zeros(1, np.float32)), r"an observation of shape \(1,\)"),
        (
            lambda: Given(spaces.Box(0, 255, (40, 40, 3), np.uint8), shown=np.full((40, 40, 3), 0.5)),
            r"an image of float64, and its space is of bytes \(uint8\)",
        ),
    ],
    ids=["smaller", "fractions"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numpy_does_not_make_an_observation_fit(make: Any, message: str, vectorization: Any) -> None:
    with pytest.raises(EnvError, match=message):
        collect(make, vectorization=vectorization)


def test_the_last_observation_of_an_episode_must_be_finite() -> None:
    broken = np.array([0, np.nan, 0], np.float32)
    with pytest.raises(NumericsError, match=r"gave an observation that is not finite, in step 5 of the rollout"):
        collect(lambda: Given(last=broken))


class Leaves(LineWorld):
    def step(self, action: Any) -> Any:
        raise SystemExit(3)


def test_an_environment_does_not_end_the_process() -> None:
    with pytest.raises(EnvError, match=r"step\(\) raised SystemExit: 3"):
        collect(Leaves)


class Mixed(LineWorld):
    observation_space = spaces.Dict({"a": spaces.Discrete(2), "b": VECTOR})


def vector(kind: Any, mode: AutoresetMode) -> Any:
    return lambda num_envs: SyncVectorEnv([kind] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (vector(Mixed, AutoresetMode.SAME_STEP), {}, "flattens the observations of a vector environment only with"),
        ("nowhere_at_all:Foo-v0", {}, "environment 'nowhere_at_all:Foo-v0': No module named 'nowhere_at_all'"),
    ],
    ids=["same step", "module"],
)
def test_what_has_no_effect_or_cannot_be_done_is_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environments(source, 2, **options)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_rollout_that_only_begins_episodes_is_named(num_envs: int) -> None:
    class Short(LineWorld):
        def step(self, action: Any) -> Any:
            return self._seen(), 0.0, True, False, {}

    environments = make_environments(vector(Short, AutoresetMode.NEXT_STEP), num_envs)
    policy = ControlActorCritic(environments.spaces)
    once = {"num_steps": 1, "generator": torch.Generator().manual_seed(0)}
    collect_steps(environments, policy, Normalization(2, num_envs), **once)
    with pytest.raises(EnvError, match=r"only started episodes .*control.num_steps to at least 2"):
        collect_steps(environments, policy, Normalization(2, num_envs), **once)


def test_a_file_of_environments_runs_once(tmp_path: Path) -> None:
    path = tmp_path / "worlds.py"
    path.write_text(
        "from pathlib import Path\nfrom tests.control.line_world import LineWorld\n"
        f"with Path({str(tmp_path / 'runs')!r}).open('a') as file:\n    file.write('x')\n"
        "def make():\n    return LineWorld()\n"
    )
    make_environments(f"{path}:make", 4).close()
    assert (tmp_path / "runs").read_text() == "x"


def test_fewer_episodes_than_environments_are_played() -> None:
    environments = make_environments(LineWorld, 4)
    policy, normalization = ControlActorCritic(environments.spaces), Normalization(2, 4)
    assert len(play_episodes(environments, policy, normalization, num_episodes=3)) == 3


class Layers(nn.Sequential):
    """Features of three numbers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(nn.Linear(3, 8), *layers)


SHARED = Layers(nn.Tanh())


def raising(spaces: Any) -> nn.Module:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (raising, r"cannot be made from the environment's spaces: KeyError: 'oops' \(test_users_code.py:\d+\)"),
        (lambda: Layers(), r"cannot be made from the environment's spaces: TypeError"),
        (lambda spaces: nn.Linear(4, 8), "cannot read one and two observations"),
        (lambda spaces: Layers(nn.Dropout(0.5)), "other features each time"),
        (lambda spaces: Layers(nn.BatchNorm1d(8)), "cannot read one and two observations"),
        (lambda spaces: SHARED, "the same module for the policy and for the critic"),
    ],
    ids=["raises", "arguments", "size", "dropout", "batch norm", "twice"],
)
def test_a_network_that_cannot_be_used_is_named_before_it_is_trained(network: Any, message: str) -> None:
    of_three = make_environments(Given).spaces
    with pytest.raises(ConfigError, match=message):
        ControlActorCritic(of_three, network=network)
    ControlActorCritic(of_three, network=lambda spaces: Layers(nn.Tanh()))


def test_squashing_is_for_numbers() -> None:
    with pytest.raises(KedgeError, match="action_bounds=squash is for numbers; these actions are discrete"):
        ControlActorCritic(make_environments(LineWorld).spaces, action_bounds="squash")
