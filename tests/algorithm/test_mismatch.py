"""The distance of sampler and trainer, against a loop over tokens and numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kedge.algorithm.logprobs import response_log_ratios, sampler_mismatch, within_ratio_band
from kedge_base.errors import ConfigError, ShapeError


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


def test_bands_against_a_slow_loop():
    generator = torch.Generator().manual_seed(1)
    trainer, sampler = -2 * torch.rand(2, 40, 7, generator=generator)
    mask = torch.rand(40, 7, generator=generator) < 0.7
    mask[:, 0] = True
    trainer, sampler = (torch.where(mask, each, math.nan) for each in (trainer, sampler))
    tokens = within_ratio_band(trainer, sampler, mask, of="token", low=0.5, high=2.0)
    rows = within_ratio_band(trainer, sampler, mask, of="sequence", low=0.9, high=1.25)
    means = response_log_ratios(trainer - sampler, mask).exp()
    for row in range(40):
        ratios = {
            slot: math.exp(float(trainer[row, slot])) / math.exp(float(sampler[row, slot]))
            for slot in range(7)
            if mask[row, slot]
        }
        mean = math.prod(ratios.values()) ** (1 / len(ratios))
        assert float(means[row]) == pytest.approx(mean, rel=1e-5)
        for slot in range(7):
            assert bool(tokens[row, slot]) == (slot in ratios and 0.5 <= ratios[slot] <= 2.0)
            assert bool(rows[row, slot]) == (slot in ratios and 0.9 <= mean <= 1.25)
    for found in (tokens, rows):
        assert 0 < int(found.sum()) < int(mask.sum())


def test_a_sequence_can_be_outside_though_none_of_its_tokens_is():
    # e^0.02 each: within 0.5 to 2, and their product over 100 tokens is e².
    trainer = torch.full((2, 100), -1.0)
    sampler = torch.stack([trainer[0] - 0.02, trainer[1] + torch.tensor([0.02, -0.02]).repeat(50)])
    everywhere = torch.ones(2, 100, dtype=torch.bool)
    assert within_ratio_band(trainer, sampler, everywhere, of="token", low=0.5, high=2.0).all()
    rows = within_ratio_band(trainer, sampler, everywhere, of="sequence", low=0.99, high=1.01)
    assert rows.all(-1).tolist() == [False, True]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("low", "high", "of"), [(2.0, 0.5, "token"), (0.0, 1.0, "token"), (0.5, 2.0, "group")])
def test_a_band_without_an_inside_is_refused(low, high, of):
    same = torch.full((1, 2), -1.0)
    with pytest.raises(ConfigError):
        within_ratio_band(same, same, same < 0, of=of, low=low, high=high)


def test_nothing_that_counts_is_refused():
    with pytest.raises(ShapeError):
        sampler_mismatch(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
