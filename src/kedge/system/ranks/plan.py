"""Which rank evaluates which rows: pure functions of the rows' lengths, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Part", "budget_batches", "plan_parts", "share_rows"]


@dataclass(frozen=True)
class Part:
    """The rows of one pass through a model.

    Attributes:
        rows: Their numbers.
        counts: Whether the results are used. A rank without rows of its own evaluates the shortest row for nothing, so
            that all ranks take part in the same communication, and have gradients of the same parameters.
    """

    rows: list[int]
    counts: bool = True


def budget_batches(lengths: Sequence[int], budget: int | None) -> Iterator[list[int]]:
    """Indices of rows in batches of at most `budget` tokens, longest rows first, so that memory errors show early.

    A row longer than the budget gets its own batch.

    Args:
        lengths: Tokens per row.
        budget: Tokens per batch; None puts all rows into one batch.
    """
    batch: list[int] = []
    room = budget
    for row in _longest_first(lengths):
        if batch and room is not None and lengths[row] > room:
            yield batch
            batch, room = [], budget
        batch.append(row)
        room = None if room is None else room - lengths[row]
    if batch:
        yield batch


def share_rows(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Share rows out so that every rank has about as many tokens: each row, longest first, to the rank with the fewest.

    Args:
        lengths: Tokens per row.
        count: Number of ranks.

    Returns:
        The rows of each rank, longest first. There are empty ones if there are fewer rows than ranks.

    Source: Graham 1969, at most 4/3 of the best possible longest share.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for row in _longest_first(lengths):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += lengths[row]
    return shares


def plan_parts(
    lengths: Sequence[int], budget: int | None, *, number: int = 0, count: int = 1, same_number: bool = False
) -> list[Part]:
    """The passes of one rank over a batch.

    Args:
        lengths: Tokens per row.
        budget: Tokens per pass; None for as few passes as possible.
        number: The rank.
        count: Number of ranks.
        same_number: Every rank takes as many passes as the one with the most, because each pass communicates.

    Returns:
        At least one part, unless there are no rows.
    """
    if count == 1:
        return [Part(batch) for batch in budget_batches(lengths, budget)]
    if not lengths:
        return []
    shares = share_rows(lengths, count)

    def batches(rank: int) -> list[list[int]]:
        rows = shares[rank]
        return [[rows[place] for place in batch] for batch in budget_batches([lengths[row] for row in rows], budget)]

    own = batches(number)
    rounds = max(len(batches(rank)) for rank in range(count)) if same_number else max(1, len(own))
    idle = Part([_longest_first(lengths)[-1]], counts=False)
    return [Part(batch) for batch in own] + [idle] * (rounds - len(own))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])
