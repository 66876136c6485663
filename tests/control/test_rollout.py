"""Rollouts: repeatable, restored exactly, and with the first ratio exactly 1 in the update."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch

from kedge.algorithm.policy_losses import clipped_policy_loss
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer
from kedge.training.update import PpoUpdate
from kedge_base.errors import ConfigError, NumericsError
from kedge_control import environments as environments_module
from kedge_control.environments import Environments
from kedge_control.experience import ControlLearner, experience_of
from kedge_control.making import EnvironmentSpec, make_environments
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.rollout import collect_steps
from kedge_control.steps import Episode, Episodes, Steps
from tests.control.line_world import LineWorld, Unrepeatable


def acted(environments: Environments, num_steps: int, seed: int = 0) -> Steps:
    policy = ControlActorCritic(environments.spaces, seed=3)
    normalization = Normalization(environments.spaces.observation_size, environments.num_envs)
    generator = torch.Generator().manual_seed(seed)
    return collect_steps(environments, policy, normalization, num_steps=num_steps, generator=generator)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"])
def test_a_restored_environment_goes_on_to_the_bit(name: str) -> None:
    one = make_environments(name, 2, seed=5)
    assert not np.array_equal(*one.observations)
    acted(one, 30)
    state = json.loads(json.dumps(one.state_dict()))
    other = make_environments(name, 2, seed=5)
    other.load_state_dict(state)
    assert other.lost == []
    assert np.array_equal(one.observations, other.observations)
    first, second = acted(one, 60, seed=1), acted(other, 60, seed=1)
    assert np.array_equal(first.observations, second.observations)
    assert np.array_equal(first.rewards, second.rewards)
    assert np.array_equal(first.starts, second.starts)


def test_an_environment_that_cannot_be_repeated_begins_a_new_episode() -> None:
    one = make_environments(Unrepeatable, seed=5)
    acted(one, 3)
    state = one.state_dict()
    other = make_environments(Unrepeatable, seed=5)
    other.load_state_dict(make_environments(Unrepeatable, seed=5).state_dict())
    other.load_state_dict(state)
    assert other.lost == [0]
    assert other.starts.all()
    assert other.observations[0, 1] == 0
    episodes = Episodes(1)
    episodes.add(acted(one, 4))
    # What was left of the former episode does not count in the new one's return.
    episodes.add(acted(other, 2))
    assert episodes.state_dict()["totals"] == [2.0]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_episode_that_is_too_long_to_replay_begins_anew(
    monkeypatch: pytest.MonkeyPatch, vectorization: Literal["sync", "async"]
) -> None:
    monkeypatch.setattr(environments_module, "MOST_ACTIONS", 10)
    one, other = (make_environments("Pendulum-v1", seed=5, vectorization=vectorization) for _ in range(2))
    acted(one, 10)
    other.load_state_dict(one.state_dict())
    assert other.lost == []
    acted(one, 1)
    state = one.state_dict()
    acted(one, 5)
    assert one.state_dict()["environments"][0]["shape"] == [0]
    other.load_state_dict(state)
    assert other.lost == [0]
    assert other.starts.all()
    other.load_state_dict(other.state_dict())
    assert other.lost == []
    one.close()
    other.close()


@pytest.mark.usefixtures("unchecked")
def test_the_first_ratio_is_one_and_the_policy_learns() -> None:
    environments = make_environments("CartPole-v1", 4, seed=1)
    policy = ControlActorCritic(environments.spaces, seed=1)
    normalization, episodes = Normalization(4, 4), Episodes(4)
    optimizer = build_optimizer(policy.parameters(), learning_rate=1e-3, critic_parameters=policy.critic_parameters())
    objective = Objective(surrogate=partial(clipped_policy_loss, clip_range=0.2), value_clip_range=None, value_coef=0.5)
    generator = torch.Generator().manual_seed(0)
    returns: list[float] = []
    for _ in range(8):
        steps = collect_steps(environments, policy, normalization, num_steps=128, generator=generator)
        returns += [episode.total for episode in episodes.add(steps)]
        normalization.observe_rewards(steps)
        experience = experience_of(steps, policy, normalization, gamma=0.99, gae_lambda=0.95)
        result = PpoUpdate(
            ControlLearner(policy),
            optimizer,
            experience,
            objective,
            num_epochs=4,
            num_minibatches=8,
            generator=generator,
            max_grad_norm=0.5,
        ).run()
        assert result.metrics()["policy/first_ratio_max"] == 1.0
        normalization.observe(steps)
    assert np.mean(returns[:20]) < 40
    assert np.mean(returns[-20:]) > 2 * np.mean(returns[:20])


def test_micro_batches_add_up() -> None:
    environments = make_environments("Pendulum-v1", 2, seed=1)
    policy = ControlActorCritic(environments.spaces, seed=1, share_trunk=True, activation="relu")
    normalization = Normalization(3, 2)
    steps = acted(environments, 10)
    experience = experience_of(steps, policy, normalization, gamma=0.99, gae_lambda=0.95, micro_batch=7)
    whole = experience_of(steps, policy, normalization, gamma=0.99, gae_lambda=0.95)
    torch.testing.assert_close(experience.advantages, whole.advantages)
    learner = ControlLearner(policy, micro_batch=6)
    parts = list(learner.micro_batches(experience))
    assert [len(rows) for rows, _ in parts] == [6, 6, 6, 2]
    joined = torch.cat([learner.evaluate(part).logprobs for _, part in parts])
    torch.testing.assert_close(joined, experience.old_logprobs)
    assert sorted(torch.cat([rows for rows, _ in parts]).tolist()) == list(range(20))
    outputs = learner.evaluate(experience)
    assert outputs.kl is not None
    assert outputs.kl.abs().max() < 1e-6
    learner.evaluate_critic(experience).values.sum().backward()
    own = {id(each) for each in policy.critic_parameters()}
    assert {id(each) for each in policy.parameters() if each.grad is not None} == own


def test_episodes_are_counted_across_rollouts() -> None:
    environments, episodes = make_environments(LineWorld, 2), Episodes(2)
    # Episode e has the rewards 10·e + 1 and 10·e + 2.
    assert episodes.add(acted(environments, 3)) == [Episode(3.0, 2)] * 2
    restored = Episodes(2)
    restored.load_state_dict(json.loads(json.dumps(episodes.state_dict())))
    finished = restored.add(acted(environments, 3))
    assert finished == [Episode(23.0, 2)] * 2 + [Episode(43.0, 2)] * 2
    assert restored.metrics(finished)["episode/return_mean"] == 23.0
    assert restored.metrics(finished)["episode/count"] == 4


class Broken(LineWorld):
    def step(self, action: Any) -> Any:
        seen, _, *rest = super().step(action)
        return (seen, np.nan, *rest)


def test_a_reward_that_is_no_number_is_named() -> None:
    with pytest.raises(NumericsError, match="gave a reward that is not finite, in step 1 of"):
        acted(make_environments(Broken, 2), 4)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("CartPole-v9", {}, "CartPole"),
        ("Cartpole-v1", {}, "Did you mean: `CartPole`"),
        ("CartPole-v1", {"gravity_": 1}, "gravity_"),
        ("no_such_module:CartPole-v1", {}, "no_such_module"),
    ],
)
def test_a_wrong_name_is_one_line(name: str, options: dict, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        make_environments(EnvironmentSpec(name, options))
    assert "\n" not in str(caught.value)
