"""Concatenated rows, and batches within a token budget."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.models import TokenRows
from kedge.ranks import budget_batches

LENGTHS = st.lists(st.integers(1, 20), max_size=12)


def test_places_of_rows_by_hand():
    rows = TokenRows.of([[5, 6, 7], [8], [9, 10]])
    assert rows.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert rows.lengths == (3, 1, 2)
    assert rows.longest == 3
    assert rows.starts == [0, 3, 4]
    assert rows.last.tolist() == [2, 3, 5]
    assert rows.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert rows.order() == [0, 2, 1]
    assert rows.token_indices([2, 0]).tolist() == [4, 5, 0, 1, 2]


def test_rows_of_like_length_keep_their_order():
    assert TokenRows.of([[1], [2, 2], [3], [4, 4]]).order() == [1, 3, 0, 2]


@given(LENGTHS.filter(len), st.booleans())
def test_a_rectangle_holds_the_rows_and_nothing_else(lengths, left):
    rows = TokenRows(torch.arange(1, sum(lengths) + 1), tuple(lengths))
    ids, mask = rows.pad()
    assert ids.shape == mask.shape == (len(lengths), max(lengths))
    assert mask.sum(dim=1).tolist() == lengths
    assert ids.masked_select(~mask).eq(0).all()
    if left:
        ids, mask = ids.flip(0), mask.flip(0)
    again = TokenRows.unpad(ids, mask)
    expected = list(rows.ids.split(lengths))
    assert torch.equal(again.ids, torch.cat(expected[::-1] if left else expected))
    assert again.lengths == tuple(lengths[::-1] if left else lengths)


@given(LENGTHS, st.one_of(st.none(), st.integers(1, 60)))
def test_batches_hold_each_row_once_and_no_more_than_the_budget(lengths, budget):
    batches = list(budget_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(batches)
    sizes = [[lengths[row] for row in batch] for batch in batches]
    flat = [size for batch in sizes for size in batch]
    assert flat == sorted(flat, reverse=True)
    if budget is None:
        assert len(batches) == min(len(lengths), 1)
        return
    assert all(sum(batch) <= budget or len(batch) == 1 for batch in sizes)
    # None is closed while the next row would still fit.
    assert all(sum(batch) + following[0] > budget for batch, following in pairwise(sizes))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12), st.integers(1, 60), st.integers(0, 5))
def test_batches_count_the_tokens_of_a_prompt_once(rows, budget, common):
    starts = {number: ((-1, common), (number, 3 * number)) for number in (0, 1, 2)} | {3: ((3, 9),)}
    prompts = [starts[number] for number, _ in rows]
    lengths = [sum(tokens for _, tokens in starts[number]) + response for number, response in rows]
    batches = list(budget_batches(lengths, budget, prompts))
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))

    def tokens_in(batch: list[int]) -> int:
        return sum(rows[row][1] for row in batch) + sum(
            {piece[0]: piece[1] for row in batch for piece in prompts[row]}.values()
        )

    for batch in batches:
        assert tokens_in(batch) <= budget or len(batch) == 1
    assert all(tokens_in([*batch, following[0]]) > budget for batch, following in pairwise(batches))
    # Rows with a prompt follow each other, and so do those with the common start.
    for order in (
        [rows[row][0] for batch in batches for row in batch],
        [rows[row][0] == 3 for batch in batches for row in batch],
    ):
        assert len(list(groupby(order))) == len(set(order))
