"""Adam's two meanings of ε, the schedules and clipping, against hand computations and published figures."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kedge.models.adapters import mark_frozen
from kedge.training.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate_at,
    scale_output_gradients,
    set_learning_rate,
)
from kedge_base.errors import ConfigError

# One weight, lr 0.1, β = (0.9, 0.999), ε = 0.01, gradients 1, −0.5, 2; worked out to 30 digits outside torch,
# each row from its own published form.
# t=1: m = 0.1,    v = 0.001        t=2: m = 0.04,  v = 0.001249        t=3: m = 0.236, v = 0.005247751
TRACE_GRADIENTS = (1.0, -0.5, 2.0)
TRACE_TF1 = (0.924025, 0.903266, 0.845437)
TRACE_TORCH = (0.900990, 0.874689, 0.809372)


def one_weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def take_step(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradient: float) -> float:
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return weight.item()


@pytest.mark.parametrize(("mode", "expected"), [("torch", TRACE_TORCH), ("tf1", TRACE_TF1)])
def test_three_steps_follow_the_hand_computed_trace(mode, expected):
    weight = one_weight()
    optimizer = build_optimizer([weight], learning_rate=0.1, adam_eps=0.01, adam_eps_mode=mode)
    trace = [take_step(optimizer, weight, gradient) for gradient in TRACE_GRADIENTS]
    assert trace == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("step", "ratio"), [(1, 31.6), (10, 10.0), (100, 3.24)])
def test_tf1_eps_has_the_published_ratio_to_torchs(step, ratio):
    weight = one_weight()
    optimizer = build_optimizer([weight], learning_rate=0.1, adam_eps=1e-5, adam_eps_mode="tf1")
    for _ in range(step):
        take_step(optimizer, weight, 1.0)
    assert optimizer.param_groups[0]["eps"] / 1e-5 == pytest.approx(ratio, rel=3e-3)


def test_tf1_counts_only_the_steps_that_a_weight_took():
    late, early = one_weight(), one_weight()
    optimizer = build_optimizer([late, early], learning_rate=0.1, adam_eps=0.01, adam_eps_mode="tf1")
    for _ in range(7):
        take_step(optimizer, early, 1.0)
    early.grad = None
    trace = [take_step(optimizer, late, gradient) for gradient in TRACE_GRADIENTS]
    assert trace == pytest.approx(TRACE_TF1, abs=1e-6)


def test_tf1_resumes_exactly():
    weight = one_weight()
    optimizer = build_optimizer([weight], learning_rate=0.1, adam_eps=0.01, adam_eps_mode="tf1")
    for gradient in TRACE_GRADIENTS[:2]:
        take_step(optimizer, weight, gradient)
    resumed = nn.Parameter(weight.detach().clone())
    again = build_optimizer([resumed], learning_rate=0.1, adam_eps=0.01, adam_eps_mode="tf1")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert take_step(again, resumed, TRACE_GRADIENTS[2]) == take_step(optimizer, weight, TRACE_GRADIENTS[2])


def test_nothing_decays_unless_asked_for_and_then_only_matrices():
    layer = nn.Linear(3, 2)
    before = copy.deepcopy(layer.state_dict())
    for weight_decay in (0.0, 0.5):
        optimizer = build_optimizer(layer.parameters(), learning_rate=0.1, weight_decay=weight_decay)
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), before["weight"] * (1 - 0.1 * weight_decay))
        torch.testing.assert_close(layer.bias.detach(), before["bias"])


def test_frozen_parameters_are_left_out():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    optimizer = build_optimizer(layer.parameters(), learning_rate=0.1)
    assert [group["params"] for group in optimizer.param_groups] == [[layer.weight]]
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer([layer.bias], learning_rate=0.1)


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        ("linear", 0, (1.0, 0.75, 0.5, 0.25)),
        ("cosine", 0, (1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4)),
        ("constant", 0, (1.0, 1.0, 1.0, 1.0)),
        ("linear", 2, (1 / 3, 2 / 3, 1.0, 0.5)),
        ("constant", 3, (0.25, 0.5, 0.75, 1.0)),
    ],
)
def test_schedules_of_four_steps(schedule, warmup_steps, expected):
    rates = [
        learning_rate_at(step, 4, learning_rate=1.0, schedule=schedule, warmup_steps=warmup_steps) for step in range(4)
    ]
    assert rates == pytest.approx(expected, abs=1e-12)


@given(
    num_steps=st.integers(1, 40),
    warmup_steps=st.integers(0, 50),
    schedule=st.sampled_from(["linear", "cosine", "constant"]),
)
def test_a_schedule_rises_then_falls_and_never_wastes_a_step(num_steps, warmup_steps, schedule):
    rates = [
        learning_rate_at(step, num_steps, learning_rate=2.0, schedule=schedule, warmup_steps=warmup_steps)
        for step in range(num_steps)
    ]
    assert all(0.0 < rate <= 2.0 for rate in rates)
    peak = min(warmup_steps, num_steps - 1)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_the_learning_rate_is_set_in_every_group():
    optimizer = build_optimizer(nn.Linear(2, 2).parameters(), learning_rate=1.0)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def gradients_of(weights: list[nn.Parameter]) -> list[float]:
    return [weight.grad.item() for weight in weights if weight.grad is not None]


def test_clipping_returns_the_norm_before_and_keeps_the_direction():
    weights = [one_weight(), one_weight(), one_weight()]
    weights[0].grad, weights[1].grad = torch.full_like(weights[0], 3.0), torch.full_like(weights[1], 4.0)
    assert clip_gradients(weights, None) == pytest.approx(5.0)
    assert clip_gradients(weights, 0) == pytest.approx(5.0)
    assert clip_gradients(iter(weights), 1.0) == pytest.approx(5.0)
    assert gradients_of(weights) == pytest.approx([0.6, 0.8], abs=1e-5)
    assert clip_gradients(weights, 2.0) == pytest.approx(1.0, abs=1e-5)
    assert gradients_of(weights) == pytest.approx([0.6, 0.8], abs=1e-5)


def test_a_gradient_that_is_not_finite_is_reported_and_not_spread():
    weights = [one_weight(), one_weight()]
    weights[0].grad, weights[1].grad = torch.full_like(weights[0], math.inf), torch.full_like(weights[1], 4.0)
    assert clip_gradients(weights, 1.0) == math.inf
    assert gradients_of(weights) == [math.inf, 4.0]


def test_a_frozen_weight_whose_gradient_is_on_is_refused():
    """Every kind of group: the body's, a critic's, a new head's."""
    weight = one_weight()
    mark_frozen(weight)
    build_optimizer([weight, one_weight()], learning_rate=0.1)
    weight.requires_grad_(True)
    for groups in ({}, {"critic_parameters": [weight]}, {"head_parameters": [weight]}):
        with pytest.raises(ConfigError, match="1 of the parameters to train are frozen weights under an adapter"):
            build_optimizer([weight, one_weight()], learning_rate=0.1, **groups)


@pytest.mark.parametrize("unit", [2.0**-7, 1024.0])
def test_an_output_layer_in_a_unit_learns_as_its_weights_over_the_unit_would(unit):
    """Adam, clipping and decay by torch alone, on w/u with the loss of the outputs over u."""
    features = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, targets = torch.tensor([[0.3, -0.2, 0.5]], dtype=torch.float64), features.sum(1, keepdim=True)
    weight, plain = nn.Parameter(start * unit), nn.Parameter(start.clone())
    ours = build_optimizer([], head_parameters=[weight], head_rate=10.0, learning_rate=0.1, weight_decay=0.2)
    theirs = torch.optim.AdamW([plain], lr=1.0, eps=1e-5, weight_decay=0.2)
    for _ in range(3):
        set_learning_rate(ours, 0.1, value_unit=unit)
        for optimizer, trained, size in ((ours, weight, unit), (theirs, plain, 1.0)):
            optimizer.zero_grad()
            ((features @ trained.T - targets * size) / size).square().mean().backward()
        scale_output_gradients(ours)
        norm = clip_gradients([weight], 0.5)
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_([plain], 0.5)))
        ours.step()
        theirs.step()
    torch.testing.assert_close(weight / unit, plain)
