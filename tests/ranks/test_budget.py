"""Passes that are halved when memory runs out."""

from __future__ import annotations

import pytest
import torch

from kedge.ranks import ALONE, AdaptiveTokens, tokens_of, within_memory
from kedge_base.errors import DataError

LENGTHS = [30, 10, 20, 25, 5]
ROOM = 40
"""Tokens that fit into a pass."""


def passes(budget: AdaptiveTokens | int | None, room: int = ROOM) -> list[list[int]]:
    """The rows of each pass; memory runs out in one of more than `room` tokens."""
    done = []
    for part in ALONE.plan(LENGTHS, tokens_of(budget)):
        if sum(LENGTHS[row] for row in part.rows) > room:
            torch.empty(2**50, dtype=torch.uint8)
        done.append(part.rows)
    return done


def test_passes_are_halved_until_they_fit() -> None:
    said: list[str] = []
    budget = AdaptiveTokens(8192, say=said.append)
    # All 90 tokens in one pass, then 45: row 0, and rows 3 and 2, which are 25 + 20 and do not fit; then 22, but a pass
    # holds at least one row, so 30.
    assert within_memory(budget, LENGTHS, lambda: passes(budget)) == [[0], [3], [2, 1], [4]]
    assert budget.tokens == 30
    assert [line.partition(" in a pass")[0] for line in said] == ["out of memory (1024 TiB more were asked for)"] * 2
    assert "of up to 8,192 tokens" in said[0]
    assert "with passes of up to 45 " in said[0]


def test_a_single_row_that_does_not_fit_ends_the_attempts() -> None:
    budget = AdaptiveTokens(8192)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        within_memory(budget, LENGTHS, lambda: passes(budget, room=29))
    assert budget.tokens == 30


@pytest.mark.parametrize("given", [90, None])
def test_a_number_that_was_given_is_kept(given: int | None) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        within_memory(given, LENGTHS, lambda: passes(given))


def test_other_errors_are_not_repeated() -> None:
    calls: list[int] = []

    def attempt() -> None:
        calls.append(0)
        raise DataError("the file needs more than the free memory")

    with pytest.raises(DataError):
        within_memory(AdaptiveTokens(8192), LENGTHS, attempt)
    assert len(calls) == 1


def test_a_repeated_attempt_draws_the_same_random_numbers() -> None:
    drawn: list[float] = []
    budget = AdaptiveTokens(8192)

    def attempt() -> None:
        drawn.append(float(torch.rand(())))
        passes(budget)

    within_memory(budget, LENGTHS, attempt)
    assert len(drawn) == 3
    assert len(set(drawn)) == 1


def test_the_numbers_are_restored() -> None:
    budget, resumed = AdaptiveTokens(8192), AdaptiveTokens(8192)
    budget.halve(48, None)
    budget.halve_rows(3, MemoryError())
    resumed.load_state_dict(budget.state_dict())
    assert (resumed.tokens, resumed.rows, resumed.is_found) == (48, 3, True)
