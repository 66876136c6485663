"""Groups of responses: their spread against a loop, and exact comparison of equal scores."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm.experience import Rollout, join_rollouts
from kedge.algorithm.shaping import group_scores, total_scores

ROWS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([-1.0, 0.0, 0.1, 0.7, 1.0])), min_size=1, max_size=20)


@given(ROWS)
def test_the_figures_of_each_group_agree_with_a_loop(rows: list[tuple[int, float]]) -> None:
    found = group_scores(torch.tensor([score for _, score in rows]), torch.tensor([number for number, _ in rows]))
    numbers = sorted({number for number, _ in rows})
    assert found.group.tolist() == numbers
    for place, number in enumerate(numbers):
        scores = [score for each, score in rows if each == number]
        assert found.count[place] == len(scores)
        assert float(found.mean[place]) == pytest.approx(statistics.fmean(scores), abs=1e-6)
        assert float(found.std[place]) == pytest.approx(statistics.pstdev(scores), abs=1e-6)
        assert bool(found.has_spread[place]) == (len(set(scores)) > 1)
        assert found.among(torch.tensor([number])).tolist() == [each == number for each, _ in rows]


def test_equal_scores_have_no_spread_although_their_deviation_is_rounded() -> None:
    scores = torch.full((8,), 0.7)
    assert scores.std(correction=1) > 0  # a test against 0, or an epsilon, would find spread
    assert group_scores(scores, torch.zeros(8, dtype=torch.long)).has_spread.tolist() == [False]
    scores[3] += 1e-7  # as for the same response at another place in a reward model's batch
    assert group_scores(scores, torch.zeros(8, dtype=torch.long)).has_spread.tolist() == [False]
    scores[3] += 1e-5
    assert group_scores(scores, torch.zeros(8, dtype=torch.long)).has_spread.tolist() == [True]


def test_the_same_token_scores_at_other_tokens_have_no_spread() -> None:
    steps = torch.zeros(8, 24)
    for row in range(8):  # in float32 the order of the sum decides its last bits
        steps[row, torch.randperm(24, generator=torch.Generator().manual_seed(row))[:6]] = torch.tensor(
            [0.1, 0.2, 0.3, 0.7, 0.1, 0.4]
        )
    assert len(set(steps.sum(-1).tolist())) > 1
    totals = total_scores(torch.full((8,), 0.1), steps)
    assert group_scores(totals, torch.zeros(8, dtype=torch.long)).has_spread.tolist() == [False]
    assert totals[0] == pytest.approx(1.9)
    assert float(total_scores(torch.zeros(1), torch.full((1, 10), 0.1))) == 1.0


def test_a_group_of_one_has_no_spread() -> None:
    assert group_scores(torch.tensor([1.0, 2.0]), torch.tensor([3, 4])).has_spread.tolist() == [False, False]


def rollout(prompts: list[list[int]], responses: list[list[int]], *, groups: list[int]) -> Rollout:
    """Rows padded to their own widths."""
    wide, long = max(map(len, prompts)), max(map(len, responses))
    ids = torch.tensor([[9] * (wide - len(row)) + row for row in prompts])
    answers = torch.tensor([row + [9] * (long - len(row)) for row in responses])
    mask = answers != 9
    rows = len(prompts)
    return Rollout(
        prompt_ids=ids,
        prompt_mask=ids != 9,
        response_ids=answers,
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.where(mask, -answers.float(), 0.0),
        stopped=torch.ones(rows, dtype=torch.bool),
        group=torch.tensor(groups),
        policy_version=torch.zeros(rows, dtype=torch.long),
    )


def test_joined_rollouts_keep_every_row_whatever_their_widths() -> None:
    parts = [rollout([[1, 2, 3]], [[4]], groups=[0]), rollout([[5], [6, 7]], [[8, 1], [2]], groups=[1, 1])]
    joined = join_rollouts(parts, pad_id=0)
    assert joined.prompt_ids.tolist() == [[1, 2, 3], [0, 9, 5], [0, 6, 7]]
    assert joined.prompt_mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]
    assert joined.response_ids.tolist() == [[4, 0], [8, 1], [2, 9]]
    assert joined.action_mask.tolist() == joined.token_mask.tolist() == [[True, False], [True, True], [True, False]]
    assert joined.logprobs.tolist() == [[-4.0, 0.0], [-8.0, -1.0], [-2.0, 0.0]]
    assert joined.group.tolist() == [0, 1, 1]
    assert joined.values is None
    assert join_rollouts(parts[:1], pad_id=0) is parts[0]
