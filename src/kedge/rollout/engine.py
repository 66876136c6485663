"""The interface of sampling engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from typing_extensions import Required, TypedDict, Unpack

from kedge.algorithm.experience import Rollout


@dataclass(frozen=True)
class Reply:
    """The tokens that the policy reads before its next turn.

    Attributes:
        tokens: Token ids that no earlier turn of the conversation has read at this place.
        parent: For a new context, the slot of the conversation's token that `tokens` follow, as in `Rollout.parents`;
            None if they follow the policy's turn.
    """

    tokens: Sequence[int] = ()
    parent: int | None = None


class Dialogue(Protocol):
    """The other side of a batch of conversations: opens each of them, and answers the policy."""

    @property
    def longest_turn(self) -> int:
        """Maximum number of tokens in a turn of the policy, including its stop token."""
        ...

    def limit(self, row: int) -> int:
        """Maximum number of tokens in the next turn of a conversation, at most `longest_turn`."""
        ...

    def among(self, rows: Sequence[int]) -> Dialogue:
        """Return the dialogue restricted to some of the conversations."""
        ...

    def open(self, rows: Sequence[int]) -> list[list[int]]:
        """Open conversations, and return their initial tokens; a conversation that was already open restarts."""
        ...

    def kept(self, said: Mapping[int, Sequence[int]]) -> Mapping[int, int]:
        """Return how many tokens of a turn are kept, by row, for turns that should have ended earlier.

        Dropping what was sampled after a string that ends a turn gives the same distribution as stopping at it.

        Args:
            said: See `answer`.
        """
        ...

    def answer(self, said: Mapping[int, Sequence[int]]) -> Mapping[int, Reply | None]:
        """Return by row what the policy reads before its next turn; None if the conversation has ended.

        Args:
            said: The tokens that the policy sampled since the last answer, by row.
        """
        ...

    def finished(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the data that only this side has: the rewards, and how each conversation ended."""
        ...


class GenerateOptions(TypedDict, total=False):
    """The arguments of `Engine.generate` besides the prompts.

    Attributes:
        seeds: One per row, so that a row's tokens do not depend on the other rows.
        groups: Number of each row's prompt; None gives each row its own.
        policy_version: Number of updates that the policy has completed.
        dialogue: Answers the policy, so that a response contains the turns of both; None for a single turn.
    """

    seeds: Required[Sequence[int]]
    groups: Sequence[int] | None
    policy_version: int
    dialogue: Dialogue | None


class Engine(Protocol):
    """Samples one response per prompt from the current policy, at temperature τ, without top-k or top-p."""

    @property
    def is_exact(self) -> bool:
        """True if the engine's log probabilities and values equal the trainer's, up to float32 rounding.

        If so, they are not recomputed.
        """
        ...

    def with_sampling(self, *, max_new_tokens: int, temperature: float) -> Engine:
        """Return the engine with a different length limit and temperature.

        Args:
            max_new_tokens: The longest response, in tokens.
            temperature: Divides the logits, also in the log probabilities; 0 takes the most likely token at each step,
                with its log probability at 1.
        """
        ...

    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]) -> Rollout:
        """Sample a response for every prompt.

        Args:
            prompts: Token ids, at least one token each; empty with a dialogue, which supplies the initial tokens.
            **options: See `GenerateOptions`.
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
        """End the engine's processes; nothing is sampled afterwards."""
        ...
