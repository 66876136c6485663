"""The rows of an update on one machine, and how they are split into passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Rows", "quantiles"]


@dataclass(frozen=True)
class Rows:
    """Prompts and responses of an update or a step.

    Attributes:
        prompts: Tokens of each prompt.
        responses: Tokens of each response, or of each completion.
        parts: Rows of each forward and backward pass.
    """

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.prompts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)

    @property
    def largest(self) -> tuple[int, ...]:
        """The rows of the pass with the most tokens."""
        lengths = self.lengths
        return max(self.parts, key=lambda part: sum(lengths[row] for row in part))

    def tokens_of(self, part: Sequence[int]) -> int:
        """Tokens of some rows."""
        lengths = self.lengths
        return sum(lengths[row] for row in part)


def quantiles(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """So many lengths that are distributed like the given ones, longest last.

    Args:
        lengths: At least one.
        count: How many.
    """
    ordered = sorted(lengths)
    return tuple(
        ordered[min(len(ordered) - 1, (2 * place + 1) * len(ordered) // (2 * count))] for place in range(count)
    )
