"""The quick pass of a few states: the outputs of the policy's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kedge_control import networks
from kedge_control.networks import ControlActorCritic, acting_function
from kedge_control.spaces import Spaces

SPACES = Spaces((5,), None, "discrete", (3,), (), (0,))


@pytest.mark.parametrize("num_envs", [1, 7])
@pytest.mark.parametrize("settings", [{"activation": "tanh"}, {"activation": "relu", "hidden_sizes": (9, 4)}])
def test_numpy_and_torch_give_the_policys_outputs(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], num_envs: int
) -> None:
    policy = ControlActorCritic(SPACES, seed=1, **settings)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.3)
    states = np.random.default_rng(3).normal(size=(4, num_envs, 5)).astype(np.float32)
    for most in (networks.MOST_PRODUCTS, 0):
        monkeypatch.setattr(networks, "MOST_PRODUCTS", most)
        act = acting_function(policy, num_envs)
        found = [act(state, policy.blank_memory(num_envs))[0] for state in states]
        for outputs, state in zip(found, states, strict=True):  # an earlier call's outputs are not overwritten
            distribution = policy(torch.from_numpy(state))[0]
            expected = torch.log_softmax(torch.from_numpy(outputs), -1)
            actual = torch.stack([distribution.log_prob(torch.full((num_envs, 1), each)) for each in range(3)], -1)
            torch.testing.assert_close(actual, expected)


def test_each_way_is_taken_where_it_is_meant() -> None:
    few = ControlActorCritic(SPACES)
    assert acting_function(few, 16) != few.act
    assert acting_function(few, 17) == few.act  # 64 · 64 products each
    large = ControlActorCritic(SPACES, hidden_sizes=(300, 300))
    assert acting_function(large, 1) == large.act
    remembering = ControlActorCritic(SPACES, memory_size=4, share_trunk=True)
    assert acting_function(remembering, 1) == remembering.act
