"""What an engine that samples responses offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kedge.algorithm.experience import Rollout

__all__ = ["Engine"]


class Engine(Protocol):
    """Samples one response per prompt from the current policy, at temperature τ, without any filter."""

    @property
    def is_exact(self) -> bool:
        """Whether the log probabilities (and values) of sampling equal the trainer's, up to float32 rounding.

        They are then not computed a second time.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        groups: Sequence[int] | None = None,
        policy_version: int = 0,
    ) -> Rollout:
        """Sample a response for every prompt.

        Args:
            prompts: Token ids, at least one token each.
            seeds: One per row, for its own random stream: a row's tokens do not depend on the other rows.
            groups: Number of the prompt that each row answers; None gives each row its own.
            policy_version: Number of updates that the policy has seen.
        """
        ...
