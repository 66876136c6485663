"""Environments of every kind: in separate processes, with other observations and actions, and drawn."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kedge_base.errors import ConfigError, EnvError
from kedge_control.actions import ActionHead
from kedge_control.environments import Environments
from kedge_control.experience import ControlLearner, experience_of
from kedge_control.making import EnvironmentSpec, make_environments
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.recording import record_episode
from kedge_control.rollout import collect_steps, play_episodes
from kedge_control.saving import ControlPolicy, load_control_policy, save_control_policy
from kedge_control.spaces import spaces_of
from kedge_control.steps import Steps
from tests.control.line_world import LineWorld


class Sampled(gymnasium.Env[Any, Any]):
    """Observations are drawn from their space; every action is checked; an episode has ten steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any], render_mode: str | None = None):
        self.observation_space, self.action_space, self.render_mode = observation, action, render_mode
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps == 10, {}

    def render(self) -> Any:
        return np.full((48, 64, 3), 20 * self.steps, np.uint8)


VECTOR = spaces.Box(-1, 1, (3,), np.float32)
CHOICE = spaces.Discrete(3, start=-1)
GRAY = spaces.Box(0, 255, (4, 36, 40), np.uint8)
TABLE = spaces.Dict({"position": VECTOR, "door": spaces.Discrete(4)})
CASES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], tuple[int, ...]]] = {
    "a choice from −1": (VECTOR, CHOICE, (3,)),
    "several choices": (VECTOR, spaces.MultiDiscrete([2, 3]), (3,)),
    "a table of choices": (VECTOR, spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]), (3,)),
    "switches": (VECTOR, spaces.MultiBinary(4), (3,)),
    "numbers in a table": (VECTOR, spaces.Box(-2, np.float32([[1, 2], [3, np.inf]]), dtype=np.float32), (3,)),
    "a dictionary": (TABLE, CHOICE, (7,)),
    "a table of numbers": (spaces.Box(-1, 1, (2, 3), np.float64), CHOICE, (6,)),
    "a small image": (spaces.Box(0, 255, (7, 7, 3), np.uint8), CHOICE, (147,)),
    "channels first": (GRAY, CHOICE, (4, 36, 40)),
    "channels last": (spaces.Box(0, 255, (36, 40, 3), np.uint8), CHOICE, (36, 40, 3)),
    "gray": (spaces.Box(0, 255, (40, 36), np.uint8), CHOICE, (40, 36)),
}


def rolled(environments: Environments, num_steps: int = 12, **settings: Any) -> tuple[ControlActorCritic, Steps]:
    policy = ControlActorCritic(environments.spaces, seed=1, **settings)
    normalization = Normalization(environments.spaces.observation_size, environments.num_envs)
    generator = torch.Generator().manual_seed(0)
    return policy, collect_steps(environments, policy, normalization, num_steps=num_steps, generator=generator)


@pytest.mark.parametrize("case", CASES)
def test_observations_and_actions_of_every_kind(case: str) -> None:
    observation, action, shape = CASES[case]
    environments = make_environments(lambda: Sampled(observation, action), 2)
    policy, steps = rolled(environments, share_trunk=environments.spaces.is_image)
    assert steps.observations.shape == (12, 2, *shape)
    assert steps.observations.dtype == (np.uint8 if environments.spaces.is_image else np.float32)
    normalization = Normalization(environments.spaces.observation_size, 2)
    experience = experience_of(steps, policy, normalization, gamma=0.9, gae_lambda=0.9, micro_batch=7)
    outputs = ControlLearner(policy).evaluate(experience)
    torch.testing.assert_close(outputs.logprobs, experience.old_logprobs)
    outputs.logprobs.sum().backward()
    assert all(each.grad is not None for name, each in policy.named_parameters() if not name.startswith("value_"))
    # The choices differ, and each of them is taken.
    assert len(np.unique(steps.actions.reshape(24, -1), axis=0)) > 1


def test_a_squashed_action_reaches_the_bounds_and_never_passes_them() -> None:
    bounds = spaces.Box(np.float32([-2.1, 0.3]), np.float32([0.7, 0.30001]))
    environments = make_environments(lambda: Sampled(VECTOR, bounds))
    policy, steps = rolled(environments, 200, action_bounds="squash", initial_log_std=3.0)
    executed = policy.head.executed(steps.actions[:, 0])
    assert executed.min(0).tolist() == bounds.low.tolist()
    assert executed.max(0).tolist() == bounds.high.tolist()
    unbounded = make_environments(lambda: Sampled(VECTOR, spaces.Box(-np.inf, np.inf, (1,), np.float32)))
    with pytest.raises(ConfigError, match="needs finite bounds"):
        ControlActorCritic(unbounded.spaces, action_bounds="squash")


@pytest.mark.parametrize("how", ["clip", "squash"])
def test_a_bound_that_float32_lacks_is_never_passed(how: Any) -> None:
    """0.1 is not a float32, and the nearest one is larger."""
    bounds = spaces.Box(-0.1, 0.1, (2,), np.float64)
    head = ActionHead(spaces_of(VECTOR, bounds), how)
    for far in (head.executed(np.full((1, 2), sign * 50.0, np.float32))[0] for sign in (-1, 1)):
        assert bounds.contains(far)
        assert np.abs(far) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (VECTOR, spaces.Text(3), "Text"),
        (VECTOR, spaces.Box(0, 9, (2,), np.int64), "Box of floats"),
        (spaces.Box(0, 1, (0,), np.float32), CHOICE, "expected a Box"),
    ],
)
def test_other_spaces_are_refused(observation: Any, action: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environments(lambda: Sampled(observation, action))


def test_processes_change_nothing_and_their_death_is_one_line() -> None:
    here, apart = (make_environments("Pendulum-v1", 2, seed=3, vectorization=kind) for kind in ("sync", "async"))
    (_, one), (_, other) = rolled(here, 250), rolled(apart, 250)
    for name in ("observations", "rewards", "truncated", "final_observations", "final_steps", "last_observations"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    # Either kind restores the state of the other.
    again = make_environments("Pendulum-v1", 2, seed=3, vectorization="async")
    again.load_state_dict(here.state_dict())
    assert again.lost == []
    assert np.array_equal(again.observations, apart.observations)
    here.load_state_dict(again.state_dict())
    assert here.lost == []
    [worker, _] = again._vector.processes  # pyright: ignore
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EnvError, match="one of its processes ended"):
        rolled(again)
    apart.close()


def test_closing_after_an_interrupted_step_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = make_environments("CartPole-v1", 2, vectorization="async")
    vector = environments._vector  # pyright: ignore

    def interrupted(actions: Any) -> None:
        vector.step_async(actions)
        vector.parent_pipes[0].recv()
        raise KeyboardInterrupt

    monkeypatch.setattr(vector, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rolled(environments)
    environments.close()
    assert not any(process.is_alive() for process in vector.processes)


def test_shorter_and_longer_episodes_are_replayed_together() -> None:
    def make() -> Environments:
        return make_environments(
            lambda: SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.DISABLED), 3
        )

    one, other = make(), make()
    rolled(one, 47)
    state = one.state_dict()
    lengths = [each["shape"][0] for each in state["environments"]]
    assert len(set(lengths)) == 3
    other.load_state_dict(state)
    assert other.lost == []
    assert np.array_equal(one.observations, other.observations)


def test_an_episode_too_long_to_replay_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge_control.environments.MOST_ACTIONS", 20)
    one, other = (make_environments("Pendulum-v1") for _ in range(2))
    rolled(one, 20)
    other.load_state_dict(one.state_dict())
    assert other.lost == []
    rolled(one, 40)
    assert len(one._actions[0]) == 21
    other.load_state_dict(one.state_dict())
    assert other.lost == [0]


def test_environments_that_reset_themselves_begin_anew() -> None:
    def make() -> Environments:
        return make_environments(lambda num_envs: SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs), 2)

    one, other = make(), make()
    before = one.observations.copy()
    rolled(one)
    other.load_state_dict(one.state_dict())
    assert other.lost == [0, 1]
    assert not np.array_equal(other.observations, before)  # not the episodes that the run began with
    with pytest.raises(ConfigError, match="makes 1 environments; expected 3"):
        make_environments(lambda: SyncVectorEnv([LineWorld]), 3)


def test_a_function_in_a_file_makes_environments(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text("import gymnasium\ndef make(**kw): return gymnasium.make('CartPole-v1', **kw)\n")
    environments = make_environments(EnvironmentSpec(f"{tmp_path}/world.py:make", {"max_episode_steps": 4}), 2)
    _, steps = rolled(environments, 8)
    assert steps.truncated[3].all()
    with pytest.raises(ConfigError, match="has no 'Make'; did you mean 'make'"):
        make_environments(f"{tmp_path}/world.py:Make")


def test_episodes_are_played_in_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = make_environments(LineWorld, 2)
    policy = ControlActorCritic(environments.spaces)
    normalization = Normalization(2, 2, observations=False)
    played = play_episodes(environments, policy, normalization, num_episodes=5)
    # Episode e has the rewards 10·e + 1 and 10·e + 2; the first environment plays three of the five.
    assert [episode.total for episode in played] == [3, 23, 43, 3, 23]
    assert {episode.length for episode in played} == {2}
    monkeypatch.setattr("kedge_control.rollout.MOST_STEPS", 9)
    with pytest.raises(ConfigError, match="did not end within 9 steps"):
        play_episodes(make_environments("Pendulum-v1"), *acting("Pendulum-v1"), num_episodes=1)


def acting(name: str) -> tuple[ControlActorCritic, Normalization]:
    spaces_ = make_environments(name).spaces
    return ControlActorCritic(spaces_), Normalization(spaces_.observation_size)


def test_an_episode_is_recorded_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image, ImageSequence

    def make(render_mode: str | None = None) -> Sampled:
        return Sampled(GRAY, CHOICE, render_mode)

    spec = EnvironmentSpec(make)
    environments = make_environments(spec)
    policy, _ = rolled(environments)
    save_control_policy(tmp_path / "p", policy, Normalization(policy.spaces.observation_size), environment={}, card="#")
    loaded = load_control_policy(tmp_path / "p")
    path = tmp_path / "episode.webp"
    monkeypatch.setattr("kedge_control.recording.WIDTH", 32)
    assert record_episode(spec, loaded, path) == (10.0, 10)
    with Image.open(path) as saved:
        saved.load()
        assert (saved.size, saved.n_frames, saved.info["duration"]) == ((32, 24), 5, 100)  # pyright: ignore
        shades = [int(np.asarray(frame)[0, 0, 0]) for frame in ImageSequence.Iterator(saved)]
        assert shades == pytest.approx([0, 40, 80, 120, 160], abs=8)  # lossy
    blind = EnvironmentSpec(lambda render_mode=None: LineWorld())
    line = make_environments(blind)
    with pytest.raises(EnvError, match="cannot be drawn"):
        record_episode(blind, ControlPolicy(ControlActorCritic(line.spaces), Normalization(2)), None)


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_error_while_an_episode_is_recorded_names_the_environment(call: str) -> None:
    class Failing(Sampled):
        def __init__(self, render_mode: str | None = None) -> None:
            super().__init__(GRAY, CHOICE, render_mode)
            setattr(self, call, self.fail)

        def fail(self, *_: object, **__: object) -> None:
            raise OSError("no licence")

    environments = make_environments(EnvironmentSpec(lambda render_mode=None: Sampled(GRAY, CHOICE, render_mode)))
    policy, _ = rolled(environments)
    with pytest.raises(EnvError, match=r"recorded: OSError: no licence \(test_environments.py:\d+\)"):
        record_episode(
            EnvironmentSpec(Failing), ControlPolicy(policy, Normalization(policy.spaces.observation_size)), None
        )
