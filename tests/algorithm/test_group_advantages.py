"""Group baselines against loops over the responses, written from the papers."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.algorithm import (
    BaselineAdvantage,
    GroupMeanAdvantage,
    LeaveOneOutAdvantage,
    OptimalBaselineAdvantage,
    ProcessAdvantage,
    RewardToGo,
    decayed_mean,
)
from kedge_base.errors import ShapeError

SEEDS = st.integers(0, 10_000)
GROUP = torch.tensor([4, 1, 4, 4, 1])
ESTIMATORS = {
    "rloo": LeaveOneOutAdvantage(),
    "grpo": GroupMeanAdvantage(scale_by_std=True),
    "dr_grpo": GroupMeanAdvantage(),
    "opo": OptimalBaselineAdvantage(),
}


def by_paper(name, own, scores, lengths):
    """One response's advantage, from the scores and lengths of its group."""
    others = [each for index, each in enumerate(scores) if index != own]
    if name == "rloo":
        return scores[own] - sum(others) / len(others)
    if name == "opo":
        return scores[own] - sum(n * s for n, s in zip(lengths, scores, strict=True)) / sum(lengths)
    centered = scores[own] - statistics.mean(scores)
    return centered / statistics.stdev(scores) if name == "grpo" else centered


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=12)
@given(SEEDS)
def test_each_estimator_agrees_with_a_loop_over_the_group(ragged, name, seed):
    batch = ragged(seed)
    found = ESTIMATORS[name](batch.rewards, batch.mask, group=GROUP)
    for number in GROUP.unique():
        rows = (number == GROUP).nonzero().flatten().tolist()
        scores, lengths = (
            [float(batch.rewards[row].sum()) for row in rows],
            [int(batch.mask[row].sum()) for row in rows],
        )
        for own, row in enumerate(rows):
            expected = torch.where(batch.mask[row], by_paper(name, own, scores, lengths), 0.0).to(torch.float64)
            torch.testing.assert_close(found.advantages[row], expected)
    torch.testing.assert_close(found.returns, RewardToGo(1.0)(batch.rewards, batch.mask).returns)


@settings(max_examples=12)
@given(SEEDS)
def test_leave_one_out_is_the_group_mean_times_g_over_g_minus_one(ragged, seed):
    batch = ragged(seed)
    out, mean = (ESTIMATORS[name](batch.rewards, batch.mask, group=GROUP).advantages for name in ("rloo", "dr_grpo"))
    sizes = (GROUP[:, None] == GROUP).sum(-1, keepdim=True)
    torch.testing.assert_close(out, mean * sizes / (sizes - 1))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_without_spread_has_exactly_no_advantage(name):
    """With an epsilon of 1e-9 in the divisor, eight float32 scores of 0.7 have advantages of 0.92."""
    mask = torch.arange(6) < torch.arange(1, 9)[:, None].clamp(max=6)
    rewards = torch.zeros(8, 6).scatter(1, mask.sum(-1, keepdim=True) - 1, 0.7)
    rewards[3, 3] += 1e-7  # a rounding step, which GRPO would scale up to 2.5
    found = ESTIMATORS[name](rewards, mask, group=torch.zeros(8, dtype=torch.long))
    assert (found.advantages == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_response_that_lost_its_group_has_no_advantage(name):
    rewards, mask = torch.tensor([[3.0, 1.0], [5.0, 0.0], [2.0, 0.0]]), torch.ones(3, 2, dtype=torch.bool)
    found = ESTIMATORS[name](rewards, mask, group=torch.tensor([7, 2, 2])).advantages
    assert found[0].tolist() == [0, 0]
    assert found[1, 0] == -found[2, 0] > 0


def test_scores_that_hardly_differ_are_scaled_without_overflow():
    rewards, mask = torch.tensor([[1e-30], [3e-30]]), torch.ones(2, 1, dtype=torch.bool)
    found = ESTIMATORS["grpo"](rewards, mask, group=torch.zeros(2, dtype=torch.long)).advantages
    assert found.flatten().tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@settings(max_examples=12)
@given(SEEDS)
def test_remax_subtracts_the_score_of_the_greedy_response(ragged, seed):
    batch = ragged(seed)
    found = BaselineAdvantage()(batch.rewards, batch.mask, baseline=batch.scores)
    for row, mask in enumerate(batch.mask):
        expected = float(batch.rewards[row].sum() - batch.scores[row])
        assert found.advantages[row][mask].tolist() == pytest.approx([expected] * int(mask.sum()))
        assert (found.advantages[row][~mask] == 0).all()


@settings(max_examples=12)
@given(SEEDS)
def test_a_decayed_mean_is_that_of_spos_beta_distribution(seed):
    """SPO, in its authors' recipe: α ← ρα + r, β ← ρβ + (1 − r), v = α / (α + β); it begins with 1/(1 − ρ) scores."""
    draw, decay = random.Random(seed), 0.9
    alpha, beta = 4.0, 6.0
    count, mean = alpha + beta, 0.4
    for _ in range(20):
        score = float(draw.random() < 0.7)
        alpha, beta = decay * alpha + score, decay * beta + 1 - score
        count, mean = decayed_mean(count, mean, [score], decay=decay)
        assert (count, mean) == pytest.approx((10.0, alpha / (alpha + beta)))
    several = decayed_mean(2.0, 0.5, [1.0, 4.0], decay=0.5)
    assert several == pytest.approx((3.0, (0.5 + 1.0 + 4.0) / 3))


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo"])
@settings(max_examples=12)
@given(SEEDS)
def test_process_rewards_are_normalized_first_and_summed_afterwards(ragged, name, seed):
    """GRPO §4.1.3, and PRIME's mean over the other responses of each one's mean, with every token as a step."""
    batch = ragged(seed)
    found = ProcessAdvantage(leave_one_out=name == "rloo", scale_by_std=name == "grpo")(
        batch.rewards, batch.mask, group=GROUP
    ).advantages
    for row, mask in enumerate(batch.mask):
        own = batch.rewards[row][mask].tolist()
        peers = [other for other in range(5) if GROUP[other] == GROUP[row] and (other != row or name != "rloo")]
        steps = [batch.rewards[other][batch.mask[other]].tolist() for other in peers]
        every = [step for response in steps for step in response]
        mean = statistics.mean(map(statistics.mean, steps) if name == "rloo" else every)
        scale = statistics.stdev(every) if name == "grpo" else 1.0
        expected = [sum((step - mean) / scale for step in own[t:]) for t in range(len(own))]
        assert found[row][mask].tolist() == pytest.approx(expected)


def test_a_reward_for_a_token_credits_no_later_token():
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    found = ProcessAdvantage()(rewards, mask, group=torch.tensor([0, 0])).advantages
    assert found[0].tolist() == pytest.approx([1 - 4 / 8, 1 - 3 / 8, -2 / 8, -1 / 8])


@pytest.mark.parametrize("settings", [{}, {"scale_by_std": True}, {"leave_one_out": True}])
def test_a_response_without_others_is_not_compared_with_itself(settings):
    rewards, mask = torch.tensor([[1.0, 5.0, 0.0], [2.0, 0.0, 0.0]]), torch.ones(2, 3, dtype=torch.bool)
    found = ProcessAdvantage(**settings)(rewards, mask, group=torch.tensor([0, 1]))
    assert (found.advantages == 0).all()
    assert found.returns.tolist() == [[6.0, 5.0, 0.0], [2.0, 0.0, 0.0]]


def test_a_kl_in_the_reward_is_all_that_differs_between_equal_scores_and_grpo_scales_it_up():
    """What docs/family.md says about a KL in the reward: it is compared, however small it is."""
    rewards, mask = torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.bool)
    rewards[:, 2] = 1.0
    rewards[:, 0] = torch.tensor([-1e-4, 1e-4, -1e-4, 1e-4])
    group = torch.zeros(4, dtype=torch.long)
    small = GroupMeanAdvantage()(rewards, mask, group=group).advantages
    large = GroupMeanAdvantage(scale_by_std=True)(rewards, mask, group=group).advantages
    assert small.abs().max() < 2e-4
    assert large.abs().min() > 0.8


def test_the_slot_after_the_last_token_weighs_nothing_in_opos_baseline():
    # One token and three, each with the slot of its score: the baseline of the scores 1 and 0 is 1/4, not 2/6.
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    tokens = torch.tensor([[True, False, False, False], [True, True, True, False]])
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = OptimalBaselineAdvantage()(rewards, mask, group=torch.tensor([3, 3]), actions=tokens).advantages
    assert found[0, :1].tolist() == [0.75]
    assert found[1, :3].tolist() == [-0.25] * 3


def test_missing_groups_and_baselines_are_named():
    rewards, mask = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)
    for estimator in ESTIMATORS.values():
        with pytest.raises(ShapeError, match="needs group"):
            estimator(rewards, mask)
    with pytest.raises(ShapeError, match="needs baseline"):
        BaselineAdvantage()(rewards, mask)
