"""The distance of sampler and trainer, against a loop over tokens and numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kedge.algorithm.logprobs import sampler_mismatch
from kedge.errors import ShapeError


def test_two_tokens_by_hand():
    """Ratios ½ and 2: k3 = ((½ − 1 + log 2) + (2 − 1 − log 2)) / 2 = ¼; share = (2.5)² / (2 · 4.25)."""
    trainer, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0 + math.log(2), -1.0 - math.log(2)]])
    apart = sampler_mismatch(trainer, sampler, torch.ones(1, 2, dtype=torch.bool))
    assert apart.k3 == pytest.approx(0.25, rel=1e-6)
    assert apart.largest_ratio == pytest.approx(2.0)
    assert apart.effective_share == pytest.approx(6.25 / 8.5)


def test_a_slow_loop_agrees_and_masked_slots_do_not_count():
    generator = torch.Generator().manual_seed(0)
    trainer, sampler = -torch.rand(2, 4, 7, generator=generator)
    mask = torch.rand(4, 7, generator=generator) < 0.6
    trainer, sampler = (torch.where(mask, each, math.nan) for each in (trainer, sampler))
    ratios = [
        math.exp(float(trainer[row, slot]) - float(sampler[row, slot]))
        for row in range(4)
        for slot in range(7)
        if mask[row, slot]
    ]
    apart = sampler_mismatch(trainer, sampler, mask)
    assert apart.k3 == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios), rel=1e-5)
    assert apart.largest_ratio == pytest.approx(max(max(ratio, 1 / ratio) for ratio in ratios), rel=1e-6)
    squares = sum(ratio**2 for ratio in ratios)
    assert apart.effective_share == pytest.approx(sum(ratios) ** 2 / (len(ratios) * squares), rel=1e-6)


def test_the_same_probabilities_are_no_distance_and_hopeless_ones_overflow_nothing():
    same = torch.full((2, 3), -1.0)
    everywhere = torch.ones(2, 3, dtype=torch.bool)
    apart = sampler_mismatch(same, same, everywhere)
    assert (apart.k3, apart.largest_ratio, apart.effective_share) == (0.0, 1.0, 1.0)
    lost = sampler_mismatch(same, torch.tensor([[-9999.0, -1, -1], [-1, -1, -1]]), everywhere)
    assert lost.effective_share == pytest.approx(1 / 6)


def test_nothing_that_counts_is_refused():
    with pytest.raises(ShapeError):
        sampler_mismatch(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
