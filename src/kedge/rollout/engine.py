"""The interface of sampling engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from kedge.algorithm.experience import Rollout

__all__ = ["Engine"]


class Engine(Protocol):
    """Samples one response per prompt from the current policy, at temperature τ, without top-k or top-p."""

    @property
    def is_exact(self) -> bool:
        """True if the engine's log probabilities and values equal the trainer's, up to float32 rounding.

        If so, they are not recomputed.
        """
        ...

    def with_sampling(self, *, max_new_tokens: int, temperature: float, greedy: bool = False) -> Engine:
        """The same engine with another length limit and temperature.

        Args:
            max_new_tokens: The longest response, in tokens.
            temperature: Divides the logits, also in the log probabilities.
            greedy: Take the most likely token at each step, instead of drawing one.
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
            seeds: One per row, so that a row's tokens do not depend on the other rows.
            groups: Number of each row's prompt; None gives each row its own.
            policy_version: Number of updates that the policy has completed.
        """
        ...

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """Sample with these weights from now on. Called before the first rollout and after every update.

        Args:
            tensors: The policy's weights by their names in a checkpoint; an engine reads them once per call.
            version: Number of updates that the policy has completed.

        Returns:
            Metrics, such as seconds.
        """
        ...

    def close(self) -> None:
        """End the processes started to sample; nothing is sampled afterwards."""
        ...
