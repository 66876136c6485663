"""The TRPO update: one natural-gradient step of the policy within a KL, then the critic's passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kedge.algorithm.experience import PolicyOutputs
from kedge.algorithm.natural_gradient import (
    MatrixProduct,
    Tried,
    fisher_product,
    flat_gradient,
    line_search,
    natural_step,
)
from kedge.errors import ConfigError
from kedge.training.critic_pass import critic_pass, once
from kedge.training.guard.guard import StepCheck, refuse_nonfinite
from kedge.training.guard.nonfinite import search_minibatch
from kedge.training.learner import B, Batch, Learner
from kedge.training.metrics import MetricTotals, reduce_steps
from kedge.training.objective import Objective
from kedge.training.optimizer import parameters_of
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.update import EpochPass, UpdateResult, minibatches_of

__all__ = ["TrustRegion", "trpo_update"]


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """The settings of the policy's step; the defaults are those of sb3-contrib, with the paper's ten iterations.

    Attributes:
        max_kl: δ, largest mean KL from the old policy to the new one, nats.
        damping: Added to the diagonal of the Fisher matrix.
        iterations: Of the conjugate gradients.
        shrink: Each step that is tried is this much shorter than the one before.
        max_tries: Steps tried before the update is given up.
    """

    max_kl: float = 0.01
    damping: float = 0.1
    iterations: int = 10
    shrink: float = 0.8
    max_tries: int = 10


def trpo_update(
    learner: Learner[B],
    optimizer: Optimizer,
    experience: B,
    objective: Objective,
    *,
    region: TrustRegion,
    num_epochs: int,
    num_minibatches: int,
    generator: torch.Generator,
    max_grad_norm: float | None,
    check_step: StepCheck = refuse_nonfinite,
) -> UpdateResult:
    """Train policy and critic on one batch of experience.

    maximize the surrogate subject to mean KL(old‖new) ≤ δ: one step on all rows, without the optimizer
    for each of K epochs: shuffle the rows; for each of M minibatches: one step on the value term

    The step along the natural gradient is shortened until the measured KL is at most δ and the surrogate is better; if
    no length is, the policy keeps its weights to the bit. Of a policy and critic that share a trunk, the policy's step
    moves the trunk and the critic's passes train the value head alone, so that they do not change the KL.

    Args:
        learner: Evaluates policy and critic; its `PolicyOutputs.kl` is the analytic KL.
        optimizer: Of the learner's parameters; it takes the critic's steps.
        experience: The batch.
        objective: The total loss: its policy terms for the policy's step (TRPO's surrogate is the unclipped one), its
            value term for the critic's.
        region: The settings of the policy's step.
        num_epochs: K, the critic's passes.
        num_minibatches: M.
        generator: Random generator of the shuffles.
        max_grad_norm: Maximum norm of the critic's gradient; None or 0 disables clipping.
        check_step: Called before each step; False refuses the step and skips the rest of the update.

    Returns:
        A single step with the metrics of the policy's, measured before it but for `policy/approx_kl`, the analytic KL
        after it, and with the means of the critic's.

    Raises:
        ConfigError: The policy has no analytic KL, there are several processes, or there is nothing to train.
        NumericsError: From `check_step`; by default if a loss or gradient is not finite. The step was not taken.

    Source: TRPO (arXiv 1502.05477) eq. 14 and appendix C.
    """
    if not (objective.train_policy or learner.needs_values):
        raise ConfigError("there is no critic to warm up: the policy has none")
    if learner.ranks.are_several:
        raise ConfigError("TRPO runs in a single process: its step is one solve over the whole batch")
    result = UpdateResult()
    if objective.train_policy:
        _policy_step(learner, optimizer, objective.prepared(experience), objective, region, result, check_step)
    for _ in range(num_epochs if learner.needs_values and not result.refused else 0):
        steps, complete = critic_pass(
            learner,
            optimizer,
            experience,
            objective,
            minibatches_of(experience.num_rows, num_minibatches, generator),
            max_grad_norm=max_grad_norm,
            first_step=1 + len(result.critic_steps),
            check_step=check_step,
            repeated=once,
        )
        result.critic_steps += steps
        result.num_critic_gradients += len(steps) + (not complete)
        if not complete:
            result.refused = True
            break
    # All of the critic's training is in these passes: its metrics have the names that they have in PPO.
    critic, result.critic_steps = reduce_steps(result.critic_steps, {}), []
    result.steps = [{**each, **critic} for each in result.steps or [{}]] if critic else result.steps
    return result


def _policy_step(
    learner: Learner[B],
    optimizer: Optimizer,
    experience: B,
    objective: Objective,
    region: TrustRegion,
    result: UpdateResult,
    check_step: StepCheck,
) -> None:
    """Take the policy's step, if one is accepted, and record it."""
    parameters = [each for each in parameters_of(optimizer, critic=False) if each.requires_grad]
    epoch = EpochPass.empty(experience)
    result.passes.append(epoch)
    gradient, totals = _gradient(learner, experience, objective, parameters, epoch)
    before = {**totals.values(), "policy/grad_norm": float(gradient.norm())}
    result.num_gradients, result.reductions = 1, totals.reductions
    search = partial(search_minibatch, learner, objective, experience, range(experience.num_rows), parameters)
    if not check_step(0, before, search):
        result.refused = True
        return
    step = natural_step(
        _product(learner, experience, parameters),
        -gradient,
        max_kl=region.max_kl,
        damping=region.damping,
        iterations=region.iterations,
    )
    tried, after = Tried(0.0, 0.0, 0.0), before
    if step is not None:
        tried, after = _searched(learner, experience, objective, region, parameters, step, before)
    result.num_steps = int(tried.fraction > 0.0)
    result.steps.append(
        {
            **before,
            "policy/approx_kl": after["policy/approx_kl"],
            "trust_region/improvement": tried.improvement,
            "trust_region/step": tried.fraction,
        }
    )


def _searched(
    learner: Learner[B],
    experience: B,
    objective: Objective,
    region: TrustRegion,
    parameters: Sequence[nn.Parameter],
    step: Float[Tensor, " parameters"],
    before: dict[str, float],
) -> tuple[Tried, dict[str, float]]:
    """Move the policy along a step as far as the search allows; return that, and the metrics there."""
    old = [parameter.detach().clone() for parameter in parameters]
    moves = [move.view_as(each) for move, each in zip(step.split([each.numel() for each in old]), old, strict=True)]
    after = before

    def evaluate(fraction: float) -> tuple[float, float]:
        nonlocal after
        _assign(parameters, [each + fraction * move for each, move in zip(old, moves, strict=True)])
        after = _measured(learner, experience, objective)
        return before["loss/total"] - after["loss/total"], after["policy/approx_kl"]

    tried = line_search(evaluate, max_kl=region.max_kl, shrink=region.shrink, max_tries=region.max_tries)
    if not tried.fraction:
        _assign(parameters, old)
        after = before
    return tried, after


@torch.no_grad()
def _assign(parameters: Sequence[nn.Parameter], weights: Sequence[Tensor]) -> None:
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)


def _gradient(
    learner: Learner[B], experience: B, objective: Objective, parameters: Sequence[nn.Parameter], epoch: EpochPass
) -> tuple[Float[Tensor, " parameters"], MetricTotals]:
    """The gradient of the policy's terms over all rows, and their metrics."""
    divisors, totals = objective.divisors(experience), MetricTotals()
    gradients: list[Tensor] = []
    for rows, part in learner.micro_batches(experience):
        outputs = learner.evaluate(part)
        terms = objective(replace(outputs, values=None), part, divisors)
        gradients.append(flat_gradient(terms.loss, parameters))
        totals.add(terms.metrics)
        epoch.record(rows, outputs)
    return torch.stack(gradients).sum(0), totals


def _product(learner: Learner[B], experience: B, parameters: Sequence[nn.Parameter]) -> MatrixProduct:
    """Multiplication by the Fisher matrix of all rows."""

    def products() -> Iterator[MatrixProduct]:
        for _, part in learner.micro_batches(experience):
            yield fisher_product(_kl(learner.evaluate(part), part) / experience.action_mask.sum(), parameters)

    first = products()
    kept = next(first)
    if next(first, None) is None:
        return kept
    # Graphs of several parts would not fit into memory together, which is why there are several.
    return lambda vector: torch.stack([product(vector) for product in products()]).sum(0)


@torch.no_grad()
def _measured(learner: Learner[B], experience: B, objective: Objective) -> dict[str, float]:
    """The metrics of the policy's terms under the current weights; `policy/approx_kl` is the mean of an analytic KL."""
    divisors, totals = objective.divisors(experience), MetricTotals()
    for _, part in learner.micro_batches(experience):
        totals.add(objective(replace(learner.evaluate(part), values=None), part, divisors).metrics)
    return totals.values()


def _kl(outputs: PolicyOutputs, batch: Batch) -> Float[Tensor, ""]:
    """The KL from the old policy to the current one, summed over the actions, nats."""
    if outputs.kl is None:
        raise ConfigError("TRPO needs a policy with an analytic KL, which language models do not have; use PPO")
    return torch.where(batch.action_mask, outputs.kl, 0.0).sum()
