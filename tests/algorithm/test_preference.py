import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm import ranking_loss
from kedge_base.errors import ShapeError

SEEDS = st.integers(0, 10_000)


def pair_loss(winner, loser):
    """−log σ(winner − loser) in plain arithmetic."""
    return math.log(1 + math.exp(loser - winner))


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of_pairs(chosen, rejected):
    return ranking_loss(torch.stack([chosen, rejected], -1), torch.tensor([[1, 2]]).expand(len(chosen), 2)).item()


@given(SEEDS)
def test_two_responses_are_a_comparison(seed):
    scores = draw(seed, 6, 2)
    expected = sum(pair_loss(*row) for row in scores.tolist()) / 6
    assert loss_of_pairs(scores[:, 0], scores[:, 1]) == pytest.approx(expected)
    # The order of the columns does not matter, the ranks do.
    swapped = ranking_loss(scores.flip(-1), torch.tensor([[2.0, 1.0]]).expand(6, 2))
    assert swapped.item() == pytest.approx(expected)


def test_known_values():
    assert loss_of_pairs(torch.zeros(3), torch.zeros(3)) == pytest.approx(math.log(2))
    # Far apart the loss is the difference itself, or 0; never inf.
    assert loss_of_pairs(torch.tensor([0.0]), torch.tensor([1e4])) == 1e4
    assert loss_of_pairs(torch.tensor([1e4]), torch.tensor([0.0])) == 0.0


@given(SEEDS, st.floats(-50, 50))
def test_rankings_agree_with_a_loop_over_pairs(seed, shift):
    scores = draw(seed, 4, 5)
    # Few ranks, so that there are ties; NaN marks a missing response.
    ranks = torch.randint(1, 4, (4, 5), generator=torch.Generator().manual_seed(seed)).double()
    ranks[0, 3:] = math.nan
    ranks[0, 0], ranks[0, 1] = 1.0, 2.0
    means = []
    for prompt in range(4):
        losses = [
            pair_loss(scores[prompt, i].item(), scores[prompt, j].item())
            for i in range(5)
            for j in range(5)
            if ranks[prompt, i] < ranks[prompt, j]
        ]
        if losses:
            means.append(sum(losses) / len(losses))
    found = ranking_loss(scores, ranks)
    assert found.item() == pytest.approx(sum(means) / len(means))
    assert ranking_loss(scores + shift, ranks).item() == pytest.approx(found.item())
    assert ranking_loss(scores.flip(1), ranks.flip(1)).item() == pytest.approx(found.item())


def test_a_prompt_of_ties_says_nothing():
    scores, ranks = torch.tensor([[1.0, 5.0], [2.0, 0.0]]), torch.tensor([[1, 1], [1, 2]])
    assert ranking_loss(scores, ranks).item() == pytest.approx(pair_loss(2.0, 0.0))


@pytest.mark.parametrize("absent", ["nan", "mask"])
def test_absent_responses_influence_neither_value_nor_gradient(absent):
    scores = torch.tensor([[1.0, 2.0, math.nan], [0.5, 0.0, -1.0]], requires_grad=True)
    ranks = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    present = torch.tensor([[True, True, False], [True, True, True]])
    if absent == "nan":
        loss = ranking_loss(scores, ranks.masked_fill(~present, math.nan))
    else:
        loss = ranking_loss(scores, ranks, mask=present)
    second = (pair_loss(0.5, 0.0) + pair_loss(0.5, -1.0) + pair_loss(0.0, -1.0)) / 3
    assert loss.item() == pytest.approx((pair_loss(1.0, 2.0) + second) / 2)
    loss.backward()
    assert scores.grad[0, 2] == 0
    assert scores.grad.isfinite().all()


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def test_shapes_must_agree(self):
        with pytest.raises(ShapeError, match=r"ranks \(2, 3\)"):
            ranking_loss(torch.zeros(2, 2), torch.zeros(2, 3))

    def test_there_must_be_a_pair(self):
        with pytest.raises(ShapeError, match="no prompt has two responses with different ranks"):
            ranking_loss(torch.zeros(2, 3), torch.ones(2, 3))
