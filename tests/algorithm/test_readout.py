"""The read-out against least squares by hand, and the interval of the explained variance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kedge.algorithm import explained_variance
from kedge.algorithm.readout import PENALTIES, ReadoutSums, explained_variance_interval, fit_readout
from kedge_base.errors import ShapeError


def sums_of(features: Tensor, targets: Tensor, *, parts: int = 3) -> ReadoutSums:
    sums = ReadoutSums.empty(features.shape[1])
    for rows, values in zip(features.chunk(parts), targets.chunk(parts), strict=True):
        sums.add(rows, values)
    return sums


def examples(num: int, *, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num, 4, generator=generator, dtype=torch.float64)
    truth = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    return features + 2.0, 5.0 + features @ truth + noise * torch.randn(num, generator=generator, dtype=torch.float64)


def slow_ridge(features: Tensor, targets: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights and offset by least squares with one further row √(λn) per weight, the textbook's augmented data."""
    num, dim = features.shape
    rows = torch.cat([features, torch.ones(num, 1, dtype=torch.float64)], dim=1)
    extra = torch.cat([(penalty * num) ** 0.5 * torch.eye(dim, dtype=torch.float64), torch.zeros(dim, 1)], dim=1)
    augmented = torch.cat([targets, torch.zeros(dim, dtype=torch.float64)])
    solution = torch.linalg.lstsq(torch.cat([rows, extra.double()]), augmented).solution
    return solution[:-1], solution[-1]


def test_parts_add_up_and_the_solution_is_that_of_augmented_least_squares() -> None:
    halves = [examples(40, noise=3.0, seed=seed) for seed in range(2)]
    readout = fit_readout([sums_of(*half) for half in halves])
    features, targets = (torch.cat(parts) for parts in zip(*halves, strict=True))
    weight, offset = slow_ridge(features, targets, readout.penalty * float(features.var(0, correction=0).mean()))
    torch.testing.assert_close(readout.weight, weight)
    assert readout.offset == pytest.approx(float(offset))


def test_the_penalty_is_the_one_with_which_each_half_predicts_the_other_best() -> None:
    halves = [examples(12, noise=8.0, seed=seed) for seed in range(2)]
    unit = float(torch.cat([half[0] for half in halves]).var(0, correction=0).mean())
    errors = []
    for penalty in PENALTIES:
        fits = [slow_ridge(*half, penalty * unit) for half in halves]
        errors.append(
            sum(float((targets - features @ weight - offset).square().sum())
                for (features, targets), (weight, offset) in zip(halves, reversed(fits), strict=True))
        )  # fmt: skip
    chosen = fit_readout([sums_of(*half) for half in halves]).penalty
    assert chosen == PENALTIES[errors.index(min(errors))]
    assert chosen > PENALTIES[0], "of noise, less is learned"
    assert fit_readout([sums_of(*examples(400, noise=0.0, seed=3)) for _ in range(2)]).penalty == PENALTIES[0]


def test_there_is_nothing_to_fit_without_examples() -> None:
    with pytest.raises(ShapeError, match="at least one example"):
        fit_readout([ReadoutSums.empty(3)])


def test_the_interval_is_around_the_explained_variance_and_resamples_whole_prompts() -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(30, 5, generator=generator) + 40
    values = returns + 0.5 * torch.randn(30, 5, generator=generator)
    mask = torch.rand(30, 5, generator=generator) < 0.8
    mask[:, 0] = True
    found = explained_variance_interval(values, returns, mask, torch.arange(30))
    assert found.value == pytest.approx(float(explained_variance(values, returns, mask)), abs=1e-5)
    assert found.low < found.value < found.high
    again = explained_variance_interval(
        values.repeat(4, 1), returns.repeat(4, 1), mask.repeat(4, 1), torch.arange(30).repeat(4)
    )
    assert again.value == pytest.approx(found.value)
    assert (again.low, again.high) == pytest.approx((found.low, found.high)), "copies of a prompt are no new prompts"


@pytest.mark.parametrize("unit", [1e-7, 1e7])
def test_the_interval_does_not_depend_on_the_unit_of_the_returns(unit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(12, 5, generator=generator)
    values = returns + 0.5 * torch.randn(12, 5, generator=generator)
    plain, other = (
        explained_variance_interval(values * scale, returns * scale, returns > -9, torch.arange(12) // 2)
        for scale in (1.0, unit)
    )
    assert (other.low, other.value, other.high) == pytest.approx((plain.low, plain.value, plain.high), abs=1e-5)


def test_constant_returns_have_nothing_to_explain() -> None:
    ones = torch.ones(3, 2)
    found = explained_variance_interval(torch.zeros(3, 2), ones, ones.bool(), torch.arange(3))
    assert (found.low, found.value, found.high) == (0.0, 0.0, 0.0)
