"""The stream of prompts for training: seeded, endless, resumable, and sharded over ranks without overlap."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from kedge.data.mixing import Mixture
from kedge.data.records import Prompt
from kedge.errors import ConfigError, DataError

__all__ = ["PromptStream", "difficulties", "room_for_prompt"]


def room_for_prompt(context_lengths: Iterable[int | None], max_new_tokens: int) -> int | None:
    """Tokens that the shortest context leaves for a prompt; None for no limit.

    Raises:
        ConfigError: No token is left.
    """
    limits = [length for length in context_lengths if length is not None]
    if not limits:
        return None
    room = min(limits) - max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt: the model reads at most {min(limits)} tokens"
        )
    return room


def difficulties(prompts: Sequence[Prompt], column: str) -> list[float]:
    """The numbers in a column.

    Raises:
        DataError: A prompt has no finite number there.
    """
    values = [prompt.columns.get(column) for prompt in prompts]
    for prompt, value in zip(prompts, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            found = "no such column" if column not in prompt.columns else f"{value!r}"[:60]
            raise DataError(
                f"data.curriculum={column}: every prompt needs a number in this column; "
                f"{prompt.text[:40]!r} has {found}"
            )
    return [float(value) for value in values if value is not None]


class PromptStream:
    """An endless stream of prompts, reshuffled on every pass.

    All ranks follow one sequence of shuffled passes. A draw of n takes the next n × world_size prompts of it, and each
    rank keeps its own n. Ranks therefore never overlap, a pass visits every prompt once, and eight ranks drawing n
    prompts each see the same prompts as one rank drawing 8·n.

    With a curriculum the first pass goes from the lowest value of a column to the highest, equal ones shuffled; the
    later passes, which have seen every level, are shuffled.

    Source: spec §2.6.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        curriculum: str | None = None,
        mixture: Mixture | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Start at the first prompt of the first pass.

        Args:
            prompts: the pool, the same on every rank.
            seed: seed of the shuffles, the same on every rank.
            curriculum: column with the difficulty of a prompt, a number; None shuffles the first pass, too.
            mixture: shares of several sources; None for one pass over all prompts after the other.
            rank: this process, 0 to world_size − 1.
            world_size: number of processes that draw.

        Raises:
            DataError: There are no prompts, or one has no number in the column.
        """
        self._levels = None if curriculum is None else difficulties(prompts, curriculum)
        if not prompts:
            raise DataError("the list of prompts is empty")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} with world_size {world_size}, expected 0 to {world_size - 1}")
        self._prompts, self._mixture = prompts, mixture
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._epoch = self._position = 0
        self._order = self._shuffled()

    def next(self, num_prompts: int) -> list[Prompt]:
        """This rank's next prompts; all ranks must draw the same number."""
        drawn = [self._advance() for _ in range(num_prompts * self._world_size)]
        return [self._prompts[index] for index in drawn[self._rank * num_prompts :][:num_prompts]]

    def state_dict(self) -> dict[str, int]:
        """The stream's position, the same on every rank, as plain numbers."""
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self._prompts)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`.

        Raises:
            DataError: It was taken with another number of prompts.
        """
        if state["num_prompts"] != len(self._prompts):
            raise DataError(
                f"the run was saved with {state['num_prompts']} prompts, but the data has {len(self._prompts)}; "
                "resume with the original data"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _advance(self) -> int:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        self._position += 1
        return self._order[self._position - 1]

    def _shuffled(self) -> list[int]:
        # The order depends on seed and pass number only, so that resuming needs no generator state.
        if self._mixture is None:
            order = list(range(len(self._prompts)))
            random.Random(f"prompts {self._seed} {self._epoch}").shuffle(order)
        else:
            order = self._mixture.order(self._epoch)
        levels = self._levels
        return order if levels is None or self._epoch > 0 else sorted(order, key=levels.__getitem__)
