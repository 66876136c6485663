"""A policy's outputs in the next step of a few environments: many calls with weights that do not change.

The same as the policy's own pass, up to rounding. For a single state of small dense layers, looking the weights up in a
module, and torch's dispatch of every operation, take several times as long as the products; numpy takes half as long.
The log probabilities of the chosen actions come from a pass over the whole rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kedge.gym.networks import Activation, ControlActorCritic, DenseLayers

__all__ = ["Acting", "acting_function"]

Array = np.ndarray[Any, Any]

Acting: TypeAlias = Callable[[Array, Tensor], tuple[Array, Tensor]]
"""From an observation of every environment [n, …] and its memory [n, 2, units], the outputs [n, outputs] and the memory
after it."""

ACTIVATIONS: dict[Activation, Callable[[Array, Array], object]] = {
    "tanh": np.tanh,
    "relu": lambda numbers, out: np.maximum(numbers, 0.0, out=out),
}
"""Each writes into its second argument."""

MOST_PRODUCTS = 2**16
"""Products of a layer for all environments up to which numpy's library stays in one thread."""


def acting_function(policy: ControlActorCritic, num_envs: int) -> Acting:
    """The policy for the next steps of so many environments.

    Args:
        policy: Its weights must not change while the function is in use.
        num_envs: n.
    """
    trunk = policy.policy_trunk
    if policy.memory is not None:
        return _remembering(policy)
    if isinstance(trunk, DenseLayers) and policy.device.type == "cpu":
        layers = [*trunk.weights(), (policy.policy_output.weight, policy.policy_output.bias)]
        if num_envs * max(weight.numel() for weight, _ in layers) <= MOST_PRODUCTS:
            arrays = [(weight.detach().numpy().T, bias.detach().numpy()) for weight, bias in layers]
            return _in_numpy(arrays, ACTIVATIONS[trunk.activation], num_envs)
    return _in_torch(policy)


def _in_numpy(layers: list[tuple[Array, Array]], activation: Callable[[Array, Array], object], num_envs: int) -> Acting:
    *hidden, (last, last_bias) = layers
    inner = [(weight, bias, np.empty((num_envs, len(bias)), np.float32)) for weight, bias in hidden]

    def act(observations: Array, memory: Tensor) -> tuple[Array, Tensor]:
        numbers = observations
        for weight, bias, out in inner:
            np.dot(numbers, weight, out=out)
            out += bias
            activation(out, out)
            numbers = out
        return np.dot(numbers, last) + last_bias, memory

    return act


def _in_torch(policy: ControlActorCritic) -> Acting:
    trunk, output, device = policy.policy_trunk, policy.policy_output, policy.device

    @torch.inference_mode()
    def act(observations: Array, memory: Tensor) -> tuple[Array, Tensor]:
        return output(trunk(torch.from_numpy(observations).to(device))).cpu().numpy(), memory

    return act


def _remembering(policy: ControlActorCritic) -> Acting:
    trunk, output, lstm, device = policy.policy_trunk, policy.policy_output, policy.memory, policy.device
    assert lstm is not None

    @torch.inference_mode()
    def act(observations: Array, memory: Tensor) -> tuple[Array, Tensor]:
        state = (memory[None, :, 0].contiguous(), memory[None, :, 1].contiguous())
        seen, (hidden, cell) = lstm(trunk(torch.from_numpy(observations).to(device))[None], state)
        return output(seen[0]).cpu().numpy(), torch.stack([hidden[0], cell[0]], 1)

    return act
