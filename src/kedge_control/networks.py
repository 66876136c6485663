"""Policy and critic of a control task: networks with orthogonal weights, and a σ that does not depend on the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from kedge_base.errors import ConfigError
from kedge_base.texts import typed_error_text
from kedge_control.actions import ActionBounds, ActionDistribution, ActionHead
from kedge_control.environments import reason_of
from kedge_control.spaces import Array, Spaces

Activation = Literal["tanh", "relu"]

FeatureNetwork: TypeAlias = Callable[[Spaces], nn.Module]
"""Makes a module that turns observations [n, …] into features [n, f]."""

ACTIVATIONS: dict[Activation, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}

HIDDEN_GAIN = math.sqrt(2.0)
POLICY_GAIN = 0.01
VALUE_GAIN = 1.0

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, size and stride of each, of Mnih et al. 2015."""

MOST_PRODUCTS = 2**16
"""Maximum multiplications in a layer, over all environments, for which numpy's library uses a single thread."""


class _Pixels(nn.Module):
    """Images of bytes [n, …] in the environment's layout as numbers from 0 to 1 [n, channels, height, width]."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, images: Tensor) -> Tensor:
        if self.layout == "hwc":
            images = images.permute(0, 3, 1, 2)
        elif self.layout == "hw":
            images = images.unsqueeze(1)
        # With the channels innermost, a step of the update takes a quarter less time on a CPU, and copying bytes is
        # cheap.
        return images.contiguous(memory_format=torch.channels_last).float().div_(255.0)


def _layers(spaces: Spaces, sizes: Sequence[int], activation: Activation) -> nn.Sequential:
    """Make dense layers; for images, after the convolutions of Mnih et al. 2015."""
    layers: list[nn.Module] = []
    width = spaces.observation_size
    if spaces.image_layout is not None:
        shape = spaces.observation_shape
        channels = {"chw": shape[0], "hwc": shape[-1], "hw": 1}[spaces.image_layout]
        layers.append(_Pixels(spaces.image_layout))
        for size, kernel, stride in CONVOLUTIONS:
            layers += [_orthogonal(nn.Conv2d(channels, size, kernel, stride), HIDDEN_GAIN), nn.ReLU()]
            channels = size
        layers.append(nn.Flatten())
        with torch.no_grad():
            width = nn.Sequential(*layers)(torch.zeros(1, *shape, dtype=torch.uint8)).shape[1]
    for size in sizes:
        layers += [_orthogonal(nn.Linear(width, size), HIDDEN_GAIN), ACTIVATIONS[activation]()]
        width = size
    return nn.Sequential(*layers)


Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def _orthogonal(layer: Layer, gain: float) -> Layer:
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class ControlActorCritic(nn.Module):
    """A policy and a critic.

    Every observation is a row: normalized numbers [n, d], or images of bytes [n, …].

    Args:
        spaces: Of the environment.
        hidden_sizes: Units of the layers; for images, of those after the convolutions.
        activation: Of these layers.
        share_trunk: Policy and critic share all layers except the last; otherwise each has its own.
        initial_log_std: initial log σ of every number in an action. It does not depend on the state.
        action_bounds: See `ActionHead`.
        network: Makes the layers instead of `hidden_sizes`.
        memory_size: Units of an LSTM after the layers, for tasks whose observations do not contain the whole state; the
            trunk must be shared. None for no memory.
        seed: Of the weights.

    Raises:
        ConfigError: `network` does not make a module with features [n, f], squashing needs bounds, or a memory needs a
            shared trunk.

    Source: the 37 details of Huang et al. 2022: orthogonal weights, gain √2 inside, 0.01 and 1 for the outputs.
    """

    def __init__(
        self,
        spaces: Spaces,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = "tanh",
        share_trunk: bool = False,
        initial_log_std: float = 0.0,
        action_bounds: ActionBounds = "clip",
        network: FeatureNetwork | None = None,
        memory_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if memory_size and not share_trunk:
            raise ConfigError("a policy with a memory needs a critic that shares its layers")
        self.spaces = spaces
        self.head = ActionHead(spaces, action_bounds)
        self.has_custom_network = network is not None
        self.settings: dict[str, Any] = {
            "hidden_sizes": list(hidden_sizes),
            "activation": activation,
            "share_trunk": share_trunk,
            "action_bounds": action_bounds,
            "memory_size": memory_size,
        }

        def trunk() -> nn.Module:
            return _layers(spaces, hidden_sizes, activation) if network is None else _custom(network, spaces)

        # The global generator, with which layers are initialized, is left unchanged.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy_trunk = trunk()
            self.value_trunk = None if share_trunk else trunk()
            num_features = _num_features(self.policy_trunk, spaces)
            if self.value_trunk is not None and _share_weights(self.policy_trunk, self.value_trunk):
                raise ConfigError(
                    "control.network gave the same module for the policy and for the critic; make a new one in each "
                    "call, or set control.critic=shared"
                )
            self.memory = _lstm(num_features, memory_size) if memory_size else None
            num_features = memory_size or num_features
            self.policy_output = _orthogonal(nn.Linear(num_features, spaces.num_outputs), POLICY_GAIN)
            self.value_output = _orthogonal(nn.Linear(num_features, 1), VALUE_GAIN)
        numbers = torch.full((spaces.num_outputs,), initial_log_std)
        self.log_std = nn.Parameter(numbers) if self.head.is_continuous else None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.policy_output.weight.device

    def critic_parameters(self) -> list[nn.Parameter]:
        """The parameters that the critic does not share."""
        trunk = [] if self.value_trunk is None else list(self.value_trunk.parameters())
        return [*trunk, *self.value_output.parameters()]

    def blank_memory(self, num_envs: int) -> Float[Tensor, "envs 2 units"]:
        """The memory at the start of an episode, zeros: the LSTM's output and its cell. Empty without an LSTM."""
        return torch.zeros(num_envs, 2, self.memory.hidden_size if self.memory else 0, device=self.device)

    def values(self, observations: Tensor, memory: Tensor | None = None, *, alone: bool = False) -> Tensor:
        """The critic's value of each state [n]; with `alone`, no gradient reaches a shared trunk."""
        if self.value_trunk is not None:
            return self.value_output(self.value_trunk(observations)).squeeze(-1)
        features = self._features(observations, memory)
        return self.value_output(features.detach() if alone else features).squeeze(-1)

    def forward(
        self, observations: Tensor, memory: Tensor | None = None
    ) -> tuple[ActionDistribution, Float[Tensor, " n"]]:
        """Compute distribution and values of n states; a shared trunk runs once.

        Args:
            observations: A row each. With a memory, the steps of sequences [rows, time, …], and n = rows · time.
            memory: At the start of each sequence [rows, 2, units]; None for a policy without.
        """
        features = self._features(observations, memory)
        judged = features if self.value_trunk is None else self.value_trunk(observations)
        distribution = self.head.distribution(self.policy_output(features), self.log_std)
        return distribution, self.value_output(judged).squeeze(-1)

    def _features(self, observations: Tensor, memory: Tensor | None) -> Float[Tensor, "n features"]:
        if self.memory is None:
            return self.policy_trunk(observations)
        assert memory is not None, "a policy with a memory is asked about sequences"
        seen = self.policy_trunk(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
        return self.memory(seen.transpose(0, 1), _lstm_state(memory))[0].transpose(0, 1).flatten(0, 1)

    @torch.inference_mode()
    def act(self, observations: Array, memory: Tensor) -> tuple[Array, Tensor]:
        """Compute the outputs for the next step of n environments; see `Acting`."""
        features = self.policy_trunk(torch.from_numpy(observations).to(self.device))
        if self.memory is not None:
            seen, state = self.memory(features[None], _lstm_state(memory))
            features = seen[0]
            memory = torch.cat(state).transpose(0, 1)
        return self.policy_output(features).cpu().numpy(), memory

    def draw_noise(self, num_steps: int, num_envs: int, generator: torch.Generator) -> Float[Tensor, "time envs k"]:
        """Draw noise for a rollout; added to the policy's outputs, it turns `ActionHead.choose` into sampling."""
        noise = self.head.draw_noise(num_steps, num_envs, generator)
        return noise if self.log_std is None else noise * self.log_std.detach().exp().cpu()


def _lstm(num_inputs: int, num_outputs: int) -> nn.LSTM:
    lstm = nn.LSTM(num_inputs, num_outputs)
    for name, parameter in lstm.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
        else:
            nn.init.orthogonal_(parameter)
    return lstm


def _lstm_state(memory: Float[Tensor, "rows 2 units"]) -> tuple[Tensor, Tensor]:
    return memory[None, :, 0].contiguous(), memory[None, :, 1].contiguous()


def blank_where(starts: Array, memory: Float[Tensor, "envs 2 units"]) -> Float[Tensor, "envs 2 units"]:
    """The memory, cleared where the next observation is an episode's first (a mask [envs])."""
    if not memory.shape[-1] or not starts.any():
        return memory
    return memory.masked_fill(torch.from_numpy(starts).to(memory.device)[:, None, None], 0.0)


def _custom(network: FeatureNetwork, spaces: Spaces) -> nn.Module:
    try:
        made = network(spaces)
    except Exception as error:  # of the user's code
        reason = reason_of(error)
        raise ConfigError(f"control.network cannot be made from the environment's spaces: {reason}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"the network's function returned {made!r}; expected a torch module")
    return made


def _share_weights(one: nn.Module, other: nn.Module) -> bool:
    return not {id(each) for each in one.parameters()}.isdisjoint(id(each) for each in other.parameters())


@torch.no_grad()
def _num_features(trunk: nn.Module, spaces: Spaces) -> int:
    """Find the number of features by a test, which also reveals if they depend on chance or on other observations."""
    shape = spaces.observation_shape if spaces.is_image else (spaces.observation_size,)
    numbers = torch.linspace(0.0, 255.0 if spaces.is_image else 2.0, 2 * spaces.observation_size).view(2, *shape)
    observations = numbers.byte() if spaces.is_image else numbers
    try:
        features = trunk(observations)
        alone = [trunk(each[None]) for each in observations]
    except Exception as error:  # of the user's code
        reason = typed_error_text(error)
        raise ConfigError(
            f"control.network cannot read one and two observations [n, {', '.join(map(str, shape))}]: {reason}"
        ) from error
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"control.network returned {found} for two observations; expected features [2, f]")
    if not torch.allclose(features, torch.cat(alone), rtol=1e-3, atol=1e-4):
        raise ConfigError(
            "control.network gives an observation other features each time, or with other observations beside it "
            "(dropout, batch normalization), so that PPO's ratios would not be 1; use layers without"
        )
    return features.shape[1]


Acting: TypeAlias = Callable[[Array, Tensor], tuple[Array, Tensor]]
"""From an observation of every environment [n, …] and its memory [n, 2, units], the outputs [n, outputs] and the memory
after it."""


def acting_function(policy: ControlActorCritic, num_envs: int) -> Acting:
    """Return the policy for the next steps of `num_envs` environments: it is called many times, and weights must not
    change meanwhile.

    For a single state and small dense layers, torch's dispatch of every operation takes several times as long as the
    products; numpy takes half as long.
    """
    layers = [*_plain_layers(policy), policy.policy_output]
    largest = num_envs * max(layer.weight.numel() for layer in layers)
    if len(layers) == 1 or policy.memory is not None or policy.device.type != "cpu" or largest > MOST_PRODUCTS:
        return policy.act
    arrays = [(each.weight.detach().numpy().T, each.bias.detach().numpy()) for each in layers]
    inner = [(weight, bias, np.empty((num_envs, len(bias)), np.float32)) for weight, bias in arrays[:-1]]
    last, last_bias = arrays[-1]
    is_tanh = policy.settings["activation"] == "tanh"

    def act(observations: Array, memory: Tensor) -> tuple[Array, Tensor]:
        numbers = observations
        for weight, bias, out in inner:
            np.dot(numbers, weight, out=out)
            out += bias
            if is_tanh:
                np.tanh(out, out)
            else:
                np.maximum(out, 0.0, out=out)
            numbers = out
        return np.dot(numbers, last) + last_bias, memory

    return act


def _plain_layers(policy: ControlActorCritic) -> Iterator[nn.Linear]:
    """The dense layers of a policy, if it has no other layers."""
    if policy.has_custom_network or policy.spaces.is_image:
        return
    for layer in policy.policy_trunk.children():
        if isinstance(layer, nn.Linear):
            yield layer
