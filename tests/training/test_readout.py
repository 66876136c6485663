"""The read-out of a policy's states against ridge regression by hand, and what it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.algorithm.experience import Experience
from kedge.algorithm.readout import PENALTIES
from kedge.models import ActorCritic, LanguageModel
from kedge.training.optimizer import build_optimizer
from kedge.training.readout import Readout, second_half
from kedge.training.update import PpoUpdate
from tests.tiny import tiny_causal_lm, tiny_tokenizer
from tests.training.test_update import PROMPTS, make_experience, make_learner, make_objective

SCORES = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0, -2.0, 1.5, 0.3])
Examples = tuple[Tensor, Tensor, Tensor, Tensor]
"""States, returns, weights, and True in the second half."""


def models_with_readout() -> ActorCritic:
    policy = LanguageModel(tiny_causal_lm("llama"), tiny_tokenizer(), value_head=True)
    return ActorCritic(policy, value_gradient="none")


def head_of(models: ActorCritic) -> nn.Linear:
    head = models.value_head
    assert isinstance(head, nn.Linear)
    return head


def sums_of(models: ActorCritic) -> Tensor:
    assert models.readout is not None
    return models.readout


def update(models: ActorCritic, experience: Experience, *, num_batches: int = 4, **settings: Any) -> None:
    """Train the policy, and refit its read-out."""
    learning = {name: settings.pop(name) for name in ("micro_batch_tokens", "value_after_last") if name in settings}
    learner = make_learner(models, **learning)
    readout = Readout(learner, experience, num_batches=num_batches)
    optimizer = build_optimizer(models.parameters(), learning_rate=1e-2)
    settings = {"num_epochs": 2, "num_minibatches": 1, "max_grad_norm": 1.0, **settings}
    generator = torch.Generator().manual_seed(0)
    PpoUpdate(
        learner, optimizer, experience, make_objective(), generator=generator, read_states=readout.read, **settings
    ).run()
    readout.fit()


def examples_of(models: ActorCritic, experience: Experience, weight: float, *, after_last: bool) -> Examples:
    mask = experience.reward_mask
    with torch.no_grad():
        states = models.value_states(experience.rollout, value_after_last=after_last).double()
    states = states[mask[mask | experience.action_mask]]
    half = second_half(experience.rollout)[:, None].expand(mask.shape)[mask]
    return states, experience.returns[mask].double(), torch.full((len(states),), weight, dtype=torch.float64), half


def weighted_ridge(states: Tensor, returns: Tensor, weights: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Least squares with one further row √(λΣw) per feature, the textbook's augmented data."""
    dim = states.shape[1]
    rows = torch.cat([states, torch.ones(len(states), 1, dtype=torch.float64)], dim=1) * weights.sqrt()[:, None]
    more = torch.cat([torch.eye(dim, dtype=torch.float64), torch.zeros(dim, 1, dtype=torch.float64)], dim=1)
    targets = torch.cat([returns * weights.sqrt(), torch.zeros(dim, dtype=torch.float64)])
    system = torch.cat([rows, more * (penalty * weights.sum()).sqrt()])
    solution = torch.linalg.lstsq(system, targets, driver="gelsd").solution
    return solution[:-1], solution[-1]


def by_hand(batches: list[Examples]) -> tuple[Tensor, Tensor]:
    """The ridge regression whose penalty is the best of those with which each half predicts the other."""
    states, returns, weights, half = (torch.cat(parts) for parts in zip(*batches, strict=True))
    mean = (weights[:, None] * states).sum(0) / weights.sum()
    unit = float(((weights[:, None] * (states - mean) ** 2).sum(0) / weights.sum()).mean())

    def error(penalty: float, fitted: Tensor) -> float:
        weight, offset = weighted_ridge(states[fitted], returns[fitted], weights[fitted], penalty)
        return float((weights * (returns - states @ weight - offset) ** 2)[~fitted].sum())

    penalty = min((each * unit for each in PENALTIES), key=lambda each: error(each, half) + error(each, ~half))
    return weighted_ridge(states, returns, weights, penalty)


@pytest.mark.parametrize("micro_batch_tokens", [None, 16])
@pytest.mark.parametrize(("after_last", "credit"), [(False, "token"), (True, "token"), (True, "turn")])
def test_the_head_is_the_ridge_regression_of_recent_states_by_hand(
    micro_batch_tokens: int | None, after_last: bool, credit: str
) -> None:
    models = models_with_readout()
    score_at = "after_last" if after_last else "last"
    batches: list[Examples] = []
    for scores in (SCORES, SCORES.flip(0)):
        experience = make_experience(models, scores=scores, score_at=score_at, credit=credit)
        # Of three batches: the one before counts half of the newest.
        batches = [(states, returns, 0.5 * weights, half) for states, returns, weights, half in batches]
        batches.append(examples_of(models, experience, 1.0, after_last=after_last))
        before = head_of(models).weight.clone()
        settings = {"micro_batch_tokens": micro_batch_tokens, "value_after_last": after_last}
        update(models, experience, num_batches=3, **settings)
        weight, offset = by_hand(batches)
        assert not torch.equal(head_of(models).weight, before)
        torch.testing.assert_close(head_of(models).weight[0].double(), weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(head_of(models).bias[0].double(), offset, rtol=1e-4, atol=1e-6)


def test_a_row_counts_once_in_any_number_of_epochs_and_minibatches() -> None:
    models = models_with_readout()
    experience = make_experience(models, scores=SCORES)
    update(models, experience, num_epochs=3, num_minibatches=4, micro_batch_tokens=16)
    assert float(sums_of(models)[:, -1].sum()) == int(experience.reward_mask.sum())
    assert float(sums_of(models)[:, -3].sum()) == pytest.approx(float(experience.returns[experience.reward_mask].sum()))


def test_one_batch_keeps_nothing_of_those_before() -> None:
    models = models_with_readout()
    update(models, make_experience(models, scores=SCORES.flip(0)), num_batches=1)
    fresh = copy.deepcopy(models)
    sums_of(fresh).zero_()
    experience = make_experience(models, scores=SCORES)
    for each in (models, fresh):
        update(each, experience, num_batches=1)
    assert torch.equal(head_of(models).weight, head_of(fresh).weight)


def test_the_policy_is_trained_as_without_a_critic() -> None:
    """To the bit, with the same advantages; the head gets no gradient and no optimizer state."""
    models = models_with_readout()
    experience = make_experience(models, scores=SCORES)
    plain = copy.deepcopy(models)
    plain.policy.value_head = None
    plain = ActorCritic(plain.policy)
    learner = make_learner(plain)
    optimizer = build_optimizer(plain.parameters(), learning_rate=1e-2)
    generator = torch.Generator().manual_seed(0)
    PpoUpdate(
        learner, optimizer, experience, make_objective(),
        generator=generator, num_epochs=2, num_minibatches=1, max_grad_norm=1.0,
    ).run()  # fmt: skip
    update(models, experience, num_epochs=2, num_critic_epochs=3)
    pairs = zip(models.policy.causal.parameters(), plain.policy.causal.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert all(each.grad is None and not each.requires_grad for each in models.critic_parameters())


def test_passes_of_its_own_read_the_same_states() -> None:
    """As while the policy waits for the critic."""
    models = models_with_readout()
    experience = make_experience(models, scores=SCORES)
    alone = copy.deepcopy(models)
    readout = Readout(make_learner(alone, micro_batch_tokens=16), experience, num_batches=4)
    readout.read_all()
    readout.read_all()  # repeated with smaller passes, as when memory runs out: each row still counts once
    readout.fit()
    update(models, experience, num_epochs=1)
    torch.testing.assert_close(head_of(alone).weight, head_of(models).weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sums_of(alone), sums_of(models), rtol=1e-5, atol=1e-5)


def test_states_that_are_not_finite_leave_head_and_sums_as_they_are() -> None:
    models = models_with_readout()
    experience = make_experience(models, scores=SCORES)
    before = copy.deepcopy(models)
    readout = Readout(make_learner(models), experience, num_batches=4)
    states = models.value_states(experience.rollout)
    readout.read(torch.arange(len(PROMPTS)), states * torch.nan)
    readout.fit()
    assert torch.equal(head_of(models).weight, head_of(before).weight)
    assert torch.equal(sums_of(models), sums_of(before))


def test_responses_to_a_prompt_are_in_one_half_unless_it_is_the_only_one() -> None:
    rollout = make_experience(models_with_readout(), scores=SCORES).rollout
    for groups, half in ([0, 0, 1, 1], [False, False, True, True]), ([2, 2, 2, 2], [False, True, False, True]):
        chosen = rollout.select(torch.arange(4))
        chosen.group[:] = torch.tensor(groups)
        assert second_half(chosen).tolist() == half
