"""Fitting a critic to returns: padding, the loss, the explained variance of a step, and the head."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kedge.algorithm import explained_variance
from kedge.algorithm.experience import Rollout
from kedge.algorithm.readout import ReadoutSums, fit_readout
from kedge.models import ActorCritic, LanguageModel, ScalarModel
from kedge.training.supervised.loop import evaluate
from kedge.training.supervised.returns import (
    ReturnsLoss,
    SampledReturns,
    fit_head,
    measure_explained,
    with_explained,
)
from tests.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer


def sampled(prompt: int, time: int, *, seed: int, rows: int = 4) -> SampledReturns:
    """Random responses of several lengths, each the only one of its prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, time + 1, (rows, 1), generator=generator)
    lengths[0] = time
    mask = torch.arange(time) < lengths
    starts = torch.arange(prompt)[None] >= torch.randint(0, prompt, (rows, 1), generator=generator)
    rollout = Rollout(
        prompt_ids=torch.randint(3, 250, (rows, prompt), generator=generator) * starts,
        prompt_mask=starts,
        response_ids=torch.randint(3, 250, (rows, time), generator=generator) * mask,
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(rows, time),
        stopped=torch.ones(rows, dtype=torch.bool),
        group=torch.arange(rows) + 10 * seed,
        policy_version=torch.zeros(rows, dtype=torch.long),
    )
    returns = (rollout.response_ids % 7).float().flip(1).cumsum(1).flip(1) * mask + 30
    return SampledReturns(rollout, returns * mask, mask)


@pytest.fixture(scope="module")
def parts() -> list[SampledReturns]:
    return [sampled(3, 6, seed=1), sampled(5, 4, seed=2)]


def critic(kind: str) -> ActorCritic:
    tokenizer = tiny_tokenizer()
    model = LanguageModel(tiny_causal_lm(), tokenizer, value_head=kind == "shared")
    return ActorCritic(model, ScalarModel(tiny_reward_model(seed=4), tokenizer) if kind == "separate" else None)


def loss_of(actor_critic: ActorCritic, returns: SampledReturns) -> ReturnsLoss:
    return ReturnsLoss(actor_critic, returns, center=returns.mean, unit=returns.std)


def test_joined_parts_have_the_values_and_returns_that_they_had(parts: list[SampledReturns]) -> None:
    both, model = SampledReturns.joined(parts), critic("separate")
    with torch.no_grad():
        apart = torch.cat([model.values(part.rollout)[part.mask] for part in parts])
        together = model.values(both.rollout)[both.mask]
    torch.testing.assert_close(together, apart)
    assert torch.equal(both.returns[both.mask], torch.cat([part.returns[part.mask] for part in parts]))
    assert both.rollout.prompt_ids.shape[1] == 5
    assert both.returns.shape[1] == 6


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_the_loss_and_the_explained_variance_are_those_of_a_slow_loop(parts: list[SampledReturns], kind: str) -> None:
    both = SampledReturns.joined(parts)
    loss = loss_of(critic(kind), both)
    fit_head(loss, [0, 1, 2, 5, 6], micro_batch_tokens=16)
    with torch.no_grad():
        values = loss.actor_critic.values(both.rollout)
    rows, total, count = [1, 4, 6], 0.0, 0
    for row in rows:
        for slot in range(both.returns.shape[1]):
            if both.mask[row, slot]:
                total += 0.5 * (float(both.returns[row, slot] - values[row, slot]) / both.std) ** 2
                count += 1
    metrics = with_explained({f"eval/{k}": v for k, v in evaluate(loss, rows, micro_batch_tokens=9).items()})
    assert metrics["eval/loss"] == pytest.approx(total / count, rel=1e-4)  # float32 values of about 40
    expected = float(explained_variance(values[rows], both.returns[rows], both.mask[rows]))
    assert metrics["eval/explained_variance"] == pytest.approx(expected, abs=1e-4)
    assert set(metrics) == {"eval/loss", "eval/explained_variance"}
    assert measure_explained(loss, rows)["explained_variance"]["value"] == pytest.approx(expected, abs=1e-4)


def test_privileged_tokens_count_in_the_passes_that_read_them(parts: list[SampledReturns]) -> None:
    both, model = SampledReturns.joined(parts), critic("separate")
    hints = torch.randint(3, 250, (8, 20), generator=torch.Generator().manual_seed(3))
    known = torch.arange(20) < torch.tensor([20, 0, 3, 7, 20, 12, 1, 9])[:, None]
    loss = loss_of(model, replace(both, rollout=replace(both.rollout, privileged_ids=hints, privileged_mask=known)))
    assert model.critic is not None
    with mock.patch.object(model.critic, "read_values", side_effect=model.critic.read_values) as read:
        evaluate(loss, range(8), micro_batch_tokens=40)
    sizes = [len(call.args[0].ids) for call in read.call_args_list]
    # Not read: the last token of each response, after which no value is asked for.
    assert sum(sizes) == int(both.rollout.num_tokens + known.sum()) - 8
    assert max(sizes) <= 40


def test_a_head_is_fitted_to_the_slots_that_count_alone(parts: list[SampledReturns]) -> None:
    """As with credit by turn, where others have no return."""
    both, model = SampledReturns.joined(parts), critic("shared")
    counted = both.mask & (torch.arange(both.mask.shape[1]) % 2 == 0)
    loss = loss_of(model, replace(both, mask=counted, returns=torch.where(counted, both.returns, -1e6)))
    states = torch.zeros(*counted.shape, 64)[..., : model.value_states(both.rollout).shape[1]]
    states[both.mask] = model.value_states(both.rollout).detach()
    halves = [ReadoutSums.empty(states.shape[-1]) for _ in range(2)]
    for row, slot in counted.nonzero().tolist():
        target = both.returns[row, slot].double() - loss.center
        halves[int(both.rollout.group[row]) % 2].add(states[row, slot][None], target[None])
    expected = fit_readout(halves)
    assert fit_head(loss, range(8), micro_batch_tokens=16) == expected.penalty
    assert model.policy.value_head is not None
    torch.testing.assert_close(model.policy.value_head.weight[0].double(), expected.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_a_fitted_head_finds_returns_that_its_states_carry(parts: list[SampledReturns], kind: str) -> None:
    both, model = SampledReturns.joined(parts), critic(kind)
    states = model.value_states(both.rollout)
    truth = torch.linspace(-1, 1, states.shape[1])
    returns = both.returns.masked_scatter(both.mask, states.detach() @ truth - 12)
    loss = loss_of(model, replace(both, returns=returns * both.mask))
    before = [each.clone() for each in model.policy.causal.parameters()]
    fit_head(loss, range(8))
    explained = measure_explained(loss, range(8))
    assert explained["explained_variance"]["value"] > 0.97, "16 weights from about 25 slots"
    assert all(third is not None and third > 0.9 for third in explained["explained_by_third"])
    assert all(torch.equal(old, new) for old, new in zip(before, model.policy.causal.parameters(), strict=True))
