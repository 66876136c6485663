"""The histogram's loss and value against loops written from Farebrother et al. (2403.03950), appendix A."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm.critic import Bins, histogram_value_loss
from kedge_base.errors import ConfigError, ShapeError

SEEDS = st.integers(0, 10_000)
BINS = Bins(-2.0, 3.0, 8)


def slow_target(bins, target):
    """The mass of a Gaussian with σ = 0.75 bin widths in each bin, after the target is moved into the support."""
    width = (bins.high - bins.low) / bins.num_bins
    target = min(max(target, bins.low), bins.high)

    def below(edge):
        return 0.5 * (1 + math.erf((edge - target) / (0.75 * width * math.sqrt(2))))

    inside = below(bins.high) - below(bins.low)
    return [(below(bins.low + (i + 1) * width) - below(bins.low + i * width)) / inside for i in range(bins.num_bins)]


def drawn_logits(seed, shape):
    return torch.randn(*shape, BINS.num_bins, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SEEDS)
def test_the_loss_and_its_gradient_agree_with_a_loop(ragged, soil, seed):
    batch = ragged(seed)
    garbage = torch.full((BINS.num_bins,), torch.nan, dtype=torch.float64)
    logits = torch.where(batch.mask[..., None], drawn_logits(seed, batch.mask.shape), garbage).requires_grad_()
    loss, outside = 0.0, 0
    gradient = torch.zeros_like(logits)
    count = int(batch.mask.sum())
    for row, time in batch.mask.nonzero().tolist():
        target = batch.returns[row, time].item()
        outside += not -2.0 <= target <= 3.0
        scores = logits[row, time].tolist()
        total = sum(math.exp(each) for each in scores)
        for i, (score, wanted) in enumerate(zip(scores, slow_target(BINS, target), strict=True)):
            loss -= wanted * (score - math.log(total)) / count
            gradient[row, time, i] = (math.exp(score) / total - wanted) / count
    found = histogram_value_loss(logits, soil(batch.returns, batch.mask, math.nan), batch.mask, bins=BINS)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(loss, abs=1e-10)
    assert found.outside.item() == pytest.approx(outside / count)
    torch.testing.assert_close(logits.grad, gradient)


def test_by_hand():
    # A return on an edge between bins, far from the ends: Φ(1/0.75) − ½ = 0.4088, then 0.0874 and 0.0038 on each side.
    half = [0.4088, 0.0874, 0.0038]
    target = Bins(-3.0, 3.0, 6).target(torch.zeros(1))[0]
    assert target.tolist() == pytest.approx([*reversed(half), *half], abs=5e-5)
    # At the lower end, the cut leaves the upper half: an expectation 0.69 bin widths too high. From a loop over the
    # bins, to three digits.
    bins = Bins(0.0, 40.0, 40)
    at_the_end, one_bin_in, two_bins_in = bins.target(torch.tensor([0.0, 1.0, 2.0])) @ bins.centers(torch.zeros(1))
    found = (at_the_end.item(), one_bin_in.item(), two_bins_in.item())
    assert found == pytest.approx((0.690, 1.155, 2.010), abs=5e-4)


@given(st.floats(-1.5, 2.5), st.integers(24, 200))
def test_inside_the_support_a_targets_expectation_is_the_return_whatever_the_bins(target, num_bins):
    bins = Bins(-2.0, 3.0, num_bins)
    logits = bins.target(torch.tensor([target], dtype=torch.float64)).clamp(min=1e-300).log()
    # 1/100 bin: the bins are evenly spaced, so what their number changes is e^(−2π²·0.75²) of a width.
    assert bins.expectation(logits).item() == pytest.approx(target, abs=0.01 * bins.width)


def test_a_uniform_histogram_has_the_center_of_the_support_as_its_value():
    assert BINS.expectation(torch.zeros(3, 8)).tolist() == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(ragged, aggregation):
    batch = ragged(4, batch=6)
    whole, split = (drawn_logits(1, batch.mask.shape).requires_grad_() for _ in range(2))
    settings = {"bins": BINS, "aggregation": aggregation}
    histogram_value_loss(whole, batch.returns, batch.mask, **settings).loss.backward()
    normalizer = batch.mask.sum() if aggregation == "token" else 6
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = (split[rows], batch.returns[rows], batch.mask[rows])
        histogram_value_loss(*part, normalizer=normalizer, **settings).loss.backward()
    torch.testing.assert_close(split.grad, whole.grad)


@pytest.mark.usefixtures("unchecked")
def test_invalid_bins_and_shapes():
    for low, high, num_bins in [(1.0, 1.0, 5), (2.0, 1.0, 5), (0.0, 1.0, 1), (0.0, math.nan, 5)]:
        with pytest.raises(ConfigError, match="need low < high and 2 bins"):
            Bins(low, high, num_bins)
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match="returns"):
        histogram_value_loss(torch.zeros(1, 2, 8), torch.zeros(1, 3), mask, bins=BINS)
    with pytest.raises(ShapeError, match="counts nothing"):
        histogram_value_loss(torch.zeros(1, 2, 8), torch.zeros(1, 2), ~mask, bins=BINS)
