"""The plan of passes: every row on one rank, balanced, and as many passes on every rank where that is needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.ranks.passes import budget_batches, plan_parts, share_rows

lengths_of_rows = st.lists(st.integers(1, 50), max_size=30)


@settings(max_examples=60, deadline=None)
@given(lengths_of_rows, st.integers(2, 5), st.one_of(st.none(), st.integers(1, 120)), st.booleans())
def test_every_row_counts_once(lengths: list[int], count: int, budget: int | None, same_number: bool) -> None:
    plans = [plan_parts(lengths, budget, number=rank, count=count, same_number=same_number) for rank in range(count)]
    assert sorted(row for plan in plans for part in plan if part.counts for row in part.rows) == list(
        range(len(lengths))
    )
    assert all(plan for plan in plans) == bool(lengths)
    for part in (part for plan in plans for part in plan):
        assert budget is None or len(part.rows) == 1 or sum(lengths[row] for row in part.rows) <= budget
        assert part.counts or [lengths[row] for row in part.rows] == [min(lengths)]
    if same_number:
        assert len({len(plan) for plan in plans}) == 1


@settings(max_examples=60, deadline=None)
@given(lengths_of_rows, st.integers(1, 5))
def test_shares_are_balanced(lengths: list[int], count: int) -> None:
    """No rank has more than the mean and the longest row beside it."""
    loads = [sum(lengths[row] for row in share) for share in share_rows(lengths, count)]
    assert max(loads) <= sum(lengths) / count + max(lengths, default=0)


def test_one_rank_has_the_batches_of_a_single_process() -> None:
    lengths = [5, 9, 1, 7, 7, 3]
    assert [part.rows for part in plan_parts(lengths, 12)] == list(budget_batches(lengths, 12))


def test_a_worked_example() -> None:
    """9 | 7 7 | 5 … by hand: the longest row first, each to the rank with the fewest tokens."""
    assert share_rows([5, 9, 1, 7, 7, 3], 2) == [[1, 0, 5], [3, 4, 2]]
