"""The environment's turn of an episode: returned by those who run environments, and read by those who play them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ending = Literal["completed", "truncated", "timeout", "failed"]
"""How an environment ends an episode; for the reasons why kedge ends one, see `ENDINGS`."""


@dataclass(frozen=True)
class EnvironmentTurn:
    """The answer of an environment to a turn of the policy.

    Attributes:
        messages: The messages that the policy reads next.
        reward: The reward of the policy's turn.
        ending: How the episode ended; None if it continues.
        num_calls: Tools that the policy called.
        num_errors: Calls that failed, or could not be read.
        privileged: Privileged information for a critic, by name, when an episode opens.
        context: The whole conversation that the policy reads next, instead of what it has read so far; None to add
            `messages` to that. An unchanged answer of the policy has the number of its turn in `answer`.
        tools: The schemas of the tools to show in `context`; None for those of the environment.
        max_tokens: Limit of the policy's next turn.
        stop: Strings that end the policy's next turn.
        rewards: The reward of each turn of the policy so far, where they are known at the end; empty otherwise.
        num_changed: New messages of an assistant in `context` that the policy has not written.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    ending: Ending | None = None
    num_calls: int = 0
    num_errors: int = 0
    privileged: Mapping[str, Any] = field(default_factory=dict)
    context: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_changed: int = 0
