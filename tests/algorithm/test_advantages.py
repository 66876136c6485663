import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm import generalized_advantages, masked_whiten, policy_gradient_weights
from kedge.errors import ConfigError, ShapeError

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
    advantages = generalized_advantages(rewards, values, mask).advantages
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
    found = generalized_advantages(rewards, values, mask, gae_lambda=1.0)
    assert found.returns.tolist() == [[1000.0, 1000.0], [-500.0, -500.0]]
    listing = masked_whiten(found.advantages, mask) + values
    assert listing.abs().max() < 2


def test_advantages_are_constants(ragged):
    batch = ragged(0)
    found = generalized_advantages(batch.rewards, batch.values.requires_grad_(), batch.mask)
    assert not found.advantages.requires_grad
    assert not found.returns.requires_grad


def weights_by_definition(kind, rewards, values, gamma, lam, num_steps):
    length = len(rewards)
    to_go = [sum(gamma ** (k - t) * rewards[k] for k in range(t, length)) for t in range(length)]
    following = lambda t: values[t] if t < length else 0.0  # noqa: E731
    definition = {
        "total": lambda t: to_go[0],
        "to_go": lambda t: to_go[t],
        "baseline": lambda t: to_go[t] - values[t],
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


@pytest.mark.parametrize("kind", ["total", "to_go", "baseline", "monte_carlo", "td", "n_step", "advantage"])
@given(seed=SEEDS, gamma=UNIT, lam=UNIT, num_steps=st.integers(1, 9))
def test_policy_gradient_weights_agree_with_their_definitions(ragged, kind, seed, gamma, lam, num_steps):
    batch = ragged(seed)
    weights = policy_gradient_weights(
        batch.rewards, batch.values, batch.mask, kind=kind, gamma=gamma, gae_lambda=lam, num_steps=num_steps
    )
    for index, (rewards, values) in rows(batch, batch.rewards, batch.values):
        close(weights, index, batch.mask, weights_by_definition(kind, rewards, values, gamma, lam, num_steps))


@pytest.mark.parametrize("kind", ["total", "to_go", "baseline", "monte_carlo", "td", "n_step", "advantage"])
def test_weights_pass_over_masked_spans(kind):
    rewards = torch.tensor([[7.0, 1.0, 7.0, 2.0, 3.0]], dtype=torch.float64)
    values = torch.tensor([[9.0, 0.5, 9.0, 1.5, 2.5]], dtype=torch.float64)
    mask = torch.tensor([[False, True, False, True, True]])
    weights = policy_gradient_weights(rewards, values, mask, kind=kind, gamma=0.9, gae_lambda=0.8, num_steps=2)
    expected = weights_by_definition(kind, [1.0, 2.0, 3.0], [0.5, 1.5, 2.5], 0.9, 0.8, 2)
    close(weights, 0, mask, expected)


def test_the_adjusted_reward_of_a_response_less_the_value_at_each_token():
    # S1: advantage_t = adjusted_reward − value_t, with its example's values 4.2, 4.5, 4.8 and reward 6.
    rewards, values = torch.tensor([[0.0, 0.0, 6.0]]), torch.tensor([[4.2, 4.5, 4.8]])
    weights = policy_gradient_weights(rewards, values, torch.ones(1, 3, dtype=torch.bool), kind="monte_carlo")
    assert weights[0].tolist() == pytest.approx([1.8, 1.5, 1.2])


def test_a_baseline_may_be_given():
    rewards, mask = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[True, True, False]])
    per_token = torch.tensor([[0.5, 0.25, 9.0]])
    weights = policy_gradient_weights(rewards, None, mask, kind="baseline", baseline=per_token)
    assert weights.tolist() == [[2.5, 1.75, 0.0]]
    assert policy_gradient_weights(rewards, None, mask, kind="baseline", baseline=2.0).tolist() == [[1.0, 0.0, 0.0]]


def test_the_total_of_a_truncated_episode_includes_what_the_critic_expects_after_it():
    rewards, mask = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[True, True, False]])
    weights = policy_gradient_weights(
        rewards, None, mask, kind="total", gamma=0.5, bootstrap_values=torch.tensor([8.0])
    )
    assert weights.tolist() == [[1 + 0.5 * 2 + 0.25 * 8] * 2 + [0.0]]


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    ONE = torch.ones(2, 3)
    MASK = ONE > 0

    def test_shapes_must_agree(self):
        with pytest.raises(ShapeError, match=r"values \(2, 2\)"):
            generalized_advantages(self.ONE, self.ONE[:, :2], self.MASK)
        with pytest.raises(ShapeError, match=r"bootstrap_values \(3,\)"):
            generalized_advantages(self.ONE, self.ONE, self.MASK, bootstrap_values=self.ONE[0])
        with pytest.raises(ShapeError, match=r"baseline \(2,\)"):
            policy_gradient_weights(self.ONE, self.ONE, self.MASK, kind="baseline", baseline=self.ONE[:, 0])

    def test_something_must_count(self):
        with pytest.raises(ShapeError, match="counts nothing"):
            generalized_advantages(self.ONE, self.ONE, ~self.MASK)

    @pytest.mark.parametrize("kind", ["baseline", "advantage", "td", "n_step", "monte_carlo"])
    def test_some_kinds_need_values(self, kind):
        with pytest.raises(ShapeError, match="need values"):
            policy_gradient_weights(self.ONE, None, self.MASK, kind=kind)

    def test_the_kind_must_be_known_and_steps_are_positive(self):
        with pytest.raises(ConfigError, match="kind must be one of total"):
            policy_gradient_weights(self.ONE, self.ONE, self.MASK, kind="gae")
        with pytest.raises(ConfigError, match="num_steps must be above 0"):
            policy_gradient_weights(self.ONE, self.ONE, self.MASK, kind="n_step", num_steps=0)
