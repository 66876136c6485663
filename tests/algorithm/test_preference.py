import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm import ranking_loss
from kedge.algorithm.preference import initial_tie
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


def outcome(gap, tie, ties):
    """The probabilities of better, worse and tied by the papers' formulas, with worths π = e^score."""
    first, second = math.exp(gap), 1.0
    if ties == "davidson":
        nu = math.exp(tie)
        total = first + second + nu * math.sqrt(first * second)
        return first / total, second / total, nu * math.sqrt(first * second) / total
    theta = 1 + math.exp(tie)
    better, worse = first / (first + theta * second), second / (theta * first + second)
    tied = (theta**2 - 1) * first * second / ((first + theta * second) * (theta * first + second))
    return better, worse, tied


def loop_with_ties(scores, ranks, tie, ties):
    means = []
    for row, places in zip(scores, ranks, strict=True):
        losses = []
        for i, j in itertools.combinations(range(len(row)), 2):
            if not (math.isnan(places[i]) or math.isnan(places[j])):
                better, worse, tied = outcome(row[i] - row[j], tie, ties)
                chance = tied if places[i] == places[j] else better if places[i] < places[j] else worse
                losses.append(-math.log(chance))
        if losses:
            means.append(sum(losses) / len(losses))
    return sum(means) / len(means)


@pytest.mark.parametrize("ties", ["davidson", "rao_kupper"])
@given(SEEDS, st.floats(-3, 3))
def test_ties_agree_with_the_formulas_of_the_papers_and_their_differences(ties, seed, tie):
    scores = draw(seed, 4, 4)
    ranks = torch.randint(1, 4, (4, 4), generator=torch.Generator().manual_seed(seed)).double()
    ranks[0, 2:] = math.nan
    ranks[1] = 2.0  # all tied
    ranks[2, 1:] = math.nan  # no pair
    given_scores = scores.clone().requires_grad_()
    given_tie = torch.tensor(tie, dtype=torch.float64, requires_grad=True)
    loss = ranking_loss(given_scores, ranks, tie=given_tie, ties=ties)
    assert loss.item() == pytest.approx(loop_with_ties(scores.tolist(), ranks.tolist(), tie, ties), rel=1e-9)
    loss.backward()

    def moved(row, place, step):
        return [
            [value + step * ((r, c) == (row, place)) for c, value in enumerate(each)] for r, each in enumerate(rows)
        ]

    rows, step = scores.tolist(), 1e-5
    for row, place in itertools.product(range(4), range(4)):
        up, down = (loop_with_ties(moved(row, place, each), ranks.tolist(), tie, ties) for each in (step, -step))
        assert given_scores.grad[row, place].item() == pytest.approx((up - down) / (2 * step), abs=1e-7)
    up, down = (loop_with_ties(rows, ranks.tolist(), tie + each, ties) for each in (step, -step))
    assert given_tie.grad.item() == pytest.approx((up - down) / (2 * step), abs=1e-7)


def test_ties_by_hand():
    """Equal scores and ν = 1: three equal chances. θ = 2: 1/3 each. A gap of log 4 and ν = 1: 4, 1 and 2 of 7."""
    equal, apart = torch.zeros(1, 2), torch.tensor([[math.log(4.0), 0.0]])
    tied, ordered, reversed_ = (torch.tensor([each]) for each in ([1.0, 1.0], [1.0, 2.0], [2.0, 1.0]))
    zero = torch.tensor(0.0)
    for ranks in (tied, ordered, reversed_):
        for ties in ("davidson", "rao_kupper"):
            loss = ranking_loss(equal, ranks, tie=zero, ties=ties)
            assert loss.item() == pytest.approx(math.log(3))
    for ranks, chance in ((tied, 2 / 7), (ordered, 4 / 7), (reversed_, 1 / 7)):
        loss = ranking_loss(apart, ranks, tie=zero, ties="davidson")
        assert loss.item() == pytest.approx(-math.log(chance))
    # π = 4 and 1, θ = 2: 4/6, 1/9, and the rest.
    for ranks, chance in ((tied, 2 / 9), (ordered, 2 / 3), (reversed_, 1 / 9)):
        loss = ranking_loss(apart, ranks, tie=zero, ties="rao_kupper")
        assert loss.item() == pytest.approx(-math.log(chance))


@pytest.mark.parametrize("ties", ["davidson", "rao_kupper"])
def test_without_likely_ties_the_loss_is_that_of_bradley_and_terry(ties):
    scores = draw(3, 5, 3)
    ranks = torch.tensor([[1.0, 2.0, 3.0]]).expand(5, 3)
    never = torch.tensor(-60.0, dtype=torch.float64)
    plain = ranking_loss(scores, ranks).item()
    assert ranking_loss(scores, ranks, tie=never, ties=ties).item() == pytest.approx(plain)
    # Far apart, the loss stays finite.
    far = ranking_loss(torch.tensor([[1e4, 0.0]]), torch.tensor([[1.0, 1.0]]), tie=torch.tensor(0.0), ties=ties)
    assert math.isfinite(far.item())
    with pytest.raises(ShapeError, match="no prompt has two responses with different ranks"):
        ranking_loss(scores, torch.full((5, 3), math.nan), tie=never, ties=ties)


@pytest.mark.parametrize("ties", ["davidson", "rao_kupper"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_the_first_tie_gives_equal_scores_the_share_of_ties(ties, share):
    assert outcome(0.0, initial_tie(share), ties)[2] == pytest.approx(share)
