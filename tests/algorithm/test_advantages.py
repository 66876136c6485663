from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm import (
    Advantages,
    GeneralizedAdvantage,
    LengthAdaptiveLambda,
    NStepAdvantage,
    RewardToGo,
    TotalReward,
    generalized_advantages,
    masked_whiten,
)
from kedge_base.errors import ConfigError, ShapeError

SEEDS = st.integers(0, 10_000)
UNIT = st.floats(0.0, 1.0)


def residuals(rewards, values, gamma, bootstrap):
    """δ_t of one unpadded episode."""
    following = [*values[1:], bootstrap]
    return [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]


def advantages_by_definition(rewards, values, gamma, lam, bootstrap=0.0):
    """A_t = Σ_l (γλ)ˡ δ_{t+l}: the O(T²) sum of GAE eq. 16 over one unpadded episode."""
    delta = residuals(rewards, values, gamma, bootstrap)
    return [sum((gamma * lam) ** l * delta[t + l] for l in range(len(delta) - t)) for t in range(len(delta))]


def rows(batch, *tensors):
    """The unpadded rows of the tensors as lists."""
    for index, mask in enumerate(batch.mask):
        yield index, [tensor[index][mask].tolist() for tensor in tensors]


def close(padded, index, mask, expected):
    np.testing.assert_allclose(padded[index][mask[index]].numpy(), expected, atol=1e-10)
    assert (padded[index][~mask[index]] == 0).all()


@given(SEEDS, UNIT, UNIT, st.booleans())
def test_advantages_agree_with_the_sum_of_the_paper(ragged, seed, gamma, lam, truncated):
    batch = ragged(seed)
    bootstrap = batch.scores if truncated else None
    found = generalized_advantages(
        batch.rewards, batch.values, batch.mask, gamma=gamma, gae_lambda=lam, bootstrap_values=bootstrap
    )
    for index, (rewards, values) in rows(batch, batch.rewards, batch.values):
        last = batch.scores[index].item() if truncated else 0.0
        expected = advantages_by_definition(rewards, values, gamma, lam, last)
        close(found.advantages, index, batch.mask, expected)
        close(found.returns, index, batch.mask, np.add(expected, values))


def test_a_hand_computed_episode():
    # δ = (0 + 0.9·2 − 1, 0 + 0.9·3 − 2, 10 − 3) = (0.8, 0.7, 7), γλ = 0.45.
    found = generalized_advantages(
        torch.tensor([[0.0, 0.0, 10.0]]),
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.ones(1, 3, dtype=torch.bool),
        gamma=0.9,
        gae_lambda=0.5,
    )
    assert found.advantages[0].tolist() == pytest.approx([0.8 + 0.45 * (0.7 + 0.45 * 7), 0.7 + 0.45 * 7, 7.0])
    assert found.returns[0].tolist() == pytest.approx([0.8 + 0.45 * 3.85 + 1, 3.85 + 2, 10.0])


def test_with_an_outcome_reward_the_last_advantage_is_reward_minus_value():
    rewards = torch.tensor([[0.0, 0.0, 6.0, 0.0]])
    values = torch.tensor([[4.2, 4.5, 4.8, 9.9]])
    mask = torch.tensor([[True, True, True, False]])
    advantages = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=0.95).advantages
    assert advantages[0, 2].item() == pytest.approx(6.0 - 4.8)
    assert advantages[0, 3].item() == 0.0


@given(SEEDS, UNIT)
def test_the_two_ends_of_lambda(ragged, seed, gamma):
    batch = ragged(seed)
    td = generalized_advantages(batch.rewards, batch.values, batch.mask, gamma=gamma, gae_lambda=0.0)
    monte_carlo = generalized_advantages(batch.rewards, batch.values, batch.mask, gamma=gamma, gae_lambda=1.0)
    for index, (rewards, values) in rows(batch, batch.rewards, batch.values):
        close(td.advantages, index, batch.mask, residuals(rewards, values, gamma, 0.0))
        to_go = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
        close(monte_carlo.advantages, index, batch.mask, np.subtract(to_go, values))
        close(monte_carlo.returns, index, batch.mask, to_go)


@given(SEEDS, UNIT, UNIT)
def test_a_masked_span_inside_an_episode_is_passed_over(seed, gamma, lam):
    draw = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 1, 8, generator=draw, dtype=torch.float64)
    mask = torch.rand(1, 8, generator=draw) < 0.6
    mask[0, 2] = True
    found = generalized_advantages(rewards, values, mask, gamma=gamma, gae_lambda=lam)
    expected = advantages_by_definition(rewards[mask].tolist(), values[mask].tolist(), gamma, lam)
    close(found.advantages, 0, mask, expected)


def test_returns_keep_the_rewards_scale_where_the_well_known_listing_loses_it():
    """The listing of seed S0 whitens first and adds the *whitened* advantages to the values.

    Its critic would then be taught targets of unit spread around the old values, whatever the rewards are.
    """
    rewards = torch.tensor([[0.0, 1000.0], [0.0, -500.0]])
    values, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    found = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    assert found.returns.tolist() == [[1000.0, 1000.0], [-500.0, -500.0]]
    listing = masked_whiten(found.advantages, mask) + values
    assert listing.abs().max() < 2


def test_advantages_are_constants(ragged):
    batch = ragged(0)
    found = generalized_advantages(batch.rewards, batch.values.requires_grad_(), batch.mask, gamma=1.0, gae_lambda=0.95)
    assert not found.advantages.requires_grad
    assert not found.returns.requires_grad


def weights_by_definition(kind, rewards, values, gamma, lam, num_steps):
    length = len(rewards)
    to_go = [sum(gamma ** (k - t) * rewards[k] for k in range(t, length)) for t in range(length)]
    following = lambda t: values[t] if t < length else 0.0  # noqa: E731
    definition = {
        "total": lambda t: to_go[0],
        "to_go": lambda t: to_go[t],
        "monte_carlo": lambda t: to_go[t] - values[t],
        "td": lambda t: rewards[t] + gamma * following(t + 1) - values[t],
        "n_step": lambda t: (
            sum(gamma**l * rewards[t + l] for l in range(min(num_steps, length - t)))
            + gamma**num_steps * following(t + num_steps)
            - values[t]
        ),
        "advantage": lambda t: advantages_by_definition(rewards, values, gamma, lam)[t],
    }[kind]
    return [definition(t) for t in range(length)]


KINDS = ["total", "to_go", "monte_carlo", "td", "n_step", "advantage"]


def estimate(kind, rewards, values, mask, *, gamma=1.0, lam=0.95, num_steps=1) -> Advantages:
    estimates = {
        "total": TotalReward(gamma),
        "to_go": RewardToGo(gamma),
        "monte_carlo": GeneralizedAdvantage(gamma, 1.0),
        "td": GeneralizedAdvantage(gamma, 0.0),
        "n_step": NStepAdvantage(gamma, num_steps),
        "advantage": GeneralizedAdvantage(gamma, lam),
    }
    return estimates[kind](rewards, mask, values=values)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, gamma=UNIT, lam=UNIT, num_steps=st.integers(1, 9))
def test_advantages_agree_with_their_definitions(ragged, kind, seed, gamma, lam, num_steps):
    batch = ragged(seed)
    found = estimate(kind, batch.rewards, batch.values, batch.mask, gamma=gamma, lam=lam, num_steps=num_steps)
    for index, (rewards, values) in rows(batch, batch.rewards, batch.values):
        expected = weights_by_definition(kind, rewards, values, gamma, lam, num_steps)
        close(found.advantages, index, batch.mask, expected)
        without_baseline = weights_by_definition("to_go", rewards, values, gamma, lam, num_steps)
        returns = without_baseline if kind in ("total", "to_go") else np.add(expected, values)
        close(found.returns, index, batch.mask, returns)


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_pass_over_masked_spans(kind):
    rewards = torch.tensor([[7.0, 1.0, 7.0, 2.0, 3.0]], dtype=torch.float64)
    values = torch.tensor([[9.0, 0.5, 9.0, 1.5, 2.5]], dtype=torch.float64)
    mask = torch.tensor([[False, True, False, True, True]])
    found = estimate(kind, rewards, values, mask, gamma=0.9, lam=0.8, num_steps=2)
    expected = weights_by_definition(kind, [1.0, 2.0, 3.0], [0.5, 1.5, 2.5], 0.9, 0.8, 2)
    close(found.advantages, 0, mask, expected)


def test_the_adjusted_reward_of_a_response_less_the_value_at_each_token():
    # S1: advantage_t = adjusted_reward − value_t, with its example's values 4.2, 4.5, 4.8 and reward 6.
    rewards, values = torch.tensor([[0.0, 0.0, 6.0]]), torch.tensor([[4.2, 4.5, 4.8]])
    found = GeneralizedAdvantage(gamma=1.0, gae_lambda=1.0)(rewards, rewards >= 0, values=values)
    assert found.advantages[0].tolist() == pytest.approx([1.8, 1.5, 1.2])


@given(SEEDS, UNIT, st.floats(0.05, 3.0))
def test_a_lambda_per_response_follows_its_length(ragged, seed, gamma, alpha):
    batch = ragged(seed)
    found = GeneralizedAdvantage(gamma, LengthAdaptiveLambda(alpha))(batch.rewards, batch.mask, values=batch.values)
    for index, (rewards, values) in rows(batch, batch.rewards, batch.values):
        lam = min(max(1 - 1 / (alpha * len(rewards)), 0.0), 1.0)
        expected = advantages_by_definition(rewards, values, gamma, lam)
        close(found.advantages, index, batch.mask, expected)
        close(found.returns, index, batch.mask, np.add(expected, values))


def test_the_length_adaptive_lambda_by_hand():
    # α = 0.05: 1 − 20/l. 8,000 tokens: 0.9975; 100: 0.8; 25: 0.2; 20 and fewer: 0. Masked steps have no length.
    lengths = torch.tensor([8000, 100, 25, 20, 1])
    mask = torch.arange(8001) < lengths[:, None]
    assert LengthAdaptiveLambda(0.05)(mask).tolist() == pytest.approx([0.9975, 0.8, 0.2, 0.0, 0.0], abs=1e-6)
    assert LengthAdaptiveLambda(1e9)(mask[:1]).tolist() == [1.0]
    # The coefficients of GAE then sum to α·l, VAPO's condition.
    assert sum(0.8**k for k in range(1000)) == pytest.approx(0.05 * 100)


def test_the_slot_after_the_last_token_has_no_part_in_the_length():
    # Two tokens and the slot of the score, α = 1: λ = 1 − 1/2. δ = (0.2, 0.2, 0.4), so A₃ = 0.4, A₂ = 0.2 + 0.4/2.
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.6]])
    estimate, tokens = GeneralizedAdvantage(1.0, LengthAdaptiveLambda(1.0)), torch.tensor([[True, True, False]])
    found = estimate(rewards, rewards >= 0, values=values, actions=tokens)
    assert found.advantages[0].tolist() == pytest.approx([0.4, 0.4, 0.4])


@pytest.mark.parametrize("kind", ["monte_carlo", "td", "n_step", "advantage"])
@given(seed=SEEDS, gamma=UNIT, value_lam=UNIT)
def test_the_critics_targets_have_a_lambda_of_their_own(ragged, kind, seed, gamma, value_lam):
    batch = ragged(seed)
    estimates = {
        "monte_carlo": GeneralizedAdvantage(gamma, 1.0, value_lam),
        "td": GeneralizedAdvantage(gamma, 0.0, value_lam),
        "n_step": NStepAdvantage(gamma, 3, value_lam),
        "advantage": GeneralizedAdvantage(gamma, 0.95, value_lam),
    }
    found = estimates[kind](batch.rewards, batch.mask, values=batch.values)
    for index, (rewards, values) in rows(batch, batch.rewards, batch.values):
        close(found.advantages, index, batch.mask, weights_by_definition(kind, rewards, values, gamma, 0.95, 3))
        targets = np.add(advantages_by_definition(rewards, values, gamma, value_lam), values)
        close(found.returns, index, batch.mask, targets)


def test_targets_with_lambda_one_contain_no_value_of_the_critic(ragged):
    batch = ragged(3)
    one, other = (
        GeneralizedAdvantage(0.9, 0.5, value_gae_lambda=1.0)(batch.rewards, batch.mask, values=values)
        for values in (batch.values, batch.values + 100.0 * batch.mask)
    )
    np.testing.assert_allclose(one.returns, other.returns, atol=1e-9)
    assert (one.advantages - other.advantages).abs().max() > 1


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    ONE = torch.ones(2, 3)
    MASK = ONE > 0
    GAE = staticmethod(partial(generalized_advantages, gamma=1.0, gae_lambda=0.95))

    def test_shapes_must_agree(self):
        with pytest.raises(ShapeError, match=r"values \(2, 2\)"):
            self.GAE(self.ONE, self.ONE[:, :2], self.MASK)
        with pytest.raises(ShapeError, match=r"bootstrap_values \(3,\)"):
            self.GAE(self.ONE, self.ONE, self.MASK, bootstrap_values=self.ONE[0])

    def test_something_must_count(self):
        with pytest.raises(ShapeError, match="counts nothing"):
            self.GAE(self.ONE, self.ONE, ~self.MASK)

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_estimate_says_whether_it_needs_values(self, kind):
        if kind in ("total", "to_go"):
            assert estimate(kind, self.ONE, None, self.MASK).advantages.isfinite().all()
        else:
            with pytest.raises(ShapeError, match=r"the advantage needs values, got None"):
                estimate(kind, self.ONE, None, self.MASK)

    def test_a_lambda_per_row_is_checked_too(self):
        for lams, what in (([0.5, 1.5], "largest_gae_lambda"), ([-0.1, 1.0], "smallest_gae_lambda")):
            with pytest.raises(ConfigError, match=what):
                generalized_advantages(self.ONE, self.ONE, self.MASK, gamma=1.0, gae_lambda=torch.tensor(lams))
        with pytest.raises(ShapeError, match=r"gae_lambda \(3,\)"):
            generalized_advantages(self.ONE, self.ONE, self.MASK, gamma=1.0, gae_lambda=self.ONE[0])
        with pytest.raises(ConfigError, match="length_adaptive_alpha must be above 0"):
            LengthAdaptiveLambda(0.0)(self.MASK)

    def test_steps_are_positive(self):
        with pytest.raises(ConfigError, match="num_steps must be above 0"):
            estimate("n_step", self.ONE, self.ONE, self.MASK, num_steps=0)
