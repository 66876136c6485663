"""The observations and actions of an environment, as tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from annotated_types import Ge, Le
from gymnasium import Space, spaces

from kedge_base.errors import ConfigError

Array: TypeAlias = np.ndarray[Any, Any]

ActionKind = Literal["discrete", "multi_discrete", "multi_binary", "continuous"]

Count = Annotated[int, Ge(1), Le(2**24)]

SMALLEST_IMAGE = 36
"""Height and width, pixels, from which the convolutions of the Nature network have an output."""


@dataclass(frozen=True)
class Spaces:
    """The observations and actions of an environment.

    Attributes:
        observation_shape: Shape of an observation from the environment.
        image_layout: Of an image of bytes: channels first (`chw`), last (`hwc`), or without channels (`hw`); None for a
            vector of numbers, which has all numbers of `observation_shape`.
        action_kind: One choice, several choices, several switches, or several numbers.
        action_sizes: Number of choices of each component; 1 for switches and numbers.
        action_shape: Shape of an action for the environment; () for one choice.
        action_start: The smallest choice of each component; 0 for switches and numbers.
        action_low: The lower bound of each number; empty for other kinds.
        action_high: The upper bound of each number; empty for other kinds.

    Raises:
        ValueError: The fields contradict each other.
    """

    observation_shape: tuple[Count, ...]
    image_layout: Literal["chw", "hwc", "hw"] | None
    action_kind: ActionKind
    action_sizes: tuple[Count, ...]
    action_shape: tuple[Count, ...]
    action_start: tuple[int, ...]
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.action_sizes)
        bounds = size if self.action_kind == "continuous" else 0
        lengths = (math.prod(self.action_shape), len(self.action_start), len(self.action_low), len(self.action_high))
        if not size or lengths != (size, size, bounds, bounds):
            raise ValueError(f"{size} components of an action contradict its shape, starts or bounds")

    @property
    def is_image(self) -> bool:
        """True if observations are images."""
        return self.image_layout is not None

    @property
    def observation_size(self) -> int:
        """Numbers of one observation."""
        return math.prod(self.observation_shape)

    @property
    def action_size(self) -> int:
        """Components of one action: columns of a tensor of actions."""
        return len(self.action_sizes)

    @property
    def num_outputs(self) -> int:
        """Numbers that describe the location of an action's distribution: logits or means."""
        return sum(self.action_sizes)

    @property
    def is_bounded(self) -> bool:
        """True if every number of an action has finite bounds."""
        return all(math.isfinite(bound) for bound in (*self.action_low, *self.action_high))


def spaces_of(observation: Space[Any], action: Space[Any], *, name: str = "the environment") -> Spaces:
    """The spaces of a single environment.

    Args:
        observation: Its observations; anything but a `Box` has to be flattened by Gymnasium's wrapper beforehand.
        action: Its actions.
        name: The environment, for messages.

    Raises:
        ConfigError: Observations or actions have another kind, or are empty.
    """
    if not isinstance(observation, spaces.Box) or not math.prod(observation.shape):
        raise ConfigError(f"{name}: observations of the space {observation} are not supported; expected a Box")
    return Spaces(observation.shape, _layout(observation), *_actions(action, name))


def _layout(observation: spaces.Box) -> Literal["chw", "hwc", "hw"] | None:
    """The layout of an image; None for a vector. Images too small for convolutions are vectors."""
    shape = observation.shape
    if observation.dtype != np.uint8 or len(shape) not in (2, 3):
        return None
    if len(shape) == 2:
        return "hw" if min(shape) >= SMALLEST_IMAGE else None
    if min(shape[:2]) >= SMALLEST_IMAGE and shape[2] < min(shape[:2]):
        return "hwc"
    return "chw" if min(shape[1:]) >= SMALLEST_IMAGE else None


def _actions(action: Space[Any], name: str) -> tuple[Any, ...]:
    """The fields of `Spaces` that describe actions, in their order."""
    size = math.prod(action.shape or ())
    if isinstance(action, spaces.Discrete):
        return "discrete", (int(action.n),), (), (int(action.start),)
    if isinstance(action, spaces.MultiDiscrete):
        return "multi_discrete", _flat(action.nvec), action.nvec.shape, _flat(action.start)
    if isinstance(action, spaces.MultiBinary):
        return "multi_binary", (1,) * size, action.shape, (0,) * size
    if isinstance(action, spaces.Box) and np.issubdtype(action.dtype, np.floating) and size:
        return "continuous", (1,) * size, action.shape, (0,) * size, _flat(action.low), _flat(action.high)
    raise ConfigError(
        f"{name}: actions of the space {action} are not supported; expected Discrete, MultiDiscrete, MultiBinary, "
        "or a Box of floats"
    )


def _flat(table: Array) -> tuple[Any, ...]:
    return tuple(table.flatten().tolist())


def checked_observation(observation: Any, spaces: Spaces) -> Any:
    """Check that an observation fits its space: numpy would repeat a smaller one, and truncate fractions to bytes.

    Raises:
        ValueError: It has another shape, or an image other numbers than bytes.
    """
    if np.shape(observation) != spaces.observation_shape:
        raise ValueError(f"an observation of shape {np.shape(observation)}")
    if spaces.is_image and np.asarray(observation).dtype != np.uint8:
        raise ValueError(f"an image of {np.asarray(observation).dtype}, and its space is of bytes (uint8)")
    return observation


def observation_buffer(spaces: Spaces, *leading: int) -> Array:
    """A buffer for observations: bytes for images, else float32 rows of all numbers."""
    if spaces.is_image:
        return np.zeros((*leading, *spaces.observation_shape), np.uint8)
    return np.zeros((*leading, spaces.observation_size), np.float32)
