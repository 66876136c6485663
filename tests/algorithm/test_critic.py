from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge import algorithm
from kedge.algorithm import explained_variance
from kedge_base.errors import ConfigError, ShapeError

SEEDS = st.integers(0, 10_000)
clipped_value_loss = partial(algorithm.clipped_value_loss, clip_range=0.2)
ONE = torch.ones(1, 1)
MASK = ONE > 0


@given(SEEDS, st.one_of(st.none(), st.floats(0.05, 2.0)))
def test_the_value_loss_agrees_with_a_loop(ragged, seed, clip_range):
    batch = ragged(seed)
    errors, held = [], 0
    for i, t in batch.mask.nonzero().tolist():
        value, old, target = (x[i, t].item() for x in (batch.values, batch.old_values, batch.returns))
        error = (value - target) ** 2 / 2
        if clip_range is not None and abs(value - old) > clip_range:
            stopped = old + clip_range if value > old else old - clip_range
            bounded = (stopped - target) ** 2 / 2
            held += bounded > error
            error = max(error, bounded)
        errors.append(error)
    loss, clip_fraction = clipped_value_loss(
        batch.values, batch.old_values, batch.returns, batch.mask, clip_range=clip_range
    )
    assert loss.item() == pytest.approx(sum(errors) / len(errors), abs=1e-10)
    assert clip_fraction.item() == pytest.approx(held / len(errors))


def test_by_hand():
    # V = 2, V_old = 1, R = 5, ε = 0.2: errors 9 and (1.2 − 5)² = 14.44, halved.
    clipped = clipped_value_loss(2 * ONE, ONE, 5 * ONE, MASK)
    assert clipped.loss.item() == pytest.approx(7.22)
    assert clipped.clip_fraction == 1
    plain = clipped_value_loss(2 * ONE, ONE, 5 * ONE, MASK, clip_range=None)
    assert plain.loss.item() == 4.5
    assert plain.clip_fraction == 0


def test_a_value_beyond_the_range_gets_no_further_push_but_is_pulled_back():
    def gradient(value, target):
        values = torch.tensor([[value]], requires_grad=True)
        clipped_value_loss(values, 0 * ONE, target * ONE, MASK).loss.backward()
        assert values.grad is not None
        return values.grad.item()

    assert gradient(0.5, 5.0) == 0.0
    assert gradient(0.5, -5.0) == pytest.approx(5.5)
    assert gradient(0.1, 5.0) == pytest.approx(-4.9)


def test_unmoved_values_are_not_clipped_by_rounding():
    values = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(values, dtype=torch.bool)
    assert clipped_value_loss(values, values, values.flip(0), mask).clip_fraction == 0
    assert clipped_value_loss(values + 0.1, values, values.flip(0), mask).clip_fraction == 0


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(ragged, aggregation):
    batch = ragged(4, batch=6)
    whole, split = (batch.values.clone().requires_grad_() for _ in range(2))
    clipped_value_loss(whole, batch.old_values, batch.returns, batch.mask, aggregation=aggregation).loss.backward()
    normalizer = batch.mask.sum() if aggregation == "token" else 6
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        clipped_value_loss(
            split[rows],
            batch.old_values[rows],
            batch.returns[rows],
            batch.mask[rows],
            aggregation=aggregation,
            normalizer=normalizer,
        ).loss.backward()
    torch.testing.assert_close(split.grad, whole.grad)


@given(SEEDS)
def test_explained_variance_agrees_with_numpy(ragged, seed):
    batch = ragged(seed)
    values, returns = (x[batch.mask].numpy() for x in (batch.values, batch.returns))
    expected = 1 - np.var(returns - values) / np.var(returns)
    found = explained_variance(batch.values, batch.returns, batch.mask)
    assert found.item() == pytest.approx(expected)


def test_explained_variance_of_a_perfect_a_shifted_and_a_constant_critic(ragged):
    batch = ragged(9)
    assert explained_variance(batch.returns, batch.returns, batch.mask) == 1
    assert explained_variance(batch.returns + 3, batch.returns, batch.mask).item() == pytest.approx(1)
    assert explained_variance(torch.full_like(batch.returns, 2.0), batch.returns, batch.mask).item() == pytest.approx(0)
    assert explained_variance(batch.values, torch.ones_like(batch.values), batch.mask) == 0


def test_returns_that_differ_by_rounding_only_are_constant() -> None:
    values = torch.linspace(-0.9, 0.9, 24).view(4, 6)
    returns = (1.0 - values) + values  # an advantage of exactly 1 − V, added to V again
    mask = torch.ones_like(values, dtype=torch.bool)
    assert returns.var() > 0, "the case needs rounding"
    assert explained_variance(values, returns, mask) == 0
    assert explained_variance(values, returns + 1e-4 * values, mask) != 0


def test_explained_variance_of_a_batch_without_a_reward_is_0():
    """Returns A + V that are 0 up to the rounding of V: the ratio of variances was −1e15."""
    generator = torch.Generator().manual_seed(0)
    values = 0.03 * torch.randn(64, 9, generator=generator)
    returns = (0.1 - values) + values - 0.1
    assert returns.std() > 0
    assert explained_variance(values, returns, torch.ones_like(values, dtype=torch.bool)) == 0


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def test_shapes_must_agree_and_something_must_count(self):
        with pytest.raises(ShapeError, match=r"returns \(1,\)"):
            clipped_value_loss(ONE, ONE, ONE[0], MASK)
        for function in (
            lambda: clipped_value_loss(ONE, ONE, ONE, ~MASK),
            lambda: explained_variance(ONE, ONE, ~MASK),
        ):
            with pytest.raises(ShapeError, match="counts nothing"):
                function()

    @pytest.mark.parametrize("clip_range", [0.0, -0.2, float("nan")])
    def test_the_range_is_above_zero(self, clip_range):
        with pytest.raises(ConfigError, match="value_clip_range must be"):
            clipped_value_loss(ONE, ONE, ONE, MASK, clip_range=clip_range)
