"""Which records are only measured on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol, TypeVar

from kedge.training.runtime import stream_seed

__all__ = ["hold_out"]


class Prompted(Protocol):
    """A record that answers a prompt."""

    @property
    def prompt(self) -> str:
        """What the answer follows; empty for plain text."""
        ...


Record = TypeVar("Record", bound=Prompted)


def hold_out(records: Sequence[Record], *, fraction: float, seed: int) -> tuple[list[Record], list[Record]]:
    """Part the records into those to learn from and those to measure on, with no prompt in common.

    A prompt seen in training with other answers would flatter the figures. Which prompts are held out depends on their
    text and the seed alone, thus not on the order of the rows; a text without a prompt stands for itself.

    Args:
        records: Demonstrations, comparisons or rankings.
        fraction: Share of the records to hold out, in [0, 1); above 0 at least one, if two prompts differ.
        seed: The run's seed.

    Returns:
        The records to learn from and the held-out ones, both in the order given.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    for record in records:
        counts[_identity(record)] += 1
    by_chance = sorted(counts, key=lambda identity: stream_seed(seed, "held_out", identity))
    chosen: set[str] = set()
    missing = fraction * len(records)
    for identity in by_chance[:-1]:
        if missing <= 0:
            break
        chosen.add(identity)
        missing -= counts[identity]
    kept = [record for record in records if _identity(record) not in chosen]
    return kept, [record for record in records if _identity(record) in chosen]


def _identity(record: Prompted) -> str:
    return record.prompt or repr(record)
