"""What an environment shows and takes: its observations and actions as tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import Space, spaces

from kedge.errors import ConfigError

__all__ = ["ActionKind", "Spaces", "spaces_of"]

ActionKind = Literal["discrete", "multi_discrete", "multi_binary", "continuous"]

SMALLEST_IMAGE = 36
"""Height and width, pixels, from which the convolutions of the Nature network have an output."""


@dataclass(frozen=True)
class Spaces:
    """The observations and actions of an environment.

    Attributes:
        observation_shape: Of one observation, as the environment gives it.
        image_layout: Of an image of bytes: channels first (`chw`), last (`hwc`), or without channels (`hw`); None for a
            vector of numbers, which has all numbers of `observation_shape`.
        action_kind: One choice, several choices, several switches, or several numbers.
        action_sizes: Choices of each component; for switches and numbers a 1 each.
        action_shape: Of one action, as the environment takes it; () for one choice.
        action_start: The smallest choice of each component; 0 for switches and numbers.
        action_low: The lower bound of each number; empty for other kinds.
        action_high: The upper bound of each number; empty for other kinds.

    Raises:
        ConfigError: The fields contradict each other.
    """

    observation_shape: tuple[int, ...]
    image_layout: Literal["chw", "hwc", "hw"] | None
    action_kind: ActionKind
    action_sizes: tuple[int, ...]
    action_shape: tuple[int, ...]
    action_start: tuple[int, ...]
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        bounds = len(self.action_sizes) if self.action_kind == "continuous" else 0
        if self.action_kind not in get_args(ActionKind) or math.prod(self.action_shape) != len(self.action_sizes):
            raise ConfigError(f"actions of the kind {self.action_kind!r} and the shape {self.action_shape}")
        if not len(self.action_low) == len(self.action_high) == bounds or len(self.action_start) != self.action_size:
            raise ConfigError(f"{self.action_size} numbers of an action with {len(self.action_low)} bounds")

    @property
    def is_image(self) -> bool:
        """Whether observations are images."""
        return self.image_layout is not None

    @property
    def observation_size(self) -> int:
        """Numbers of one observation."""
        return math.prod(self.observation_shape)

    @property
    def num_channels(self) -> int:
        """Channels of an image."""
        return {"chw": self.observation_shape[0], "hwc": self.observation_shape[-1]}.get(self.image_layout or "", 1)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image, pixels."""
        first = 1 if self.image_layout == "chw" else 0
        height, width = self.observation_shape[first : first + 2]
        return height, width

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
        """Whether every number of an action has finite bounds."""
        return all(math.isfinite(bound) for bound in (*self.action_low, *self.action_high))

    def as_json(self) -> dict[str, Any]:
        """JSON types; infinite bounds as strings."""
        state = asdict(self)
        return {**state, **{name: [str(bound) for bound in state[name]] for name in ("action_low", "action_high")}}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Spaces:
        """The spaces that `as_json` described."""
        numbers = {name: tuple(float(bound) for bound in state[name]) for name in ("action_low", "action_high")}
        tuples = {name: tuple(each) if isinstance(each, (list, tuple)) else each for name, each in state.items()}
        return cls(**{**tuples, **numbers})


def spaces_of(observation: Space[Any], action: Space[Any], *, name: str = "the environment") -> Spaces:
    """The spaces of a single environment.

    Args:
        observation: Its observations; anything but a `Box` has to be flattened by Gymnasium's wrapper beforehand.
        action: Its actions.
        name: The environment, for messages.

    Raises:
        ConfigError: Observations or actions of another kind, or with nothing in them.
    """
    if not isinstance(observation, spaces.Box) or not math.prod(observation.shape):
        raise ConfigError(f"{name}: observations of the space {observation} are not supported; expected a Box")
    return Spaces(observation.shape, _layout(observation), **_actions(action, name))


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


def _actions(action: Space[Any], name: str) -> dict[str, Any]:
    if isinstance(action, spaces.Discrete):
        return _kind("discrete", (int(action.n),), (), (int(action.start),))
    if isinstance(action, spaces.MultiDiscrete):
        sizes, starts = (tuple(int(each) for each in table.flatten()) for table in (action.nvec, action.start))
        return _kind("multi_discrete", sizes, action.nvec.shape, starts)
    if isinstance(action, spaces.MultiBinary):
        size = math.prod(action.shape)
        return _kind("multi_binary", (1,) * size, action.shape, (0,) * size)
    if isinstance(action, spaces.Box) and np.issubdtype(action.dtype, np.floating) and math.prod(action.shape):
        size = math.prod(action.shape)
        low, high = (tuple(float(bound) for bound in table.flatten()) for table in (action.low, action.high))
        return {**_kind("continuous", (1,) * size, action.shape, (0,) * size), "action_low": low, "action_high": high}
    raise ConfigError(
        f"{name}: actions of the space {action} are not supported; expected Discrete, MultiDiscrete, MultiBinary, "
        "or a Box of floats"
    )


def _kind(kind: ActionKind, sizes: tuple[int, ...], shape: tuple[int, ...], start: tuple[int, ...]) -> dict[str, Any]:
    return {"action_kind": kind, "action_sizes": sizes, "action_shape": tuple(shape), "action_start": start}
