"""The TRPO update on tiny policies: against a dense solution, and what it leaves alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence

from kedge.algorithm.experience import CriticOutputs, PolicyOutputs
from kedge.algorithm.policy_losses import unclipped_policy_loss
from kedge.ranks import ALONE, Ranks
from kedge.training.learner import T
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer
from kedge.training.update import PpoUpdate, UpdateResult
from kedge_base.errors import NumericsError
from kedge_control.trpo import TrustRegion, trpo_update

OBJECTIVE = Objective(surrogate=unclipped_policy_loss, value_clip_range=None, value_coef=1.0)


@dataclass(frozen=True)
class Transitions:
    """One row per decision; `old` are the parameters of the distribution that it was drawn from."""

    states: Tensor
    actions: Tensor
    old: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    action_mask: Tensor
    ref_logprobs: None = None
    importance_weights: None = None
    positive: None = None

    @property
    def num_rows(self) -> int:
        return len(self.states)

    @property
    def reward_mask(self) -> Tensor:
        return self.action_mask

    def select(self, rows: Tensor | slice) -> Transitions:
        tensors = {name: each[rows] for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **tensors)

    def with_advantages(self, advantages: Tensor) -> Transitions:
        return replace(self, advantages=advantages)


class TinyLearner(nn.Module):
    """A policy with one hidden layer, softmax or Gaussian, and a critic, which may share the layer."""

    needs_values = True
    ranks: Ranks = ALONE

    def __init__(self, kind: str = "gaussian", *, shared: bool = False, rows_per_part: int = 1000) -> None:
        super().__init__()
        self.kind, self.rows_per_part = kind, rows_per_part
        self.trunk, self.head = nn.Linear(3, 5), nn.Linear(5, 2 if kind == "gaussian" else 3)
        self.value_trunk = None if shared else nn.Linear(3, 5)
        self.value_head = nn.Linear(5, 1)
        self.log_std = nn.Parameter(torch.tensor([-0.5, 0.3])) if kind == "gaussian" else None

    def distribution(self, outputs: Tensor) -> Distribution:
        if self.kind == "softmax":
            return Categorical(logits=outputs)
        mean, log_std = outputs.chunk(2, -1)
        return Independent(Normal(mean, log_std.exp()), 1)

    def outputs(self, states: Tensor) -> Tensor:
        outputs = self.head(self.trunk(states).tanh())
        return outputs if self.log_std is None else torch.cat([outputs, self.log_std.expand_as(outputs)], -1)

    def values(self, states: Tensor, *, head_alone: bool = False) -> Tensor:
        features = (self.value_trunk or self.trunk)(states).tanh()
        return self.value_head(features.detach() if head_alone and self.value_trunk is None else features)

    def repeated(self, batch: Transitions, attempt: Callable[[], T]) -> T:
        return attempt()

    def micro_batches(self, batch: Transitions) -> Iterator[tuple[Tensor, Transitions]]:
        for rows in torch.arange(batch.num_rows).split(self.rows_per_part):
            yield rows, batch.select(rows)

    def evaluate(self, batch: Transitions) -> PolicyOutputs:
        outputs = self.outputs(batch.states)
        new = self.distribution(outputs)
        return PolicyOutputs(
            logprobs=new.log_prob(batch.actions)[:, None],
            entropy=new.entropy()[:, None],
            values=self.values(batch.states),
            kl=kl_divergence(self.distribution(batch.old), new)[:, None],
        )

    def evaluate_critic(self, batch: Transitions) -> CriticOutputs:
        return CriticOutputs(values=self.values(batch.states, head_alone=True))

    def policy_weights(self) -> list[nn.Parameter]:
        return [each for name, each in self.named_parameters() if not name.startswith("value")]


def make_learner(kind: str = "gaussian", *, seed: int = 0, double: bool = True, **options: Any) -> TinyLearner:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        learner = TinyLearner(kind, **options)
    return learner.double() if double else learner


def make_batch(learner: TinyLearner, rows: int = 60, seed: int = 0) -> Transitions:
    draw = torch.Generator().manual_seed(seed)
    dtype = learner.head.weight.dtype
    states = torch.randn(rows, 3, generator=draw, dtype=dtype)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        old = learner.outputs(states)
        distribution = learner.distribution(old)
        actions = distribution.sample()
        values = learner.values(states)
    advantages, noise = torch.randn(rows, 1, generator=draw, dtype=dtype), torch.randn(rows, 1, generator=draw)
    return Transitions(
        states=states,
        actions=actions,
        old=old,
        old_logprobs=distribution.log_prob(actions)[:, None],
        advantages=advantages,
        returns=values + noise,
        values=values,
        action_mask=torch.ones(rows, 1, dtype=torch.bool),
    )


def updated(
    learner: TinyLearner, batch: Transitions, objective: Objective = OBJECTIVE, **settings: Any
) -> tuple[TinyLearner, UpdateResult]:
    """A copy of the learner after an update, and its result."""
    learner = copy.deepcopy(learner)
    critic = (
        [] if learner.value_trunk is None else [*learner.value_trunk.parameters(), *learner.value_head.parameters()]
    )
    optimizer = build_optimizer(learner.parameters(), learning_rate=1e-2, critic_parameters=critic)
    region, passes = settings.pop("region", TrustRegion()), settings.pop("num_epochs", 2)
    options = {"num_minibatches": 3, "max_grad_norm": None, "generator": torch.Generator().manual_seed(0), **settings}
    update = PpoUpdate(learner, optimizer, batch, objective, num_epochs=passes, **options)
    return learner, trpo_update(update, region)


def kl_of(learner: TinyLearner, batch: Transitions) -> float:
    with torch.no_grad():
        new = learner.distribution(learner.outputs(batch.states))
        return float(kl_divergence(learner.distribution(batch.old), new).mean())


def dense_step(learner: TinyLearner, batch: Transitions, region: TrustRegion) -> Tensor:
    """The policy's step by TRPO's formulas with an explicit Fisher matrix and an exact solution.

    The matrix is the expected square of the score: over all actions of the softmax policy; for the Gaussian, from the
    derivatives of its mean and log σ, with the Fisher matrix of a normal distribution (1/σ² and 2).
    """
    parameters, rows = learner.policy_weights(), batch.num_rows

    def gradient(scalar: Tensor) -> Tensor:
        found = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        return torch.cat([each.flatten() for each in found])

    outputs = learner.outputs(batch.states)
    size = sum(each.numel() for each in parameters)
    matrix = region.damping * torch.eye(size, dtype=torch.float64)
    for row in outputs:
        if learner.kind == "softmax":
            logprobs = row.log_softmax(-1)
            weighted = [(logprob.detach().exp(), gradient(logprob)) for logprob in logprobs]
        else:
            mean, log_std = row.chunk(2)
            weighted = [((-2 * log_std[k]).exp().detach(), gradient(mean[k])) for k in range(2)]
            weighted += [(2.0, gradient(log_std[k])) for k in range(2)]
        matrix = matrix + sum(weight * torch.outer(score, score) for weight, score in weighted) / rows
    logprobs = learner.distribution(outputs).log_prob(batch.actions)
    target = sum((a * gradient(each) for a, each in zip(batch.advantages[:, 0], logprobs, strict=True)), 0.0) / rows
    direction = torch.linalg.solve(matrix, target)
    return direction * math.sqrt(2 * region.max_kl / float(direction @ matrix @ direction))


@pytest.mark.parametrize("kind", ["softmax", "gaussian"])
def test_the_step_is_that_of_an_explicit_fisher_matrix(kind: str):
    learner = make_learner(kind)
    batch, region = make_batch(learner), TrustRegion(iterations=100)
    full = dense_step(learner, batch, region)
    after, result = updated(learner, batch, region=region, num_epochs=0)
    pairs = zip(after.policy_weights(), learner.policy_weights(), strict=True)
    step = torch.cat([(new - old).detach().flatten() for new, old in pairs])
    fraction = result.steps[0]["trust_region/step"]
    assert fraction in [pytest.approx(0.8**k) for k in range(10)]
    assert float((step - fraction * full).norm()) < 1e-4 * float(full.norm())
    # The first fraction that satisfies both conditions is taken: the one before it does not.
    assert kl_of(after, batch) == pytest.approx(result.metrics()["policy/approx_kl"])
    assert kl_of(after, batch) <= region.max_kl
    assert fraction < 1.0 or kl_of(after, batch) > 0.5 * region.max_kl


@pytest.mark.parametrize("max_kl", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("kind", ["softmax", "gaussian"])
def test_every_accepted_update_stays_within_the_kl_and_improves_the_surrogate(kind: str, max_kl: float):
    """With little damping, so that the quadratic model is often too optimistic and the step has to be shortened."""
    fractions: list[float] = []
    for seed in range(6):
        learner = make_learner(kind, seed=seed, double=False)
        batch = make_batch(learner, seed=seed)
        after, result = updated(learner, batch, region=TrustRegion(max_kl=max_kl, damping=1e-3), num_epochs=0)
        fractions.append(result.steps[0]["trust_region/step"])
        if result.num_steps:
            new = after.evaluate(batch).logprobs.detach()
            gain = float((((new - batch.old_logprobs).exp() - 1) * batch.advantages).mean())
            assert kl_of(after, batch) <= max_kl * (1 + 1e-5)
            assert gain == pytest.approx(result.steps[0]["trust_region/improvement"], rel=1e-3, abs=1e-6)
            assert gain > 0.0
    assert sum(each > 0.0 for each in fractions) >= 5
    assert any(0.0 < each < 1.0 for each in fractions), fractions


def test_a_search_that_finds_nothing_leaves_the_weights_to_the_bit():
    """Without damping and with one row's advantage alone, the quadratic model is far off: one try is not enough."""
    learner = make_learner("softmax", double=False)
    batch = make_batch(learner)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages).index_fill(0, torch.tensor([7]), 50.0))
    after, result = updated(learner, batch, region=TrustRegion(max_kl=5.0, damping=0.0, max_tries=1), num_epochs=1)
    metrics = result.metrics()
    assert (result.num_steps, metrics["trust_region/step"], metrics["policy/approx_kl"]) == (0, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(after.policy_weights(), learner.policy_weights(), strict=True))
    assert not torch.equal(after.value_head.weight, learner.value_head.weight)  # the critic's passes are taken


def test_without_advantages_there_is_no_step():
    learner = make_learner()
    batch = make_batch(learner)
    after, result = updated(learner, batch.with_advantages(torch.zeros_like(batch.advantages)))
    assert result.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(after.policy_weights(), learner.policy_weights(), strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_the_critics_passes_do_not_move_the_policy(shared: bool):
    learner = make_learner(shared=shared)
    batch = make_batch(learner)
    alone, _ = updated(learner, batch, num_epochs=0)
    both, result = updated(learner, batch, num_epochs=5)
    assert all(torch.equal(a, b) for a, b in zip(alone.policy_weights(), both.policy_weights(), strict=True))
    assert torch.equal(alone.value_head.weight, learner.value_head.weight)
    error = [float((each.values(batch.states) - batch.returns).square().mean().detach()) for each in (alone, both)]
    assert error[1] < error[0]
    assert result.metrics()["value/loss"] < error[0]
    assert result.num_critic_gradients == 15


def test_the_update_does_not_depend_on_the_split_into_micro_batches():
    whole, parts = make_learner(), make_learner(rows_per_part=17)
    batch = make_batch(whole)
    one, few = updated(whole, batch)
    two, many = updated(parts, batch)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert few.metrics() == pytest.approx(many.metrics())


def test_a_step_that_the_guard_refuses_is_not_taken():
    learner = make_learner()
    batch = make_batch(learner)
    poisoned = batch.with_advantages(torch.full_like(batch.advantages, math.nan))
    with pytest.raises(NumericsError):
        updated(learner, poisoned)
    seen: list[int] = []

    def refuse(step: int, figures: Mapping[str, float], search: object) -> bool:
        seen.append(step)
        return step < 2

    after, result = updated(learner, batch, check_step=refuse)
    assert (seen, result.refused, result.num_steps) == ([0, 1, 2], True, 1)
    after, result = updated(learner, batch, check_step=lambda *_: False)
    assert result.refused
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), learner.parameters(), strict=True))
