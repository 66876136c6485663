"""The ratio of a turn against a loop written from the papers."""

from __future__ import annotations

from functools import partial
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.algorithm import (
    Tokens,
    cispo_policy_loss,
    clipped_policy_loss,
    double_sided_policy_loss,
    unclipped_policy_loss,
)
from kedge.algorithm.turns import Turns
from kedge_base.errors import ShapeError
from tests.rollout.episodes import MIXED, drawn, rollout_of, turns_of

SEEDS = st.integers(0, 10_000)
LOSSES = {
    "clipped": partial(clipped_policy_loss, clip_range=0.2),
    "unclipped": unclipped_policy_loss,
    "cispo": partial(cispo_policy_loss, clip_range_high=0.2),
    "double_sided": partial(double_sided_policy_loss, clip_range=0.2),
}


@given(SEEDS, st.floats(0.01, 0.6), st.floats(0.01, 0.9))
@settings(max_examples=12)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_clipped_loss_agrees_with_a_loop_over_the_turns(aggregation, seed, low, high):
    """Turn-PPO's objective, whose turns have different advantages; the gradient at a token is ρ·A·∇log π."""
    rollout = rollout_of(MIXED, seed=seed)
    mask, old = rollout.action_mask, rollout.logprobs
    now = (old + torch.where(mask, 0.3 * drawn(*mask.shape, seed=seed + 1), 0.0)).requires_grad_()
    advantages = drawn(*mask.shape, seed=seed + 2)
    for row in range(len(mask)):
        for turn in turns_of(rollout, row):
            advantages[row, turn] = float(advantages[row, turn[0]])
    found = clipped_policy_loss(
        now, old, advantages, mask, clip_range=low, clip_range_high=high, ratio="turn",
        turn_starts=rollout.turn_starts, aggregation=aggregation, constant_length=5,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(found.loss, now)
    expected, total, held = torch.zeros_like(old), 0.0, 0
    for row in range(len(mask)):
        own = int(mask[row].sum())
        weight = {"token": 1 / int(mask.sum()), "sequence": 1 / own / len(mask), "constant": 1 / 5 / len(mask)}[
            aggregation
        ]
        for turn in turns_of(rollout, row):
            logs = [float(now[row, t].detach() - old[row, t]) for t in turn]
            ratio, advantage = (
                torch.tensor(fmean(logs), dtype=torch.float64).exp().item(),
                float(advantages[row, turn[0]]),
            )
            is_held = ratio > 1 + high if advantage > 0 else ratio < 1 - low
            bounded = min(max(ratio, 1 - low), 1 + high)
            total -= weight * len(turn) * min(ratio * advantage, bounded * advantage)
            held += is_held * len(turn)
            for t in turn:
                expected[row, t] = 0.0 if is_held else -weight * ratio * advantage
    torch.testing.assert_close(gradient, expected)
    assert found.loss.item() == pytest.approx(total)
    assert found.clip_fraction.item() == pytest.approx(held / int(mask.sum()))


@pytest.mark.parametrize("name", LOSSES)
def test_a_turn_of_one_token_has_its_ratio_and_a_turn_that_is_the_response_has_that_of_the_response(name):
    rollout = rollout_of(MIXED)
    mask, old = rollout.action_mask, rollout.logprobs
    given = (old, torch.where(mask, drawn(*mask.shape, seed=4), 0.0), mask)
    results = {}
    for ratio, starts in (("token", None), ("turn", mask), ("sequence", None), ("turn", None)):
        now = (old + 0.3 * drawn(*mask.shape, seed=3)).requires_grad_()
        found = LOSSES[name](now, *given, ratio=ratio, turn_starts=starts)
        (gradient,) = torch.autograd.grad(found.loss, now)
        results[ratio, starts is None] = (found.loss.detach(), gradient, found.clip_fraction, found.approx_kl)
    torch.testing.assert_close(results["turn", False], results["token", True])
    torch.testing.assert_close(results["turn", True], results["sequence", True])


def test_prepared_tokens_have_the_ratio_of_their_turns():
    rollout = rollout_of(MIXED)
    mask, old = rollout.action_mask, rollout.logprobs
    given = (old + drawn(*mask.shape, seed=3), old, drawn(*mask.shape, seed=4), mask)
    options = {"ratio": "turn", "turn_starts": rollout.turn_starts}
    for loss in LOSSES.values():
        assert loss(Tokens.of(*given, **options)) == loss(*given, **options)


def test_sums_do_not_depend_on_the_place_of_their_terms():
    """So that turns with the same rewards count as equal, whichever tokens the rewards are for."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    x = torch.tensor([[1e8, 1.0, -1e8], [1.0, 1e8, -1e8]])
    assert Turns.of(None, mask).summed(x)[:, 0].tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("unchecked")
def test_turns_of_other_shapes_are_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"turn_starts \(2, 2\)"):
        Turns.of(mask[:, :2], mask)
