"""Accuracy, the length baseline and calibration, on pairs counted by hand and drawn from the model's own belief."""

from __future__ import annotations

import math

import pytest
import torch

from kedge.training.agreement import measure_agreement


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_four_pairs_counted_by_hand():
    # Sure to 0.9 of three, of which one is wrong; to 0.6 of one, which is right.
    leads = torch.tensor([logit(0.9), logit(0.9), -logit(0.9), logit(0.6)])
    figures = measure_agreement(leads, torch.tensor([3.0, -1.0, 0.0, 2.0]), num_bins=5)
    assert figures.num_pairs == 4
    assert figures.accuracy == 0.75
    assert figures.length_accuracy == 0.625
    assert [(part.num_pairs, round(part.predicted, 4), round(part.observed, 4)) for part in figures.bins] == [
        (1, 0.6, 1.0),
        (3, 0.9, 0.6667),
    ]
    assert figures.calibration_error == pytest.approx((0.4 + 3 * (0.9 - 2 / 3)) / 4, abs=1e-6)


def test_a_model_that_cannot_tell_is_half_right_and_calibrated():
    figures = measure_agreement(torch.zeros(6), torch.zeros(6))
    assert (figures.accuracy, figures.length_accuracy, figures.calibration_error) == (0.5, 0.5, 0.0)


def test_verdicts_drawn_from_the_models_belief_are_calibrated_and_exaggerated_ones_are_not():
    generator = torch.Generator().manual_seed(0)
    belief = 2 * torch.randn(20_000, generator=generator)
    signs = torch.where(torch.rand(20_000, generator=generator) < torch.sigmoid(belief), 1.0, -1.0)
    # 20,000 draws: ten bins of about 2,000 pairs, a standard error of 0.01 each.
    assert measure_agreement(belief * signs, belief).calibration_error < 0.02
    assert measure_agreement(3 * belief * signs, belief).calibration_error > 0.1
