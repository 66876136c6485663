"""Mixes several sources in given shares: which rows each pass over the data visits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Mixture"]


@dataclass(frozen=True)
class Mixture:
    """Passes over records of several sources, each with a fixed share of the rows.

    A pass has as many rows as there are records. Every source is a stream of its own shuffled passes, from which each
    pass of the mixture takes its share: no row of a large source is lost, and a small source repeats as often as its
    share demands, each time complete before it starts over.

    Attributes:
        origins: index of the source of each record.
        shares: weight of each source, at least 0; only their proportions count.
        seed: seed of the shuffles.
    """

    origins: Sequence[int]
    shares: Sequence[float]
    seed: int

    def order(self, epoch: int) -> list[int]:
        """The records of a pass, counted from 0, as indices. Depends on the seed and the pass only."""
        order = [
            row
            for source, count in enumerate(self.counts)
            for row in self._stretch(source, start=epoch * count, count=count)
        ]
        random.Random(f"mixture {self.seed} {epoch}").shuffle(order)
        return order

    @property
    def counts(self) -> list[int]:
        """Rows of each source in a pass: its share of all records, rounded so that they add up (largest remainder)."""
        present = set(self.origins)
        weights = [weight if source in present else 0.0 for source, weight in enumerate(self.shares)]
        exact = [weight / sum(weights) * len(self.origins) for weight in weights]
        counts = [int(count) for count in exact]
        for source in sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])[
            : len(self.origins) - sum(counts)
        ]:
            counts[source] += 1
        return counts

    def _stretch(self, source: int, *, start: int, count: int) -> list[int]:
        """A stretch of the endless stream of a source's shuffled passes."""
        rows = [row for row, origin in enumerate(self.origins) if origin == source]
        drawn: list[int] = []
        while len(drawn) < count:
            number, offset = divmod(start + len(drawn), len(rows))
            shuffled = random.Random(f"source {self.seed} {source} {number}").sample(rows, len(rows))
            drawn += shuffled[offset : offset + count - len(drawn)]
        return drawn
