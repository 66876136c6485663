"""The interface of environments to players, and their rewards as a source of scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypedDict

from kedge.data.turns import ToolUse
from kedge_base.environment_turn import EnvironmentTurn


class Said(TypedDict):
    """A turn of the policy, as an environment gets it.

    Attributes:
        text: The turn without its stop token, cut at a stop string.
        num_tokens: Tokens sampled.
        num_read: Tokens that the policy read before.
        is_complete: It ended with a stop token or string, not at a limit.
    """

    text: str
    num_tokens: int
    num_read: int
    is_complete: bool


class Environment(Protocol):
    """The other side of episodes, which are identified by number.

    Attributes:
        name: Its name in errors.
        failure: The message about the last failed call.
        is_scored: Whether it rewards episodes.
    """

    name: str
    failure: str
    is_scored: bool

    @property
    def tools(self) -> ToolUse | None:
        """The tools that the policy may call."""
        ...

    def tools_of(self, schemas: Sequence[Mapping[str, Any]]) -> ToolUse:
        """The tools with some JSON schemas."""
        ...

    def open(self, episodes: Mapping[int, tuple[Mapping[str, Any], int]]) -> Mapping[int, EnvironmentTurn | None]:
        """Start episodes, each with a row of the data and a seed; return what follows the prompt, or None for a
        failure.
        """
        ...

    def step(self, said: Mapping[int, Said]) -> Mapping[int, EnvironmentTurn]:
        """Send a turn of the policy to each of some episodes."""
        ...

    def finish(self, episodes: Iterable[int]) -> Mapping[int, EnvironmentTurn | None]:
        """End episodes; return the rewards of each beyond those of its turns, or None for a failure."""
        ...

    def close(self) -> None:
        """End the environment's process, if any."""
        ...


class EnvironmentReward:
    """A reward source that returns an environment's rewards.

    Args:
        name: The environment's name.
        by_turn: Place each turn's reward at the turn's last token; otherwise their sum is the response's score.
    """

    def __init__(self, name: str, *, by_turn: bool) -> None:
        self.name = name
        self.models: Mapping[str, Any] = {}
        self._by_turn = by_turn

    def check(self, columns: Collection[str]) -> None:
        """Do nothing, because an environment reads the rows itself."""

    def score(self, responses: Any) -> list[Any]:
        """Return each response's rewards per token, or their sum; None for failed episodes and other responses."""
        if not responses.paid:
            return [None] * len(responses)
        return [None if math.isnan(sum(row)) else row if self._by_turn else sum(row) for row in responses.paid]
