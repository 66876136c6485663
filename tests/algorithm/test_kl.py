import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm import (
    adapt_entropy_coef,
    adapt_kl_coef_schulman,
    adapt_kl_coef_ziegler,
    kl_estimate,
    kl_loss,
    sequence_kl,
)
from kedge_base.errors import ConfigError, ShapeError

SEEDS = st.integers(0, 10_000)


@given(st.floats(-6, 0), st.floats(-6, 0))
def test_estimators_of_one_token_by_hand(logprob, ref_logprob):
    p, q = math.exp(logprob), math.exp(ref_logprob)
    token, reference = (torch.tensor([x], dtype=torch.float64) for x in (logprob, ref_logprob))
    expected = {"k1": math.log(p / q), "k2": math.log(p / q) ** 2 / 2, "k3": q / p - 1 + math.log(p / q)}
    for estimator, value in expected.items():
        assert kl_estimate(token, reference, estimator=estimator).item() == pytest.approx(value, abs=1e-9)


def test_k3_is_never_negative_however_near_the_policies():
    logprobs = torch.full((1000,), -1.0)
    near = logprobs + 1e-4 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert (kl_estimate(logprobs, near, estimator="k3") >= 0).all()


# Schulman's table (spec §5.20): samples of q = N(0, 1) against p = N(mean, 1), as (bias / true, std / true).
PUBLISHED = {
    0.1: {"k1": (0, 20), "k2": (0.002, 1.42), "k3": (0, 1.42)},
    1.0: {"k1": (0, 2), "k2": (0.25, 1.73), "k3": (0, 1.7)},
}


@pytest.mark.parametrize("mean", [0.1, 1.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_bias_and_spread_reproduce_the_published_table(mean, estimator):
    # Quantiles in place of samples: a midpoint rule over the distribution of q, without sampling noise.
    q = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    p = torch.distributions.Normal(torch.tensor(mean, dtype=torch.float64), 1.0)
    count = 400_000
    x = q.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    estimate = kl_estimate(q.log_prob(x), p.log_prob(x), estimator=estimator)
    true = mean**2 / 2
    bias, std = PUBLISHED[mean][estimator]
    # The table's last digit, and a per mille for the tails that the quantiles cut off.
    assert (estimate.mean().item() - true) / true == pytest.approx(bias, abs=1e-3)
    assert estimate.std().item() / true == pytest.approx(std, abs=0.011)


def exact_gradient(estimator):
    """Expected gradient of an estimator over every token of a small distribution, and both exact KL gradients."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    p = logprobs.detach().exp()
    gradient = torch.autograd.grad((p * kl_estimate(logprobs, reference, estimator=estimator)).sum(), logits)[0]
    logprobs = torch.log_softmax(logits, -1)
    reverse = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits)[0]
    return gradient, reverse, forward


def test_as_a_loss_k1_teaches_nothing_k2_the_reverse_kl_and_k3_the_forward_kl():
    gradient, _, _ = exact_gradient("k1")
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    gradient, reverse, _ = exact_gradient("k2")
    torch.testing.assert_close(gradient, reverse)
    gradient, _, forward = exact_gradient("k3")
    torch.testing.assert_close(gradient, forward)


@given(SEEDS)
def test_the_kl_of_a_response_is_the_sum_over_its_tokens(ragged, seed):
    batch = ragged(seed)
    kl = sequence_kl(batch.logprobs, batch.ref_logprobs, batch.mask)
    for row in range(5):
        length = int(batch.mask[row].sum())
        expected = sum(batch.logprobs[row, t].item() - batch.ref_logprobs[row, t].item() for t in range(length))
        assert kl[row].item() == pytest.approx(expected, abs=1e-12)


def test_the_kl_loss_averages_over_counted_tokens():
    logprobs = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, 0.0, 0.0]])
    reference = torch.tensor([[-3.0, -2.0, math.nan], [-2.0, math.inf, math.nan]])
    mask = reference.isfinite()
    assert kl_loss(logprobs, reference, mask).item() == pytest.approx((2.0 + 0.0 + 0.5) / 3)
    assert kl_loss(logprobs, reference, mask, aggregation="sequence").item() == pytest.approx((1.0 + 0.5) / 2)
    k3 = [math.exp(-2) - 1 + 2, 0.0, math.exp(-1) - 1 + 1]
    assert kl_loss(logprobs, reference, mask, estimator="k3").item() == pytest.approx(sum(k3) / 3)


def test_equal_policies_have_no_kl(ragged):
    batch = ragged(3)
    assert sequence_kl(batch.logprobs, batch.logprobs, batch.mask).tolist() == [0.0] * 5
    assert kl_loss(batch.logprobs, batch.logprobs, batch.mask).item() == 0.0


def test_zieglers_controller_reproduces_the_published_factor():
    assert adapt_kl_coef_ziegler(1.0, 12.0, kl_target=6.0, num_episodes=512, horizon=10_000) == pytest.approx(
        1.01024, abs=1e-12
    )
    # Within a fifth of the target the error is not clipped: 6.6/6 − 1 = 0.1.
    assert adapt_kl_coef_ziegler(0.5, 6.6, kl_target=6.0, num_episodes=100, horizon=1000) == pytest.approx(0.505)
    assert adapt_kl_coef_ziegler(0.5, 0.0, kl_target=6.0, num_episodes=500, horizon=1000) == pytest.approx(0.45)
    assert adapt_kl_coef_ziegler(0.15, 6.0, kl_target=6.0, num_episodes=512, horizon=10_000) == 0.15


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0, 0.5), (0.0066, 0.5), (0.0067, 1.0), (0.01, 1.0), (0.0149, 1.0), (0.0151, 2.0), (9.0, 2.0)]
)
def test_schulmans_controller_halves_and_doubles_outside_a_factor_of_one_and_a_half(kl, factor):
    assert adapt_kl_coef_schulman(3.0, kl, kl_target=0.01) == 3.0 * factor


def test_the_entropy_bonus_rises_below_its_target_and_vanishes_above():
    assert adapt_entropy_coef(0.0, 1.5, entropy_target=2.0, step_size=0.01) == pytest.approx(0.005)
    assert adapt_entropy_coef(0.004, 3.0, entropy_target=2.0, step_size=0.01) == 0.0
    assert adapt_entropy_coef(0.09, 0.0, entropy_target=5.0, step_size=0.01, max_coef=0.1) == 0.1
    assert adapt_entropy_coef(0.05, 2.0, entropy_target=2.0) == 0.05


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def test_a_broken_kl_moves_no_coefficient(self):
        with pytest.raises(ConfigError, match="kl must be a finite number, got nan"):
            adapt_kl_coef_ziegler(0.1, math.nan, kl_target=6.0, num_episodes=8, horizon=10_000)
        with pytest.raises(ConfigError, match="finite"):
            adapt_kl_coef_schulman(0.1, math.inf, kl_target=6.0)
        with pytest.raises(ConfigError, match="finite"):
            adapt_entropy_coef(0.1, math.nan, entropy_target=1.0)

    def test_a_target_is_above_zero(self):
        with pytest.raises(ConfigError, match="kl_target must be above 0"):
            adapt_kl_coef_ziegler(0.1, 1.0, kl_target=0.0, num_episodes=8, horizon=10_000)

    def test_k1_is_no_loss(self):
        one = torch.zeros(1, 1)
        with pytest.raises(ConfigError, match="k2 or k3"):
            kl_loss(one, one, one == 0, estimator="k1")

    def test_the_estimator_must_be_known(self):
        with pytest.raises(ConfigError, match="k1, k2, k3, got 'k4'"):
            kl_estimate(torch.zeros(2), torch.zeros(2), estimator="k4")

    def test_shapes_must_agree(self):
        with pytest.raises(ShapeError, match="shapes must be equal"):
            kl_estimate(torch.zeros(2), torch.zeros(3))


def test_zieglers_controller_never_turns_the_sign_of_the_coefficient():
    """An update of more responses than the horizon counts as the horizon: by hand, 0.05 · (1 − 0.2)."""
    settings = {"kl_target": 6.0, "horizon": 10}
    assert adapt_kl_coef_ziegler(0.05, 0.0, num_episodes=1000, **settings) == pytest.approx(0.04)
    assert adapt_kl_coef_ziegler(0.05, 60.0, num_episodes=1000, **settings) == pytest.approx(0.06)
