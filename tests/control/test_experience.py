"""Advantages of pieces of episodes: a hand-computed rollout, and a slow scan over many."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kedge_control.environments import Environments
from kedge_control.experience import ControlExperience, experience_of
from kedge_control.making import make_environments
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.rollout import collect_steps
from kedge_control.spaces import Array
from kedge_control.steps import Steps
from tests.control.line_world import LineWorld

GAMMA, LAMBDA = 0.5, 0.5


def value_of(observations: Array) -> Array:
    """V(episode, state) = 100·episode + 4·state."""
    return 100.0 * observations[:, 0] + 4.0 * observations[:, 1]


def a_policy(environments: Environments) -> ControlActorCritic:
    """A policy whose critic is `value_of`."""
    policy = ControlActorCritic(environments.spaces, hidden_sizes=())
    with torch.no_grad():
        policy.value_output.weight.copy_(torch.tensor([[100.0, 4.0]]))
    return policy


def experienced(environments: Environments, num_steps: int) -> tuple[Steps, ControlExperience]:
    normalization = Normalization(2, environments.num_envs, observations=False, rewards="none")
    policy, generator = a_policy(environments), torch.Generator().manual_seed(0)
    steps = collect_steps(environments, policy, normalization, num_steps=num_steps, generator=generator)
    return steps, experience_of(steps, policy, normalization, gamma=GAMMA, gae_lambda=LAMBDA)


MODES = {
    "in process": LineWorld,
    "disabled": lambda: SyncVectorEnv([LineWorld], autoreset_mode=AutoresetMode.DISABLED),
    "same step": lambda: SyncVectorEnv([LineWorld], autoreset_mode=AutoresetMode.SAME_STEP),
    "next step": lambda: SyncVectorEnv([LineWorld], autoreset_mode=AutoresetMode.NEXT_STEP),
}


@pytest.mark.parametrize("mode", MODES)
def test_five_steps_by_hand(mode: str) -> None:
    """Episode 0 is cut off in state 2, episode 1 ends in state 2, episode 2 is under way when the rollout ends.

    | episode, state | V   | reward | V behind            | δ = r + γ·V' − V         | A = δ + γλ·A'     |
    |----------------|-----|--------|---------------------|--------------------------|-------------------|
    | 0, 0           | 0   | 1      | V(0, 1) = 4         | 1 + 2 − 0 = 3            | 3 + ¼·2 = 3.5     |
    | 0, 1           | 4   | 2      | V(0, 2) = 8, cut    | 2 + 4 − 4 = 2            | 2                 |
    | 1, 0           | 100 | 11     | V(1, 1) = 104       | 11 + 52 − 100 = −37      | −37 − ¼·92 = −60  |
    | 1, 1           | 104 | 12     | 0, ended            | 12 − 104 = −92           | −92               |
    | 2, 0           | 200 | 21     | V(2, 1) = 204, next | 21 + 102 − 200 = −77     | −77               |
    """
    # Where the environment begins an episode in a step of its own, the five transitions take seven steps.
    valid = [True, True, False, True, True, False, True] if mode == "next step" else [True] * 5
    steps, experience = experienced(make_environments(MODES[mode]), len(valid))
    assert steps.valid[:, 0].tolist() == valid
    assert steps.truncated[steps.valid].tolist() == [False, True, False, False, False]
    assert steps.terminated[steps.valid].tolist() == [False, False, False, True, False]
    assert steps.final_observations.tolist() == [[0, 2]]
    assert experience.observations.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0]]
    assert experience.advantages[:, 0].tolist() == [3.5, 2.0, -60.0, -92.0, -77.0]
    assert experience.returns[:, 0].tolist() == [3.5, 6.0, 40.0, 12.0, 123.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_may_begin_at_any_step(mode: str) -> None:
    """The rollout before it ended with the episode, so that in the next-step mode this one begins with no action."""
    environments = make_environments(MODES[mode])
    before, _ = experienced(environments, 2)
    assert before.truncated[1, 0]
    steps, experience = experienced(environments, 3)
    assert steps.valid[:, 0].tolist() == [mode != "next step", True, True]
    assert experience.advantages[:2, 0].tolist() == [-60.0, -92.0]
    assert len(experience.advantages) == (2 if mode == "next step" else 3)


def test_many_pieces_equal_a_slow_scan() -> None:
    steps, experience = experienced(make_environments(lambda: gymnasium.wrappers.TimeLimit(LineWorld(), 40), 3), 9)
    values = {}
    expected: list[float] = []
    final = {tuple(key): row for key, row in zip(steps.final_steps.tolist(), steps.final_observations, strict=True)}
    for env in range(3):
        advantages: list[float] = []
        carried = 0.0
        for step in reversed(range(9)):
            behind = steps.last_observations[env] if step == 8 else steps.observations[step + 1, env]
            behind = final.get((step, env), behind)
            value_behind = 0.0 if steps.terminated[step, env] else float(value_of(behind[None])[0])
            values[step, env] = float(value_of(steps.observations[step, env][None])[0])
            if steps.terminated[step, env] or steps.truncated[step, env]:
                carried = 0.0
            carried = float(steps.rewards[step, env]) + GAMMA * value_behind - values[step, env] + 0.25 * carried
            advantages.append(carried)
        expected += advantages[::-1]
    assert experience.advantages[:, 0].tolist() == pytest.approx(expected)
    assert experience.values[:, 0].tolist() == [values[step, env] for env in range(3) for step in range(9)]
