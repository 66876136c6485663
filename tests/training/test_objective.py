"""The total loss of one step against a loop over its tokens, and its split over ranks."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from kedge.algorithm.critic import Bins
from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout
from kedge.algorithm.policy_losses import clipped_policy_loss
from tests.training.test_update import make_experience, make_models, make_objective

MASK = torch.tensor([[True, True, True], [True, False, False]])
GARBAGE = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1e9, -1e9]])


def draw(seed: int, mean: float = 0.0) -> torch.Tensor:
    """One number per token, with garbage in the padding."""
    noise = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    return torch.where(MASK, mean + 0.4 * noise, GARBAGE)


def outputs_of_row(outputs: PolicyOutputs, row: int) -> PolicyOutputs:
    """The outputs of one row, as a micro-batch of its own."""
    parts = (outputs.logprobs, outputs.entropy, outputs.values, outputs.value_logits)
    logprobs, entropy, values, logits = (None if part is None else part[row : row + 1] for part in parts)
    assert logprobs is not None
    assert entropy is not None
    return PolicyOutputs(logprobs, entropy, values, logits)


@pytest.fixture
def experience() -> Experience:
    ids = torch.full((2, 3), 5)
    rows = torch.arange(2)
    rollout = Rollout(ids, MASK | True, ids, MASK, MASK, draw(0, -1.0), rows >= 0, group=rows, policy_version=0 * rows)
    return Experience(
        rollout=rollout,
        scores=torch.zeros(2),
        old_logprobs=draw(1, -1.0),
        ref_logprobs=draw(2, -1.0),
        values=draw(3),
        rewards=draw(4),
        reward_mask=MASK,
        advantages=draw(5),
        returns=draw(6),
    )


def test_the_total_is_the_weighted_sum_of_its_terms(experience):
    outputs = PolicyOutputs(logprobs=draw(7, -1.0), entropy=draw(8, 2.0), values=draw(9))
    policy = value = entropy = kl = 0.0
    for row, time in MASK.nonzero().tolist():
        at = lambda x, row=row, time=time: x[row, time].item()  # noqa: E731
        ratio, advantage = math.exp(at(outputs.logprobs) - at(experience.old_logprobs)), at(experience.advantages)
        policy -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) / 4
        old, target = at(experience.values), at(experience.returns)
        held = min(max(at(outputs.values), old - 0.2), old + 0.2)
        value += 0.5 * max((at(outputs.values) - target) ** 2, (held - target) ** 2) / 4
        entropy += at(outputs.entropy) / 4
        kl += 0.5 * (at(outputs.logprobs) - at(experience.ref_logprobs)) ** 2 / 4
    objective = make_objective(value_coef=0.3, entropy_coef=0.7, kl_coef=0.9)
    divisors = objective.divisors(experience)
    terms = objective(outputs, experience, divisors)
    assert terms.loss.item() == pytest.approx(policy + 0.3 * value - 0.7 * entropy + 0.9 * kl, abs=1e-5)
    expected = {"policy/loss": policy, "value/loss": value, "policy/entropy": entropy, "loss/total": terms.loss.item()}
    assert {name: terms.metrics[name].value for name in expected} == pytest.approx(expected, abs=1e-5)
    warm_up = replace(objective, train_policy=False)(outputs, experience, divisors)
    assert warm_up.loss.item() == pytest.approx(0.3 * value, abs=1e-5)


def test_a_histograms_loss_has_no_unit_and_no_clip(experience):
    bins = Bins(-0.5, 0.5, 4)
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(10))
    outputs = PolicyOutputs(draw(7, -1.0), draw(8, 2.0), bins.expectation(logits), logits)
    objective = make_objective(value_coef=0.3, value_bins=bins, train_policy=False)
    divisors = objective.divisors(experience)
    # Two micro-batches of one row: each adds its share.
    terms = [
        objective(outputs_of_row(outputs, row), experience.select(slice(row, row + 1)), divisors) for row in (0, 1)
    ]
    loss = outside = 0.0
    for row, time in MASK.nonzero().tolist():
        target, scores = experience.returns[row, time], logits[row, time]
        loss -= float(bins.target(target) @ scores.log_softmax(-1)) / 4
        outside += float(abs(target) > 0.5) / 4
    assert 0 < outside < 1
    assert sum(float(each.loss) for each in terms) == pytest.approx(0.3 * loss, abs=1e-5)
    metrics = {name: sum(float(each.metrics[name].value) for each in terms) for name in terms[0].metrics}
    assert (metrics["value/loss"], metrics["value/outside_support"]) == pytest.approx((loss, outside), abs=1e-5)
    assert "value/clip_fraction" not in metrics


def test_the_share_that_the_dual_clip_bounds_is_a_metric_where_there_is_one(experience):
    outputs = PolicyOutputs(logprobs=draw(7, -1.0), entropy=draw(8, 2.0), values=None)
    plain = make_objective()
    bounded = replace(plain, surrogate=partial(clipped_policy_loss, clip_range=0.2, dual_clip=1.01))
    divisors = plain.divisors(experience)
    terms = [bounded(outputs_of_row(outputs, row), experience.select(slice(row, row + 1)), divisors) for row in (0, 1)]
    held = 0
    for row, time in MASK.nonzero().tolist():
        rho = math.exp(outputs.logprobs[row, time] - experience.old_logprobs[row, time])
        held += experience.advantages[row, time].item() < 0 and rho > 1.01
    assert 0 < held < 4
    name = "policy/dual_clip_fraction"
    assert sum(float(each.metrics[name].value) for each in terms) == pytest.approx(held / 4)
    assert name not in plain(outputs, experience, divisors).metrics


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_imitation_is_the_token_mean_over_the_positive_examples_alone(experience, aggregation):
    outputs = PolicyOutputs(logprobs=draw(7, -1.0), entropy=draw(8, 2.0), values=None)
    plain = make_objective(aggregation=aggregation)
    objective = replace(plain, positive_nll_coef=0.1)
    for rows in ([0], [1], [0, 1], []):
        known = replace(experience, positive=torch.tensor([0 in rows, 1 in rows]))
        divisors = objective.divisors(known)
        expected, count = 0.0, sum(row in rows for row, _ in MASK.nonzero().tolist())
        for row, time in MASK.nonzero().tolist():
            if row in rows:
                expected -= 0.1 * outputs.logprobs[row, time].item() / count
        terms = objective(outputs, known, divisors)
        assert terms.metrics["loss/positive_nll"].value.item() == pytest.approx(expected, abs=1e-6)
        without = plain(outputs, known, divisors).loss.item()
        assert terms.loss.item() == pytest.approx(without + expected, abs=1e-6)
        parts = [objective(outputs_of_row(outputs, row), known.select(slice(row, row + 1)), divisors) for row in (0, 1)]
        shares = [part.metrics["loss/positive_nll"].value.item() for part in parts]
        assert sum(shares) == pytest.approx(expected, abs=1e-6)
    warm_up = replace(objective, train_policy=False)(replace(outputs, values=draw(9)), experience, divisors)
    assert "loss/positive_nll" not in warm_up.metrics


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_summed_over_ranks_is_that_of_the_whole_minibatch(aggregation):
    models = make_models("separate")
    minibatch = make_experience(models)
    objective = make_objective(aggregation=aggregation, constant_length=10 if aggregation == "constant" else None)

    def gradient(rows: slice) -> list[torch.Tensor]:
        """What a rank with these rows contributes: a replica of the models, the whole minibatch's divisors."""
        replica = copy.deepcopy(models)
        part = minibatch.select(rows)
        objective(replica(part.rollout, temperature=1.0), part, objective.divisors(minibatch)).loss.backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in replica.parameters()]

    whole = gradient(slice(0, 8))
    assert sum(float(part.abs().sum()) for part in whole) > 0
    ranks = [gradient(rows) for rows in (slice(0, 2), slice(2, 3), slice(3, 8))]
    for expected, *shares in zip(whole, *ranks, strict=True):
        torch.testing.assert_close(torch.stack(shares).sum(0), expected, atol=1e-6, rtol=1e-4)
