"""The ratio of a turn, the states in which turns begin, and GiGPO, against loops written from the papers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.algorithm import (
    GroupInGroupAdvantage,
    GroupMeanAdvantage,
    Tokens,
    cispo_policy_loss,
    clipped_policy_loss,
    double_sided_policy_loss,
    unclipped_policy_loss,
)
from kedge.algorithm.turns import Turns, turn_states
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


# --- states


def states_of(drawings: list[str], ids: list[list[int]], **fields) -> list[list[int]]:
    """The number of each turn's state, row by row."""
    rollout = rollout_of(drawings, response_ids=torch.tensor(ids), **fields)
    assert rollout.turn_starts is not None
    states = turn_states(rollout, rollout.turn_starts)
    assert torch.equal(states >= 0, rollout.turn_starts)
    return [row[starts].tolist() for row, starts in zip(states, rollout.turn_starts, strict=True)]


def test_a_state_is_what_was_read_since_the_last_turn():
    found = states_of(
        ["rCrrCrCC", "rCrrCrC.", "rCrCrrrC"],
        [[5, 90, 6, 7, 91, 8, 92, 93], [5, 94, 6, 7, 95, 5, 96, 0], [6, 97, 8, 98, 6, 7, 8, 99]],
        group=[0, 0, 0],
    )
    # The first turns have also read the prompt, so that 5 after it is another state than 5 after a turn.
    assert found == [[0, 1, 2], [0, 1, 3], [4, 2, 5]]


def test_groups_and_prompts_keep_states_apart():
    assert states_of(["rCrC", "rCrC"], [[5, 9, 6, 9]] * 2, group=[0, 1]) == [[0, 1], [2, 3]]
    prompts = torch.tensor([[3, 4], [3, 5]])
    assert states_of(["rCrC", "rCrC"], [[5, 9, 6, 9]] * 2, group=[0, 0], prompt_ids=prompts) == [[0, 1], [2, 1]]
    padded = torch.tensor([[False, True], [True, True]])  # 4 alone, and 3 4
    prompts = torch.tensor([[3, 4], [3, 4]])
    given = {"group": [0, 0], "prompt_ids": prompts, "prompt_mask": padded}
    assert states_of(["rCrC", "rCrC"], [[5, 9, 6, 9]] * 2, **given) == [[0, 1], [2, 1]]


def test_slots_that_are_not_read_belong_to_no_state():
    assert states_of(["rxCrC.", "rCrxC."], [[5, 7, 9, 6, 9, 0], [5, 9, 6, 8, 9, 0]], group=[0, 0]) == [[0, 1], [0, 1]]


def test_parents_of_one_branch_are_those_that_the_order_gives():
    rollout = rollout_of(MIXED, group=[0, 0, 0, 0])
    assert rollout.turn_starts is not None
    width = rollout.action_mask.shape[1]
    parents = torch.full((4, width), -1)
    for row in range(4):
        newest = -1
        for slot in range(width):
            parents[row, slot] = newest
            newest = slot if rollout.token_mask[row, slot] else newest
    known = replace(rollout, parents=parents)
    assert torch.equal(turn_states(known, rollout.turn_starts), turn_states(rollout, rollout.turn_starts))


def test_a_new_context_is_a_state_as_a_whole_and_a_branch_that_goes_on_is_not():
    # Prompt 3 4. A turn at 0; a new context "3 5 6", which shares the prompt's first token, and its turn at 3; back to
    # the first branch after its turn: 7 is read, turn at 5; a context with nothing of the prompt: 8, turn at 7.
    ids = [[9, 5, 6, 9, 7, 9, 8, 9]]
    given = {"prompt_ids": torch.tensor([[3, 4]] * 2), "group": [0, 0]}
    first = states_of(["CrrCrCrC"] * 2, ids * 2, parents=torch.tensor([[-1, -2, 1, 2, 0, 4, -3, 6]] * 2), **given)
    assert first == [[0, 1, 2, 3]] * 2
    # The same contexts and answers, in an episode that has them in the other order.
    turned = torch.tensor([[5, 6, 9, 8, 9, 0, 0, 0]])
    other = rollout_of(
        ["rrCrC...", "CrrCrCrC"], response_ids=torch.cat([turned, torch.tensor(ids)]),
        parents=torch.tensor([[-2, 0, 1, -3, 3, 4, 4, 4], [-1, -2, 1, 2, 0, 4, -3, 6]]), **given,
    )  # fmt: skip
    assert other.turn_starts is not None
    states = turn_states(other, other.turn_starts)
    assert states[0, [2, 4]].tolist() == states[1, [3, 7]].tolist()
    assert len(set(states[1][other.turn_starts[1]].tolist())) == 4


# --- GiGPO


GROUP = [0, 0, 0, 1, 1, 1, 1, 0]


def episodes(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards by turn, the turns, and the states, few enough to recur; states belong to one group."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(8, 6, generator=draw) < 0.7
    mask[:, 0] = True
    rewards = torch.where(mask, torch.randn(8, 6, generator=draw, dtype=torch.float64), 0.0)
    states = torch.randint(5, (8, 6), generator=draw) + 100 * torch.tensor(GROUP)[:, None]
    states[0, 0] = 50  # where nobody else has been
    return rewards, mask, states.masked_fill(~mask, -1)


def slow_gigpo(
    rewards: Tensor, mask: Tensor, states: Tensor, gamma: float, weight: float
) -> dict[tuple[int, int], float]:
    """GiGPO, eq. 3 to 8, with the standard deviation as the normalizer; episode by episode, turn by turn."""
    steps = {row: mask[row].nonzero().flatten().tolist() for row in range(len(mask))}
    totals = {row: sum(float(rewards[row, t]) for t in steps[row]) for row in steps}
    returns = {
        (row, t): sum(gamma**k * float(rewards[row, later]) for k, later in enumerate(steps[row][place:]))
        for row in steps
        for place, t in enumerate(steps[row])
    }
    found = {}
    for (row, t), value in returns.items():
        peers = [totals[other] for other in steps if GROUP[other] == GROUP[row]]
        same = [each for (other, at), each in returns.items() if states[other, at] == states[row, t]]
        of_episode = (totals[row] - fmean(peers)) / stdev(peers)
        of_step = (value - fmean(same)) / stdev(same) if len(same) > 1 else 0.0
        found[row, t] = of_episode + weight * of_step
    return found


@settings(max_examples=12)
@given(SEEDS, st.sampled_from([1.0, 0.95, 0.0]), st.sampled_from([1.0, 0.3]))
def test_gigpo_agrees_with_a_loop(seed, gamma, weight):
    rewards, mask, states = episodes(seed)
    found = GroupInGroupAdvantage(gamma, weight)(rewards, mask, group=torch.tensor(GROUP), states=states)
    expected = slow_gigpo(rewards, mask, states, gamma, weight)
    for row in range(8):
        for t in range(6):
            assert float(found.advantages[row, t]) == pytest.approx(expected.get((row, t), 0.0), abs=1e-10)


def test_without_a_state_that_recurs_gigpo_is_grpo_to_the_bit():
    rewards, mask, states = episodes(0)
    group = torch.tensor(GROUP)
    grpo = GroupMeanAdvantage(scale_by_std=True)(rewards, mask, group=group).advantages
    apart = torch.arange(48).view(8, 6)
    assert torch.equal(GroupInGroupAdvantage(0.9)(rewards, mask, group=group, states=apart).advantages, grpo)
    assert torch.equal(GroupInGroupAdvantage(0.9, 0.0)(rewards, mask, group=group, states=states).advantages, grpo)


def test_equal_returns_from_a_state_have_exactly_no_advantage():
    rewards = torch.tensor([[0.1, 0.7], [0.3, 0.7], [0.2, 0.7]])
    states = torch.tensor([[1, 2], [3, 2], [4, 2]])
    mask, group = torch.ones(3, 2, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    found = GroupInGroupAdvantage(0.95)(rewards, mask, group=group, states=states).advantages
    grpo = GroupMeanAdvantage(scale_by_std=True)(rewards, mask, group=group).advantages
    assert torch.equal(found, grpo)


def test_the_slot_of_the_score_is_no_turn():
    """It is in no state, and is not compared; the turns before it have its reward."""
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.1]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, True]])
    actions = torch.tensor([[True, False, False], [True, True, False], [True, True, False]])
    states = torch.tensor([[1, -1, -1], [1, 2, -1], [3, 2, -1]])
    found = GroupInGroupAdvantage(1.0)(
        rewards, mask, group=torch.zeros(3, dtype=torch.long), states=states, actions=actions
    )
    totals = [1.0, 0.5, 0.1]
    of_episode = [(each - fmean(totals)) / stdev(totals) for each in totals]
    half = 0.5**0.5
    expected = [
        of_episode[0] + half,
        of_episode[1] - half,
        of_episode[1] + half,
        of_episode[2] + 0.0,
        of_episode[2] - half,
    ]
    assert found.advantages[actions].tolist() == pytest.approx(expected)
    assert found.advantages[mask & ~actions].tolist() == pytest.approx(of_episode)


def test_gigpo_needs_states():
    rewards, mask, _ = episodes(0)
    with pytest.raises(ShapeError, match="needs states"):
        GroupInGroupAdvantage(1.0)(rewards, mask, group=torch.tensor(GROUP))
