"""Policy and critic of a control task: networks with orthogonal weights, and a standard deviation of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from kedge.errors import ConfigError
from kedge.gym.actions import ActionBounds, ActionHead
from kedge.gym.distributions import Distribution
from kedge.gym.failures import place_of
from kedge.gym.spaces import Spaces
from kedge.system.texts import error_text

__all__ = ["Activation", "ControlActorCritic", "FeatureNetwork"]

Activation = Literal["tanh", "relu"]

FeatureNetwork: TypeAlias = Callable[[Spaces], nn.Module]
"""Makes a module that turns observations [n, …] into features [n, f]."""

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}

HIDDEN_GAIN = math.sqrt(2.0)
POLICY_GAIN = 0.01
VALUE_GAIN = 1.0

Layers: TypeAlias = Sequence[tuple[Tensor, Tensor]]


class DenseLayers(nn.Module):
    """Layers of one activation: x ← activation(x·Wᵀ + b).

    Args:
        num_inputs: Numbers of an input.
        sizes: Outputs of each layer.
        activation: After every layer.
    """

    def __init__(self, num_inputs: int, sizes: Sequence[int], activation: Activation) -> None:
        super().__init__()
        widths = [num_inputs, *sizes]
        self.layers = nn.ModuleList(_linear(*pair, HIDDEN_GAIN) for pair in itertools.pairwise(widths))
        self.activation: Activation = activation
        self.num_features = widths[-1]

    def weights(self) -> Layers:
        """Weight and bias of every layer."""
        return [(layer.weight, layer.bias) for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, inputs: Float[Tensor, "n inputs"]) -> Float[Tensor, "n features"]:
        """The last layer's outputs."""
        for weight, bias in self.weights():
            inputs = ACTIVATIONS[self.activation](functional.linear(inputs, weight, bias))
        return inputs


class NatureLayers(nn.Module):
    """The convolutions for images of Mnih et al. 2015, and dense layers behind them, of 512 units there.

    Args:
        spaces: Of the environment; its observations are images of bytes.
        sizes: Units of the dense layers.
        activation: Of the dense layers; the convolutions have ReLU.

    Source: Mnih et al. 2015, methods.
    """

    def __init__(self, spaces: Spaces, sizes: Sequence[int], activation: Activation) -> None:
        super().__init__()
        self.layout = spaces.image_layout
        plan = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
        channels, (height, width) = spaces.num_channels, spaces.image_size
        layers: list[nn.Module] = []
        for size, kernel, stride in plan:
            layers += [_orthogonal(nn.Conv2d(channels, size, kernel, stride), HIDDEN_GAIN), nn.ReLU()]
            channels, height, width = size, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        dense = DenseLayers(channels * height * width, sizes, activation)
        self.layers, self.num_features = nn.Sequential(*layers, nn.Flatten(), dense), dense.num_features

    def forward(self, images: Tensor) -> Float[Tensor, "n features"]:
        """The features of images of bytes [n, …] in the environment's layout."""
        if self.layout == "hwc":
            images = images.permute(0, 3, 1, 2)
        elif self.layout == "hw":
            images = images.unsqueeze(1)
        # With the channels innermost, a step of the update takes a quarter less time on a CPU; to copy bytes is cheap.
        return self.layers(images.contiguous(memory_format=torch.channels_last).float().div_(255.0))


def _linear(num_inputs: int, num_outputs: int, gain: float) -> nn.Linear:
    return _orthogonal(nn.Linear(num_inputs, num_outputs), gain)


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
        hidden_sizes: Units of the layers; for images, of those behind the convolutions.
        activation: Of these layers.
        share_trunk: Policy and critic share all layers but the last; else each has its own.
        initial_log_std: log σ of every number of an action, at first. It does not depend on the state.
        action_bounds: See `ActionHead`.
        network: Makes the layers in place of `hidden_sizes`.
        orthogonal: Initial weights are orthogonal, and biases 0; else they are torch's own.
        memory_size: Units of an LSTM behind the layers, for tasks whose observations do not show the whole state; the
            trunk has to be shared. None for no memory.
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
        orthogonal: bool = True,
        memory_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.spaces, self.share_trunk = spaces, share_trunk
        self.settings: dict[str, Any] = {
            "hidden_sizes": list(hidden_sizes),
            "activation": activation,
            "share_trunk": share_trunk,
            "action_bounds": action_bounds,
            "memory_size": memory_size,
        }
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation {activation!r} is unknown; expected {' or '.join(ACTIVATIONS)}")
        if memory_size and not share_trunk:
            raise ConfigError("a policy with a memory needs a critic that shares its layers")
        self.head = ActionHead(spaces, action_bounds)

        def trunk() -> nn.Module:
            if network is not None:
                return _custom(network, spaces)
            if spaces.is_image:
                return NatureLayers(spaces, hidden_sizes, activation)
            return DenseLayers(spaces.observation_size, hidden_sizes, activation)

        # The global generator, which layers are initialized from, is left as it was.
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
            self.policy_output = _linear(num_features, spaces.num_outputs, POLICY_GAIN)
            self.value_output = _linear(num_features, 1, VALUE_GAIN)
            if not orthogonal:
                for layer in (self.policy_output, self.value_output) if network else self.modules():
                    if isinstance(layer, (nn.Linear, nn.Conv2d)):
                        layer.reset_parameters()
        numbers = torch.full((spaces.num_outputs,), initial_log_std)
        self.log_std = nn.Parameter(numbers) if self.head.is_continuous else None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.policy_output.weight.device

    @property
    def has_custom_network(self) -> bool:
        """Whether `network` made the layers."""
        return not isinstance(self.policy_trunk, (DenseLayers, NatureLayers))

    def critic_parameters(self) -> list[nn.Parameter]:
        """Those that only the critic has."""
        trunk = [] if self.value_trunk is None else list(self.value_trunk.parameters())
        return [*trunk, *self.value_output.parameters()]

    def policy_parameters(self) -> list[nn.Parameter]:
        """All others; a shared trunk is among them."""
        own = {id(each) for each in self.critic_parameters()}
        return [each for each in self.parameters() if id(each) not in own]

    def blank_memory(self, num_envs: int) -> Float[Tensor, "envs 2 units"]:
        """The memory at the beginning of an episode, zeros: the LSTM's output and its cell. Empty without an LSTM."""
        return torch.zeros(num_envs, 2, self.memory.hidden_size if self.memory else 0, device=self.device)

    def distribution(self, observations: Tensor, memory: Tensor | None = None) -> Distribution:
        """The distribution of actions in each state; arguments as in `forward`."""
        return self.head.distribution(self.policy_output(self._features(observations, memory)), self.log_std)

    def values(self, observations: Tensor, memory: Tensor | None = None, *, alone: bool = False) -> Tensor:
        """The critic's value of each state [n]; `alone` keeps the gradient from a shared trunk."""
        if self.value_trunk is not None:
            return self.value_output(self.value_trunk(observations)).squeeze(-1)
        features = self._features(observations, memory)
        return self.value_output(features.detach() if alone else features).squeeze(-1)

    def forward(self, observations: Tensor, memory: Tensor | None = None) -> tuple[Distribution, Float[Tensor, " n"]]:
        """Distribution and values of n states; a shared trunk runs once.

        Args:
            observations: A row each. With a memory, the steps of sequences [rows, time, …], and n = rows · time.
            memory: At the beginning of each sequence [rows, 2, units]; None for a policy without.
        """
        if self.value_trunk is not None:
            return self.distribution(observations), self.values(observations)
        features = self._features(observations, memory)
        distribution = self.head.distribution(self.policy_output(features), self.log_std)
        return distribution, self.value_output(features).squeeze(-1)

    def _features(self, observations: Tensor, memory: Tensor | None) -> Float[Tensor, "n features"]:
        if self.memory is None:
            return self.policy_trunk(observations)
        assert memory is not None, "a policy with a memory is asked about sequences"
        seen = self.policy_trunk(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
        state = (memory[None, :, 0].contiguous(), memory[None, :, 1].contiguous())
        return self.memory(seen.transpose(0, 1), state)[0].transpose(0, 1).flatten(0, 1)

    def draw_noise(self, num_steps: int, num_envs: int, generator: torch.Generator) -> Float[Tensor, "time envs k"]:
        """Noise for a rollout; added to the policy's outputs, it makes `ActionHead.choose` a sample."""
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


def _custom(network: FeatureNetwork, spaces: Spaces) -> nn.Module:
    try:
        return network(spaces)
    except Exception as error:  # of the user's code
        reason = f"{type(error).__name__}: {error_text(error)} ({place_of(error)})"
        raise ConfigError(f"control.network cannot be made from the environment's spaces: {reason}") from error


def _share_weights(one: nn.Module, other: nn.Module) -> bool:
    return not {id(each) for each in one.parameters()}.isdisjoint(id(each) for each in other.parameters())


@torch.no_grad()
def _num_features(trunk: nn.Module, spaces: Spaces) -> int:
    """Found by a trial, which also shows whether features depend on chance or on other observations."""
    if isinstance(trunk, (DenseLayers, NatureLayers)):
        return trunk.num_features
    if not isinstance(trunk, nn.Module):
        raise ConfigError(f"the network's function returned {trunk!r}; expected a torch module")
    kind = torch.uint8 if spaces.is_image else torch.float32
    shape = spaces.observation_shape if spaces.is_image else (spaces.observation_size,)
    observations = torch.rand(2, *shape).mul(255 if spaces.is_image else 2).to(kind)
    try:
        features, alone = trunk(observations), [trunk(each[None]) for each in observations]
    except Exception as error:  # of the user's code
        reason = f"{type(error).__name__}: {error_text(error)}"
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
