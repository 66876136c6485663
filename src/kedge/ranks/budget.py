"""Tokens per pass: a fixed number, or one that is halved when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from kedge.ranks.ranks import ALONE, Prompts, Ranks, plan_parts
from kedge_base.errors import KedgeError
from kedge_base.generators import random_state, restore_random_state
from kedge_base.machine.memory import asked_for, is_out_of_memory, release, with_unit

T = TypeVar("T")


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

    def start_with(self, tokens: int, why: str = "") -> None:
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


def within_memory(
    budget: PassTokens,
    lengths: Sequence[int],
    attempt: Callable[[], T],
    *,
    prompts: Prompts = None,
    ranks: Ranks = ALONE,
) -> T:
    """Evaluate a batch in passes, repeating it with smaller passes as long as memory runs out.

    The number of tokens is the same on every rank: all ranks repeat the attempt if it failed on one. With sharded
    weights nothing can be repeated, because each pass communicates; a fixed number is kept.

    Args:
        budget: Tokens per pass, which each attempt reads again.
        lengths: Tokens of the rows in the batch. A pass holds at least one row, so numbers below the longest row do not
            help.
        attempt: Makes all passes of this rank, from the start and without communication. Its random numbers are the
            same each time.
        prompts: See `Prompts`.
        ranks: They share the batch.
    """
    if not isinstance(budget, AdaptiveTokens) or ranks.is_sharded:
        return attempt()
    while True:
        generators = random_state()
        failure = None
        results = list[T]()
        try:
            results.append(attempt())
        except Exception as error:
            if isinstance(error, KedgeError) or not is_out_of_memory(error):
                raise
            failure = error
        smaller = 0
        if ranks.largest(int(failure is not None)):
            smaller = ranks.largest(_smaller(budget.tokens, lengths, prompts, ranks.count))
        if not smaller:
            if failure is not None:
                raise failure
            return results[0]
        budget.halve(smaller, failure)
        release(failure)
        del failure, results
        restore_random_state(*generators)


def evaluate_in_passes(
    evaluate: Callable[[list[int]], Sequence[Tensor]],
    lengths: Sequence[int],
    budget: PassTokens,
    *,
    prompts: Prompts = None,
    ranks: Ranks = ALONE,
) -> list[Tensor]:
    """Evaluate the rows of a batch in passes of similar length that fit into memory; results keep the order of the
    rows.

    Args:
        evaluate: Returns tables for the rows of a pass: always the same number, with these rows on the first axis.
        lengths: Tokens of the rows in the batch.
        budget: Tokens per pass; None for as few passes as possible.
        prompts: See `Prompts`.
        ranks: They share the passes; all of them get all results.

    Returns:
        The same tables for the whole batch; none if it has no rows.
    """
    own = torch.zeros(len(lengths), dtype=torch.bool)

    def passes() -> list[Tensor]:
        found: list[Tensor] = []
        for part in ranks.plan(lengths, budget, prompts):
            tables = evaluate(part.rows)
            found = found or [each.new_zeros(len(lengths), *each.shape[1:]) for each in tables]
            if part.counts:
                own[part.rows] = True
                for whole, table in zip(found, tables, strict=True):
                    whole[part.rows] = table
        return found

    results = within_memory(budget, lengths, passes, prompts=prompts, ranks=ranks)
    if results:
        ranks.fill_in(own.to(results[0].device), *results)
    return results


def _smaller(tokens: int, lengths: Sequence[int], prompts: Prompts, num_ranks: int) -> int:
    """Half the tokens of the largest pass; 0 if that was a single row."""
    plans = [
        plan_parts(lengths, tokens, prompts=prompts, number=number, count=num_ranks) for number in range(num_ranks)
    ]
    parts = [part.rows for plan in plans for part in plan]
    largest = max(tokens_in(rows, lengths, prompts) for rows in parts)
    longest = max(lengths)
    return max(longest, largest // 2) if largest > longest else 0


def tokens_in(rows: Sequence[int], lengths: Sequence[int], prompts: Prompts) -> int:
    """Count the tokens of a pass, counting shared tokens once."""
    pieces = [piece for row in rows for piece in (prompts[row] if prompts else ())]
    return sum(lengths[row] for row in rows) - sum(tokens for _, tokens in pieces) + sum(dict(pieces).values())


def _asked(error: BaseException | None) -> str:
    asked = asked_for(error)
    return f" ({with_unit(asked)} more were asked for)" if asked else ""
