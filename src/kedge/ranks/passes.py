"""Passes through a model: batches of rows that fit into memory, shared by the ranks.

A batch is evaluated in passes of at most so many tokens. Rows that share a prompt go through the same pass, where its
tokens count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kedge_base.machine.memory import asked_for, with_unit

Prompts: TypeAlias = Sequence[tuple[tuple[int, int], ...]] | None
"""The pieces of each row's prompt, each a number and its tokens: rows of a pass share those with the same numbers. None
if no rows share any. If all numbers differ, they ascend."""


class AdaptiveTokens:
    """Tokens per pass that are halved when memory runs out; the run continues with the smaller number.

    It is part of a run's state, because the split changes the rounding: a resumed run starts with the last number.

    Args:
        tokens: At first.
        say: Prints a line to the user.

    Attributes:
        tokens: Now.
        rows: Maximum number of responses sampled at once; None for all of them.
        is_found: A number that fits is known, from a trial or from the resumed run.
    """

    def __init__(self, tokens: int, *, say: Callable[[str], None] = lambda line: None) -> None:
        self.tokens = tokens
        self.rows: int | None = None
        self.is_found = False
        self._say = say

    def start_with(self, tokens: int, why: str) -> None:
        """Set the number that a trial found."""
        self.is_found = True
        if tokens != self.tokens:
            self.tokens = tokens
            self._say(f"runtime.micro_batch_tokens=auto: {tokens:,} tokens per pass{why}")

    def halve(self, smaller: int, error: BaseException | None) -> None:
        """Continue with smaller passes.

        Args:
            smaller: Tokens per pass.
            error: The error; None if another rank failed.
        """
        self._say(
            f"out of memory{_asked(error)} in a pass of up to {self.tokens:,} tokens; it is repeated, and the run "
            f"continues with passes of up to {smaller:,} (runtime.micro_batch_tokens=auto)"
        )
        self.tokens = smaller

    def halve_rows(self, rows: int, error: BaseException) -> None:
        """Continue with fewer responses sampled at once."""
        self.rows = rows
        self._say(
            f"out of memory{_asked(error)} in sampling; it is repeated, and the run continues with up to {rows:,} "
            "responses at once (runtime.micro_batch_tokens=auto)"
        )

    def state_dict(self) -> dict[str, Any]:
        """The numbers, as JSON types."""
        return {"tokens": self.tokens, "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.tokens = state["tokens"]
        self.rows = state["rows"]
        self.is_found = True


PassTokens: TypeAlias = "int | AdaptiveTokens | None"
"""Tokens per pass; None for no limit."""


def tokens_of(budget: PassTokens) -> int | None:
    """The current number of tokens per pass."""
    return budget.tokens if isinstance(budget, AdaptiveTokens) else budget


def budget_metrics(budget: PassTokens) -> dict[str, float]:
    """`memory/micro_batch_tokens`, if it can change."""
    return {"memory/micro_batch_tokens": float(budget.tokens)} if isinstance(budget, AdaptiveTokens) else {}


@dataclass(frozen=True)
class Part:
    """The rows of one pass through a model.

    Attributes:
        rows: Their indices in the batch.
        counts: The results are used. A rank without rows evaluates the shortest row and discards the result, so that
            all ranks take part in the same communication and have gradients of the same parameters.
    """

    rows: list[int]
    counts: bool = True


def budget_batches(lengths: Sequence[int], budget: int | None, prompts: Prompts = None) -> Iterator[list[int]]:
    """Indices of rows in batches of at most `budget` tokens, longest rows first, so that memory errors show early.

    A row longer than the budget gets its own batch. Rows with the same prompt follow each other.

    Args:
        lengths: Tokens per row.
        budget: Tokens per batch; None puts all rows into one batch.
        prompts: See `Prompts`.
    """
    batch: list[int] = []
    room = budget
    held = set[int]()
    for row, pieces in _in_order(lengths, prompts):
        added = lengths[row] - sum(tokens for number, tokens in pieces if number in held)
        if batch and room is not None and added > room:
            yield batch
            batch = []
            room = budget
            held = set()
            added = lengths[row]
        batch.append(row)
        held.update(number for number, _ in pieces)
        room = None if room is None else room - added
    if batch:
        yield batch


def share_rows(lengths: Sequence[int], count: int, prompts: Prompts = None) -> list[list[int]]:
    """Distribute rows so that every rank has about the same number of tokens: each row goes to the rank with the fewest
    so far.

    Args:
        lengths: Tokens per row.
        count: Number of ranks.
        prompts: See `Prompts`.

    Returns:
        The rows of each rank, longest first. Some are empty if there are fewer rows than ranks.

    Source: Graham 1969, at most 4/3 of the best possible longest share.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    held = [set[int]() for _ in range(count)]
    for row, pieces in _in_order(lengths, prompts):
        after = [
            load + lengths[row] - sum(tokens for number, tokens in pieces if number in has)
            for load, has in zip(loads, held, strict=True)
        ]
        rank = after.index(min(after))
        shares[rank].append(row)
        held[rank].update(number for number, _ in pieces)
        loads[rank] = after[rank]
    return shares


def plan_parts(
    lengths: Sequence[int],
    budget: int | None,
    *,
    prompts: Prompts = None,
    number: int = 0,
    count: int = 1,
    same_number: bool = False,
) -> list[Part]:
    """The passes of one rank over a batch.

    Args:
        lengths: Tokens per row.
        budget: Tokens per pass; None for as few passes as possible.
        prompts: See `Prompts`.
        number: The rank.
        count: Number of ranks.
        same_number: Every rank makes as many passes as the one with the most, because each pass communicates.

    Returns:
        At least one part, except for an empty batch.
    """
    if count == 1:
        return [Part(batch) for batch in budget_batches(lengths, budget, prompts)]
    if not lengths:
        return []
    shares = share_rows(lengths, count, prompts)

    def batches(rank: int) -> list[list[int]]:
        rows = shares[rank]
        found = budget_batches([lengths[row] for row in rows], budget, prompts and [prompts[row] for row in rows])
        return [[rows[place] for place in batch] for batch in found]

    own = batches(number)
    rounds = max(len(batches(rank)) for rank in range(count)) if same_number else max(1, len(own))
    idle = Part([min(range(len(lengths)), key=lambda row: (lengths[row], -row))], counts=False)
    return [Part(batch) for batch in own] + [idle] * (rounds - len(own))


def _in_order(lengths: Sequence[int], prompts: Prompts) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Sort rows by descending length, keeping rows that share a piece together; return them with their pieces.

    A piece is placed by its longest row.
    """
    rows = list(enumerate(prompts or [((row, 0),) for row in range(len(lengths))]))
    longest = dict[int, int]()
    for row, pieces in rows:
        for number, _ in pieces:
            longest[number] = max(lengths[row], longest.get(number, 0))

    def order(each: tuple[int, tuple[tuple[int, int], ...]]) -> list[tuple[int, int]]:
        row, pieces = each
        return [*((-longest[number], number) for number, _ in pieces), (-lengths[row], 0)]

    return sorted(rows, key=order)


def smaller_passes(tokens: int, lengths: Sequence[int], prompts: Prompts, num_ranks: int) -> int:
    """Half the tokens of the largest pass; 0 if that was a single row."""
    largest = max(
        tokens_in(part.rows, lengths, prompts)
        for number in range(num_ranks)
        for part in plan_parts(lengths, tokens, prompts=prompts, number=number, count=num_ranks)
    )
    longest = max(lengths)
    return max(longest, largest // 2) if largest > longest else 0


def tokens_in(rows: Sequence[int], lengths: Sequence[int], prompts: Prompts) -> int:
    """Count the tokens of a pass, counting shared tokens once."""
    pieces = [piece for row in rows for piece in (prompts[row] if prompts else ())]
    return sum(lengths[row] for row in rows) - sum(tokens for _, tokens in pieces) + sum(dict(pieces).values())


def _asked(error: BaseException | None) -> str:
    asked = asked_for(error)
    return f" ({with_unit(asked)} more were asked for)" if asked else ""
