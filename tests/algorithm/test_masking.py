import random

import numpy as np
import pytest
import torch
from beartype import beartype
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from kedge.algorithm import aggregate, aggregation_normalizer, masked_mean, masked_whiten
from kedge_base.errors import ConfigError, ShapeError

GRID = torch.arange(1.2, 2.05, 0.1, dtype=torch.float64).reshape(3, 3)
EVERY = torch.ones(3, 3, dtype=torch.bool)
SEEDS = st.integers(0, 10_000)


def test_the_mean_is_that_of_the_counted_entries():
    x = torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0]])
    assert masked_mean(x, x < 50).item() == 3.0


def test_in_tests_shapes_are_checked_and_the_checks_draw_nothing_from_random():
    with pytest.raises(TypeCheckError):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))

    @beartype
    def checked(entries: list[int]) -> None: ...

    before = random.getstate()
    checked([1, 2, 3])
    assert random.getstate() == before


def test_whitening_reproduces_the_published_grid():
    assert masked_whiten(GRID, EVERY, shift_mean=False)[0, 0].item() == pytest.approx(0.0508, abs=5e-5)
    assert masked_whiten(GRID, EVERY, shift_mean=False, correction=1)[0, 0].item() == pytest.approx(0.1394, abs=5e-5)
    # The same two figures with the mean of 1.6 taken off.
    assert masked_whiten(GRID, EVERY)[0, 0].item() == pytest.approx(0.0508 - 1.6, abs=5e-5)
    assert masked_whiten(GRID, EVERY, correction=1)[0, 0].item() == pytest.approx(0.1394 - 1.6, abs=5e-5)


@given(SEEDS, st.sampled_from([0, 1]))
def test_whitening_agrees_with_numpy_on_the_counted_entries_alone(ragged, seed, correction):
    batch = ragged(seed)
    counted = batch.advantages[batch.mask].numpy()
    expected = (counted - np.mean(counted)) / np.std(counted, ddof=correction)
    whitened = masked_whiten(batch.advantages, batch.mask, correction=correction)
    np.testing.assert_allclose(whitened[batch.mask].numpy(), expected, atol=1e-6)
    assert (whitened[~batch.mask] == 0).all()
    kept = masked_whiten(batch.advantages, batch.mask, correction=correction, shift_mean=False)
    np.testing.assert_allclose(kept[batch.mask].numpy(), expected + np.mean(counted), atol=1e-6)
    assert (kept[~batch.mask] == 0).all()


def test_whitening_before_masking_would_give_something_else():
    x, mask = torch.tensor([[1.0, 3.0, 0.0, 0.0]]), torch.tensor([[True, True, False, False]])
    assert masked_whiten(x, mask).tolist() == [[-1.0, 1.0, 0.0, 0.0]]


def test_constant_entries_stay_finite():
    assert masked_whiten(torch.full((2, 2), 4.0), EVERY[:2, :2]).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert masked_whiten(torch.full((2, 2), 4.0), EVERY[:2, :2], shift_mean=False).tolist() == [[4.0, 4.0], [4.0, 4.0]]


@pytest.mark.parametrize("constant", [0.7, -30.1, 4256.3])
def test_rounding_is_not_scaled_up(constant):
    """An eps of 1e-8 in the variance multiplies it by up to 10,000: to 0.02 at 30."""
    x, mask = torch.full((40, 50), constant), torch.arange(50) < torch.arange(11, 51)[:, None]
    noise = torch.randint(-2, 3, x.shape, generator=torch.Generator().manual_seed(0)) * torch.finfo(x.dtype).eps
    for entries in (x, x * (1 + noise)):
        assert not masked_whiten(entries, mask).any()
        kept = masked_whiten(entries, mask, shift_mean=False)
        torch.testing.assert_close(kept[mask], entries[mask], rtol=1e-6, atol=0.0)
    differences = x * noise  # of numbers as large as the constant
    assert masked_whiten(differences, mask)[mask].std() > 1e-3
    assert not masked_whiten(differences, mask, magnitude=abs(constant)).any()


@pytest.mark.parametrize("unit", [1e-8, 1e-3, 1024.0])
def test_whitened_entries_have_no_unit(unit):
    x, mask = torch.tensor([[0.5, 1.0, -2.0, 9.0]]), torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(masked_whiten(unit * x, mask), masked_whiten(x, mask))


def test_small_differences_are_scaled_and_what_is_not_finite_is_not_hidden():
    x, mask = torch.tensor([[30.0, 30.001]]), torch.ones(1, 2, dtype=torch.bool)
    assert masked_whiten(x, mask)[0].tolist() == pytest.approx([-1.0, 1.0], rel=0.03)  # 1e-3 of 30 has three digits
    for bad in (torch.nan, torch.inf):
        assert not masked_whiten(torch.tensor([[bad, bad]]), mask).isfinite().any()


# Spec §6.30: per-token losses [1, 1, 1, 1, 10] and [1 × 9, 10].
LOSSES = torch.tensor([[1.0] * 4 + [10.0] + [0.0] * 5, [1.0] * 9 + [10.0]], dtype=torch.float64)
COUNTED = LOSSES > 0


@pytest.mark.parametrize(
    ("settings", "published"),
    [
        ({"aggregation": "token"}, 33 / 15),
        ({"aggregation": "sequence"}, 2.35),
        ({"aggregation": "constant", "constant_length": 10}, 1.65),
        ({"aggregation": "constant"}, 1.65),  # the width is 10
        ({"aggregation": "constant", "constant_length": 1}, (14 + 19) / 2),
    ],
)
def test_aggregation_reproduces_the_published_figures(settings, published):
    assert aggregate(LOSSES, COUNTED, **settings).item() == pytest.approx(published, abs=1e-12)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@given(seed=SEEDS, cut=st.integers(1, 4))
def test_parts_with_the_whole_normalizer_sum_to_the_whole(ragged, aggregation, seed, cut):
    batch = ragged(seed)
    normalizer = aggregation_normalizer(batch.mask, aggregation=aggregation)
    whole = aggregate(batch.rewards, batch.mask, aggregation=aggregation)
    parts = [
        aggregate(batch.rewards[rows], batch.mask[rows], aggregation=aggregation, normalizer=normalizer)
        for rows in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_a_row_without_tokens_is_no_sequence():
    x, mask = torch.tensor([[2.0, 4.0], [7.0, 7.0]]), torch.tensor([[True, True], [False, False]])
    assert aggregate(x, mask, aggregation="sequence").item() == 3.0
    assert aggregation_normalizer(mask, aggregation="sequence").item() == 1


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def test_shapes_must_agree(self):
        with pytest.raises(ShapeError, match=r"mask \(3, 3\), x \(3, 2\)"):
            masked_mean(GRID[:, :2], EVERY)

    def test_something_must_count(self):
        for function in (masked_mean, masked_whiten, aggregate):
            with pytest.raises(ShapeError, match="counts nothing"):
                function(GRID, ~EVERY)

    def test_a_mask_is_boolean(self):
        with pytest.raises(ShapeError, match=r"boolean .* torch\.int64"):
            masked_mean(GRID, EVERY.long())

    def test_one_entry_has_no_bessel_variance(self):
        with pytest.raises(ShapeError, match="more than 1 counted"):
            masked_whiten(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), correction=1)

    def test_the_aggregation_must_be_known(self):
        with pytest.raises(ConfigError, match="token, sequence, constant, got 'mean'"):
            aggregate(GRID, EVERY, aggregation="mean")

    def test_a_length_is_above_zero(self):
        with pytest.raises(ConfigError, match="constant_length must be above 0"):
            aggregate(GRID, EVERY, aggregation="constant", constant_length=0)
