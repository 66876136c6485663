"""What any engine that samples responses has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kedge.algorithm.experience import Rollout

__all__ = ["Engine"]


class Engine(Protocol):
    """Samples one response for each prompt from the current policy, at temperature τ, without any filter."""

    @property
    def is_exact(self) -> bool:
        """Whether what it notes while sampling is exact.

        The log probabilities (and values) are then those that the trainer would compute from the same weights, to
        float32's rounding, so that nobody has to compute them again.
        """
        ...

    def generate(self, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], policy_version: int = 0) -> Rollout:
        """Sample a response for every prompt.

        Args:
            prompts: Token ids, at least one token each.
            seeds: One per row: its own random stream, so that a row's tokens do not depend on the rows beside it.
            policy_version: Number of updates the policy has seen.
        """
        ...
