"""Credit by turn: a turn of the policy is one action, with one value, one reward and one advantage."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.algorithm import (
    BaselineAdvantage,
    ControlVariateAdvantage,
    GeneralizedAdvantage,
    GroupMeanAdvantage,
    LeaveOneOutAdvantage,
    LengthAdaptiveLambda,
    NStepAdvantage,
    OptimalBaselineAdvantage,
    ProcessAdvantage,
    RewardToGo,
    TotalReward,
)
from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout
from kedge.algorithm.own import OwnAdvantage
from kedge.config import config_from_settings
from kedge.logs.experience_metrics import describe_experience
from kedge.rollout import Estimation, Models, RolloutOutputs, experience_from
from kedge.stages.ppo.settings import advantage_of
from kedge.training.objective import Objective
from kedge_base.estimators import ESTIMATORS as ESTIMATED
from tests.rollout.episodes import MIXED, drawn, rollout_of, turns_of
from tests.training.test_update import CLIPPED, gradients, make_models, make_objective

GAMMA, BETA = 0.9, 0.3


def experience(rollout: Rollout, estimation: Estimation, *, seed: int = 5, **given: Any) -> Experience:
    """What the estimation makes of drawn scores, values and reference."""
    rows, width = rollout.action_mask.shape
    values = drawn(rows, width + 1, seed=seed)

    def evaluate(part: Rollout, **_: Any) -> Tensor:
        """The values of an episode's states, of which one more is needed after the last action."""
        return values[[int(each) for each in part.policy_version], : part.action_mask.shape[1]]

    numbered = replace(rollout, policy_version=torch.arange(rows))
    models: Any = Models(SimpleNamespace(values=evaluate))  # pyright: ignore[reportArgumentType]
    reference = rollout.logprobs + torch.where(rollout.action_mask, drawn(rows, width, seed=seed + 1), 0.0)
    outputs = RolloutOutputs(rollout.logprobs, values[:, :width], reference, "all")
    scored = {"scores": drawn(rows, seed=seed + 2), "token_scores": None, "baseline": drawn(rows, seed=seed + 3)}
    return experience_from(
        SimpleNamespace(rollout=numbered, **{**scored, **given}),  # pyright: ignore[reportArgumentType]
        outputs, models, estimation, kl_coef=BETA,
    )  # fmt: skip


def slow(found: Experience, *, lam: float, critic_lam: float, score_at: str, last_values: Tensor) -> list[Any]:
    """Turn-PPO row by row: GAE as a sum over the residuals of turns; advantages by slot, returns by first slot."""
    rollout, rows = found.rollout, list[Any]()
    assert found.ref_logprobs is not None
    assert found.values is not None
    for row in range(len(found.scores)):
        turns = turns_of(rollout, row)
        rewards, values, firsts = list[float](), list[float](), list[int]()
        for turn in turns:
            paid = [-BETA * float(found.old_logprobs[row, t] - found.ref_logprobs[row, t]) for t in turn]
            if found.token_scores is not None:
                paid += [float(found.token_scores[row, t]) for t in turn]
            rewards.append(sum(paid))
            values.append(float(found.values[row, turn[0]]))
            firsts.append(turn[0])
        after = turns[-1][-1] + 1
        has_slot = score_at == "after_last" and after < rollout.action_mask.shape[1]
        if has_slot:
            rewards.append(0.0)
            values.append(float(found.values[row, after]))
            firsts.append(after)
        rewards[-1] += float(found.scores[row])
        if rollout.cut_off is not None and rollout.cut_off[row]:  # the state after the last turn has a value
            value = float(last_values[row, after])
            rewards[-1] += value if has_slot else GAMMA * value
        number = len(rewards)
        residuals = [rewards[i] + (GAMMA * values[i + 1] if i + 1 < number else 0.0) - values[i] for i in range(number)]
        advantages, targets = (
            [sum((GAMMA * each) ** k * residuals[i + k] for k in range(number - i)) for i in range(number)]
            for each in (lam, critic_lam)
        )
        by_slot = {t: advantages[i] for i, turn in enumerate(turns) for t in turn}
        returns = {first: targets[i] + values[i] for i, first in enumerate(firsts)}
        rows.append((by_slot, returns))
    return rows


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("paid", [False, True])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("score_at", ["last", "after_last"])
def test_advantages_returns_and_what_the_critic_is_trained_at_are_those_of_a_slow_loop(score_at, cut, paid, whiten):
    cut_off = torch.tensor([True, False, True, True]) if cut else None
    rollout = rollout_of(MIXED, cut_off=cut_off)
    gae = GeneralizedAdvantage(GAMMA, 0.8, 0.6)
    estimation = Estimation(advantage=gae, gamma=GAMMA, credit="turn", score_at=score_at, whiten_advantages=whiten)
    token_scores = torch.where(rollout.action_mask, drawn(*rollout.action_mask.shape, seed=8), 0.0) if paid else None
    found = experience(rollout, estimation, token_scores=token_scores)
    last_values = drawn(4, rollout.action_mask.shape[1] + 1, seed=5)
    rows = slow(found, lam=0.8, critic_lam=0.6, score_at=score_at, last_values=last_values)
    every = [each for by_slot, _ in rows for each in by_slot.values()]
    mean, std = (fmean(every), pstdev(every)) if whiten else (0.0, 1.0)
    for row, (by_slot, returns) in enumerate(rows):
        assert found.reward_mask[row].nonzero().flatten().tolist() == list(returns)
        for slot in range(rollout.action_mask.shape[1]):
            assert float(found.returns[row, slot]) == pytest.approx(returns.get(slot, 0.0), abs=1e-12)
            if slot in by_slot:
                assert float(found.advantages[row, slot]) == pytest.approx((by_slot[slot] - mean) / std, abs=1e-12)
    # What a response is paid in total does not depend on what an action is.
    plain = experience(rollout, replace(estimation, credit="token"), token_scores=token_scores)
    assert describe_experience(found)["reward/total"] == pytest.approx(describe_experience(plain)["reward/total"])


ESTIMATORS: dict[str, Any] = {
    "gae": GeneralizedAdvantage(GAMMA, 0.7, 0.5),
    "length_adaptive": GeneralizedAdvantage(GAMMA, LengthAdaptiveLambda(0.8)),
    "n_step": NStepAdvantage(GAMMA, 2),
    "to_go": RewardToGo(GAMMA),
    "total": TotalReward(GAMMA),
    "rloo": LeaveOneOutAdvantage(GAMMA),
    "grpo": GroupMeanAdvantage(GAMMA, scale_by_std=True),
    "dr_grpo": GroupMeanAdvantage(GAMMA),
    "remax": BaselineAdvantage(GAMMA),
    "rloo_critic": ControlVariateAdvantage(LeaveOneOutAdvantage(GAMMA), GeneralizedAdvantage(GAMMA, 1.0)),
    "reinforce++_critic": ControlVariateAdvantage(RewardToGo(GAMMA), GeneralizedAdvantage(GAMMA, 0.9)),
    "own": OwnAdvantage(lambda rewards, mask, values: (rewards - values, rewards + mask.double()), GAMMA),
}
BY_TOKENS = ("opo", "gigpo")
"""The estimators for which a turn is not one token: one counts tokens, and the other only has turns."""
for each in ESTIMATED.keys() - {*ESTIMATORS, *BY_TOKENS}:
    several: Any = {"rollout.num_responses": 2} if ESTIMATED[each].baseline == "group" else {}
    estimator: Any = advantage_of(config_from_settings("ppo", {"ppo.advantage": each, **several}))
    ESTIMATORS[each] = replace(estimator, gamma=GAMMA)
SINGLE = ("CrCrrCr", "C-C-CrC", "rCrCr..", "CxC-rCr", "C......", "C-C-C-C", "rrCrrrC", "C-CrC..")
"""Every token of the policy is a turn."""
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("score_at", ["last", "after_last"])
@pytest.mark.parametrize("name", sorted([*ESTIMATORS, "opo"]))
def test_turns_of_one_token_are_tokens_to_the_bit(name, score_at):
    advantage = {**ESTIMATORS, "opo": OptimalBaselineAdvantage(GAMMA)}[name]
    ends = SINGLE if score_at == "last" else [row + "." for row in SINGLE]
    rollout = rollout_of(ends, group=GROUPS, cut_off=torch.arange(8) % 2 == 0)
    rollout = replace(rollout, turn_starts=rollout.action_mask)
    estimation = Estimation(advantage=advantage, gamma=GAMMA, score_at=score_at)
    tokens, turns = (experience(rollout, replace(estimation, credit=credit)) for credit in ("token", "turn"))
    for field in ("rewards", "reward_mask", "advantages", "returns"):
        assert torch.equal(getattr(tokens, field), getattr(turns, field)), field


@pytest.mark.parametrize("process", [None, ProcessAdvantage(), ProcessAdvantage(leave_one_out=True)])
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_turn_counts_as_one_token_that_is_paid_and_valued_as_the_turn(name, process):
    """The same episodes with one token in place of each turn, for every estimator."""
    several = rollout_of([row + "." for row in MIXED * 2], group=GROUPS)
    mask = several.action_mask
    token_scores = torch.where(mask, drawn(*mask.shape, seed=8), 0.0)
    estimation = Estimation(
        advantage=ESTIMATORS[name], gamma=GAMMA, credit="turn", process_advantage=process, whiten_advantages=False
    )
    found = experience(several, estimation, token_scores=token_scores)
    assert found.values is not None
    firsts = torch.zeros_like(mask)
    for row in range(len(mask)):
        firsts[row, [turn[0] for turn in turns_of(several, row)]] = True
    rows, width = mask.shape
    one = replace(several, action_mask=firsts, turn_starts=firsts, logprobs=several.logprobs)
    summed = {"rewards": torch.zeros(rows, width), "token_scores": torch.zeros(rows, width)}
    summed = {key: table.double() for key, table in summed.items()}
    for row in range(rows):
        assert found.ref_logprobs is not None
        for turn in turns_of(several, row):
            summed["token_scores"][row, turn[0]] = sum(float(token_scores[row, t]) for t in turn)
            away = found.old_logprobs - found.ref_logprobs
            summed["rewards"][row, turn[0]] = -BETA * sum(float(away[row, t]) for t in turn)
        summed["rewards"][row, turns_of(several, row)[-1][0]] += float(found.scores[row])
    inputs: Any = {"values": found.values, "group": one.group, "baseline": drawn(rows, seed=8), "actions": firsts}
    if process is None:
        expected = ESTIMATORS[name](summed["rewards"] + summed["token_scores"], firsts, **inputs).advantages
    else:
        expected = ESTIMATORS[name](summed["rewards"], firsts, **inputs).advantages
        expected = expected + process(summed["token_scores"], firsts, group=one.group).advantages
    for row in range(rows):
        for turn in turns_of(several, row):
            for slot in turn:
                assert float(found.advantages[row, slot]) == pytest.approx(float(expected[row, turn[0]]), abs=1e-12)


@pytest.mark.parametrize("starts", [True, False])
def test_one_turn_has_the_total_less_the_value_of_the_prompt_whatever_gamma_and_lambda(starts):
    rollout = rollout_of(["CCCC", "CC..", "rCCr"])
    rollout = rollout if starts else replace(rollout, turn_starts=None)
    estimation = Estimation(advantage=GeneralizedAdvantage(0.5, 0.3), gamma=0.5, credit="turn", whiten_advantages=False)
    found = experience(rollout, estimation)
    plain = experience(rollout, Estimation(advantage=TotalReward(1.0), whiten_advantages=False))
    assert found.values is not None
    mask = rollout.action_mask
    first = mask.int().argmax(-1, keepdim=True)
    expected = plain.advantages - found.values.gather(1, first)
    torch.testing.assert_close(found.advantages[mask], expected[mask])
    # The return of a turn is what REINFORCE calls the response's.
    returns = found.returns.gather(1, first)
    torch.testing.assert_close(returns, plain.returns.gather(1, first))


def test_opo_weights_by_tokens_whatever_an_action_is():
    rollout = rollout_of(MIXED, group=[0, 0, 1, 1])
    estimation = Estimation(advantage=OptimalBaselineAdvantage(), whiten_advantages=False)
    tokens, turns = (experience(rollout, replace(estimation, credit=credit)) for credit in ("token", "turn"))
    torch.testing.assert_close(turns.advantages, tokens.advantages)


def test_the_critic_learns_at_first_tokens_and_the_policy_at_all():
    rollout = rollout_of(MIXED)
    estimation = Estimation(advantage=GeneralizedAdvantage(GAMMA, 0.8), gamma=GAMMA, credit="turn")
    found = experience(rollout, estimation)
    logprobs, values = (
        each.clone().requires_grad_() for each in (found.old_logprobs, drawn(*found.rewards.shape, seed=9))
    )
    objective = Objective(surrogate=CLIPPED, value_clip_range=None, value_coef=0.5)
    terms = objective(PolicyOutputs(logprobs, 0 * logprobs.detach(), values), found, objective.divisors(found))
    of_policy, of_critic = torch.autograd.grad(terms.loss, (logprobs, values))
    assert rollout.turn_starts is not None
    assert torch.equal(of_policy != 0, rollout.action_mask)
    assert torch.equal(of_critic != 0, rollout.turn_starts)
    number = int(rollout.turn_starts.sum())
    expected = torch.where(rollout.turn_starts, 0.5 * (values.detach() - found.returns) / number, 0.0)
    torch.testing.assert_close(of_critic, expected)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_by_turn_does_not_depend_on_the_split_into_micro_batches(aggregation):
    models = make_models("shared")
    assert models.policy.value_head is not None
    torch.nn.init.normal_(models.policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    floats = rollout_of(MIXED * 2, group=GROUPS)
    rollout = replace(floats, logprobs=floats.logprobs.float())
    estimation = Estimation(advantage=GeneralizedAdvantage(GAMMA, 0.8), gamma=GAMMA, credit="turn")
    found = experience(rollout, estimation)
    kept = {
        name: each.float()
        for name, each in vars(found).items()
        if isinstance(each, Tensor) and each.is_floating_point()
    }
    kept["old_logprobs"] = (
        models(rollout, temperature=1.0).logprobs.detach() + 0.1 * drawn(*found.rewards.shape, seed=3).float()
    )
    found = replace(found, **kept)
    objective = make_objective(ratio="turn", aggregation=aggregation, constant_length=9)
    whole, *others = (gradients(models, found, objective, tokens) for tokens in (None, 1, 15))
    assert any(bool(each.any()) for each in whole)
    for other in others:
        for one, two in zip(whole, other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)
