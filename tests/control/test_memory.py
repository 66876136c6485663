"""Policies with a memory: sequences never cross an episode's beginning, and equal one step at a time."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kedge.algorithm.policy_losses import clipped_policy_loss
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer
from kedge.training.update import PpoUpdate
from kedge_base.errors import ConfigError
from kedge_control.experience import ControlLearner, experience_of
from kedge_control.making import make_environments
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.rollout import Memory, collect_steps, play_episodes
from kedge_control.steps import Steps
from tests.control.line_world import LineWorld


class Recall(gymnasium.Env[Any, Any]):
    """A sign is shown in the first of four steps; the last action has to repeat it. Without a memory: ½."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.sign = 0, int(self.np_random.integers(2))
        return np.float32([2 * self.sign - 1]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        ends = self.steps == 4
        return np.zeros(1, np.float32), float(ends and action == self.sign), ends, False, {}


def recurrent(environments: Any, **settings: Any) -> ControlActorCritic:
    return ControlActorCritic(environments.spaces, share_trunk=True, memory_size=8, seed=2, **settings)


def one_at_a_time(steps: Steps, policy: ControlActorCritic, env: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Log probability and value of each valid step of one environment, by an LSTM cell with explicit resets."""
    assert policy.memory is not None
    cell = torch.nn.LSTMCell(policy.memory.input_size, 8)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).data.copy_(getattr(policy.memory, f"{name}_l0"))
    found = {}
    state = (torch.zeros(1, 8), torch.zeros(1, 8))
    begins = True
    for step in range(len(steps.rewards)):
        if not steps.valid[step, env]:
            begins = True
            continue
        if begins:
            state = (torch.zeros(1, 8), torch.zeros(1, 8))
        state = cell(policy.policy_trunk(torch.from_numpy(steps.observations[step, env][None])), state)
        log_probs = torch.log_softmax(policy.policy_output(state[0]), -1)
        found[step] = log_probs[0, steps.actions[step, env, 0]], policy.value_output(state[0])[0, 0]
        begins = bool(steps.terminated[step, env] or steps.truncated[step, env])
    return found


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_sequences_equal_one_step_at_a_time(mode: AutoresetMode | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge_control.experience.SEQUENCE_LENGTH", 2)
    make = LineWorld if mode is None else lambda: SyncVectorEnv([LineWorld] * 2, autoreset_mode=mode)
    environments = make_environments(make, 2)
    policy, normalization = recurrent(environments), Normalization(2, 2, observations=False, rewards="none")
    generator = torch.Generator().manual_seed(0)
    steps = collect_steps(environments, policy, normalization, num_steps=11, generator=generator)
    experience = experience_of(steps, policy, normalization, gamma=0.9, gae_lambda=0.8)
    with torch.no_grad():
        expected = [one_at_a_time(steps, policy, env) for env in range(2)]
    pairs = [each for found in expected for each in found.values()]
    mask = experience.action_mask
    assert int(mask.sum()) == int(steps.valid.sum()) == len(pairs)
    torch.testing.assert_close(experience.old_logprobs[mask], torch.stack([each for each, _ in pairs]))
    torch.testing.assert_close(experience.values[mask], torch.stack([each for _, each in pairs]))
    outputs = ControlLearner(policy).evaluate(experience)
    assert torch.equal(outputs.logprobs, experience.old_logprobs)
    assert (outputs.values[~mask] == 0).all()  # pyright: ignore


def test_a_memory_goes_on_in_the_next_rollout() -> None:
    environments = make_environments("Pendulum-v1", 2)
    policy, normalization = recurrent(environments), Normalization(3, 2)
    generator, memory = torch.Generator().manual_seed(0), Memory(policy, 2)
    play = partial(collect_steps, environments, policy, normalization, generator=generator, memory=memory)
    first, second = play(num_steps=5), play(num_steps=5)
    assert first.memories is not None
    assert second.memories is not None
    assert torch.equal(second.memories.before[0], first.memories.last)
    assert second.memories.before[0].abs().min() > 0
    restored = Memory(policy, 2)
    restored.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    assert torch.equal(restored.state, memory.state)


@pytest.mark.usefixtures("unchecked")
def test_a_policy_with_a_memory_recalls_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge_control.experience.SEQUENCE_LENGTH", 8)
    environments = make_environments(Recall, 16)
    policy = ControlActorCritic(environments.spaces, hidden_sizes=(16,), share_trunk=True, memory_size=16, seed=1)
    normalization = Normalization(1, 16, observations=False, rewards="none")
    optimizer = build_optimizer(policy.parameters(), learning_rate=1e-2)
    objective = Objective(surrogate=partial(clipped_policy_loss, clip_range=0.2), value_clip_range=None, value_coef=0.5)
    generator, memory = torch.Generator().manual_seed(0), Memory(policy, 16)
    for _ in range(18):
        steps = collect_steps(environments, policy, normalization, num_steps=16, generator=generator, memory=memory)
        experience = experience_of(steps, policy, normalization, gamma=1.0, gae_lambda=1.0)
        spread = experience.advantages[experience.action_mask].std()
        result = PpoUpdate(
            ControlLearner(policy),
            optimizer,
            experience.with_advantages(experience.advantages / spread),
            objective,
            num_epochs=4,
            num_minibatches=2,
            generator=generator,
            max_grad_norm=0.5,
        ).run()
        assert result.metrics()["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    played = play_episodes(make_environments(Recall, 4, seed=9), policy, normalization, num_episodes=40)
    assert np.mean([episode.total for episode in played]) > 0.9


def test_a_memory_needs_a_shared_trunk() -> None:
    with pytest.raises(ConfigError, match="a critic that shares its layers"):
        ControlActorCritic(make_environments(LineWorld).spaces, memory_size=8)
