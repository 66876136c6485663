"""The TRPO update: one natural-gradient step of the policy within a KL limit, then the critic's passes.

Parameters, gradients and steps are flat vectors, in the order of the given parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from kedge.algorithm.experience import PolicyOutputs
from kedge.training.learner import B, Batch, Learner
from kedge.training.objective import Objective
from kedge.training.optimizer import parameters_of
from kedge.training.update import MetricTotals, PpoUpdate, UpdateResult, reduce_steps, search_minibatch

TOLERANCE = 1e-10
"""The share of |b|² at which |b − A·x|² is small enough to stop."""

MatrixProduct: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies a symmetric positive semi-definite matrix by a vector."""


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """The settings of the policy's step; the defaults are sb3-contrib's, with the paper's ten iterations.

    Attributes:
        max_kl: δ > 0, largest mean KL from the old policy to the new one, nats.
        damping: c ≥ 0, added to the diagonal of the Fisher matrix.
        iterations: Maximum iterations of conjugate gradients.
        shrink: β in (0, 1): factor between the lengths of consecutive tries.
        max_tries: Maximum number of steps that are tried, ≥ 1.
    """

    max_kl: float = 0.01
    damping: float = 0.1
    iterations: int = 10
    shrink: float = 0.8
    max_tries: int = 10


def trpo_update(update: PpoUpdate[B], region: TrustRegion) -> UpdateResult:
    """Train policy and critic on one batch of experience, in a single process.

    maximize the surrogate subject to mean KL(old‖new) ≤ δ: one step on all rows, without the optimizer
    for each of K epochs: shuffle the rows; for each of M minibatches: one step on the value term

    The step along the natural gradient is shortened until the measured KL is at most δ and the surrogate is better; if
    no length satisfies this, the policy's weights remain bit-identical. If policy and critic share a trunk, the
    policy's step moves the trunk, and the critic's passes only train the value head, so that they do not change the KL.

    Args:
        update: The batch, what is trained on it, and the critic's epochs. `PolicyOutputs.kl` of its learner is the
            analytic KL; TRPO's surrogate is the unclipped one.
        region: The settings of the policy's step.

    Returns:
        A single step with the policy's metrics, measured before the step except for `policy/approx_kl`, the analytic KL
        after it, and with the means of the critic's. Its `passes` remain empty.

    Raises:
        NumericsError: From `check_step`; by default if a loss or gradient is not finite. The step was not taken.

    Source: TRPO (arXiv 1502.05477) eq. 14 and appendix C.
    """
    result = update.result
    _policy_step(update, update.objective.prepared(update.experience), region)
    for _ in range(int(update.num_epochs)):
        update.take_critic_epoch()
    # These passes are the critic's entire training, so its metrics have the same names as in PPO.
    critic = reduce_steps(result.critic_steps, {})
    result.steps = [{**each, **critic} for each in result.steps]
    result.critic_steps = []
    return result


def _policy_step(update: PpoUpdate[B], experience: B, region: TrustRegion) -> None:
    """Take the policy's step, if one is accepted, and record it."""
    learner = update.learner
    objective = update.objective
    result = update.result
    parameters = [each for each in parameters_of(update.optimizer, critic=False) if each.requires_grad]
    gradient, totals = _gradient(learner, experience, objective, parameters)
    before = {**totals.values(), "policy/grad_norm": float(gradient.norm())}
    result.num_gradients = 1
    result.reductions = totals.reductions
    search = partial(
        search_minibatch, learner, objective, experience, range(len(experience.old_logprobs)), parameters, lambda: None
    )
    if not update.check_step(0, before, search):
        result.refused = True
        return
    product = _product(learner, experience, parameters)
    step = natural_step(product, -gradient, region)
    tried = Tried(0.0, 0.0, 0.0)
    if step is not None:
        tried = _searched(learner, experience, objective, region, parameters, step, before["loss/total"])
    result.num_steps = int(tried.fraction > 0.0)
    after = {
        "policy/approx_kl": tried.kl if tried.fraction else before["policy/approx_kl"],
        "trust_region/improvement": tried.improvement,
        "trust_region/step": tried.fraction,
    }
    result.steps.append({**before, **after})


def _searched(
    learner: Learner[B],
    experience: B,
    objective: Objective,
    region: TrustRegion,
    parameters: Sequence[nn.Parameter],
    step: Float[Tensor, " parameters"],
    loss: float,
) -> Tried:
    """Move the policy along a step as far as the line search allows."""
    old = parameters_to_vector(parameters).detach().clone()

    def evaluate(fraction: float) -> tuple[float, float]:
        _assign(parameters, old + fraction * step)
        metrics = _measured(learner, experience, objective)
        return loss - metrics["loss/total"], metrics["policy/approx_kl"]

    tried = line_search(evaluate, region)
    if not tried.fraction:
        _assign(parameters, old)
    return tried


@torch.no_grad()
def _assign(parameters: Sequence[nn.Parameter], weights: Float[Tensor, " parameters"]) -> None:
    for parameter, weight in zip(parameters, weights.split([each.numel() for each in parameters]), strict=True):
        parameter.copy_(weight.view_as(parameter))


def _gradient(
    learner: Learner[B], experience: B, objective: Objective, parameters: Sequence[nn.Parameter]
) -> tuple[Float[Tensor, " parameters"], MetricTotals]:
    """Compute the gradient of the policy's terms over all rows, and their metrics."""
    divisors = objective.divisors(experience)
    totals = MetricTotals()
    gradients: list[Tensor] = []
    for _, part in learner.micro_batches(experience):
        terms = objective(replace(learner.evaluate(part), values=None), part, divisors)
        gradients.append(flat_gradient(terms.loss, parameters))
        totals.add(terms.metrics)
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
    # The graphs of all parts would not fit into memory together; that is why there are several parts.
    return lambda vector: torch.stack([product(vector) for product in products()]).sum(0)


@torch.no_grad()
def _measured(learner: Learner[B], experience: B, objective: Objective) -> dict[str, float]:
    """The metrics of the policy's terms under the current weights; `policy/approx_kl` is the mean of an analytic KL."""
    divisors = objective.divisors(experience)
    totals = MetricTotals()
    for _, part in learner.micro_batches(experience):
        totals.add(objective(replace(learner.evaluate(part), values=None), part, divisors).metrics)
    return totals.values()


def _kl(outputs: PolicyOutputs, batch: Batch) -> Float[Tensor, ""]:
    """The KL from the old policy to the current one, summed over the actions, nats."""
    assert outputs.kl is not None, "TRPO needs a policy with an analytic KL"
    return torch.where(batch.action_mask, outputs.kl, 0.0).sum()


def flat_gradient(
    scalar: Float[Tensor, ""], parameters: Sequence[Tensor], *, keep: bool = False, create: bool = False
) -> Float[Tensor, " parameters"]:
    """Compute the gradient of a scalar as one vector; 0 for parameters on which it does not depend.

    Args:
        scalar: The function.
        parameters: Its arguments.
        keep: The scalar will be differentiated again.
        create: The gradient itself will be differentiated.
    """
    gradients = torch.autograd.grad(
        scalar, parameters, retain_graph=keep or create, create_graph=create, allow_unused=True, materialize_grads=True
    )
    return torch.cat([each.reshape(-1) for each in gradients])


def fisher_product(kl: Float[Tensor, ""], parameters: Sequence[Tensor]) -> MatrixProduct:
    """Multiplication by the Fisher matrix, without the matrix: F·v = ∇(∇KL · v).

    F is the Hessian of the KL where new and old policy are equal, so the KL must have been computed there. Parameters
    on which it does not depend, such as a value head's, have rows of 0.

    Args:
        kl: Mean KL from the old policy to the current one, nats; analytic, as an estimate has another Hessian.
        parameters: The policy's.

    Returns:
        v ↦ F·v. Every call is one backward pass.

    Source: TRPO appendix C.1; Pearlmutter 1994.
    """
    slope = flat_gradient(kl, parameters, create=True)
    return lambda vector: flat_gradient(slope @ vector, parameters, keep=True)


def conjugate_gradient(product: MatrixProduct, target: Float[Tensor, " n"], *, iterations: int) -> Float[Tensor, " n"]:
    """Solve A·x = b approximately, from x = 0.

    Each iteration minimizes ½·xᵀAx − bᵀx over one more direction that is conjugate to those before, so n iterations
    solve it exactly except for rounding.

    Args:
        product: v ↦ A·v; A is symmetric and positive definite.
        target: b.
        iterations: Largest number of products, ≥ 1.

    Source: Hestenes and Stiefel 1952; TRPO appendix C.
    """
    solution = torch.zeros_like(target)
    residual = direction = target.clone()
    squared = residual @ residual
    enough = TOLERANCE * squared
    for _ in range(iterations):
        if squared <= enough:
            break
        image = product(direction)
        length = squared / (direction @ image)
        solution = solution + length * direction
        residual = residual - length * image
        before = squared
        squared = residual @ residual
        direction = residual + squared / before * direction
    return solution


def natural_step(
    product: MatrixProduct, gradient: Float[Tensor, " n"], region: TrustRegion
) -> Float[Tensor, " n"] | None:
    """The step along the natural gradient at which the quadratic model of the KL is δ.

    (F + c·I)·s = g,   step = s·√(2δ / sᵀ(F + c·I)s)

    Args:
        product: v ↦ F·v.
        gradient: g, of the surrogate, which the step should increase.
        region: δ, and the damping c. It keeps the system solvable in directions that do not change the policy, and
            shortens the step.

    Returns:
        The step; None without one: the gradient is 0, or F is not finite.

    Source: TRPO appendix C; the damping is that of the authors' code.
    """

    def damped(vector: Tensor) -> Tensor:
        return product(vector) + region.damping * vector

    direction = conjugate_gradient(damped, gradient, iterations=region.iterations)
    curvature = float(direction @ damped(direction))
    if not (math.isfinite(curvature) and curvature > 0.0):
        return None
    return math.sqrt(2.0 * region.max_kl / curvature) * direction


class Tried(NamedTuple):
    """A step along the search direction.

    Attributes:
        fraction: Its length as a share of the full step, in (0, 1]; 0 if none was accepted.
        improvement: The surrogate minus that of the old policy; 0 if none was accepted.
        kl: Mean KL from the old policy to the new one, nats; 0 if none was accepted.
    """

    fraction: float
    improvement: float
    kl: float


def line_search(evaluate: Callable[[float], tuple[float, float]], region: TrustRegion) -> Tried:
    """The longest of the steps 1, β, β², … that stays within the KL and improves the surrogate.

    Args:
        evaluate: Fraction of the full step ↦ improvement of the surrogate, and mean KL in nats. The last call is that
            of the accepted step.
        region: δ, which an accepted step's KL does not exceed; β; and the number of steps that are tried.

    Returns:
        The first step accepted; its fraction is 0 if all are rejected. NaN is never accepted.

    Source: TRPO appendix C.
    """
    for attempt in range(region.max_tries):
        fraction = region.shrink**attempt
        improvement, kl = evaluate(fraction)
        if improvement > 0.0 and kl <= region.max_kl:
            return Tried(fraction, improvement, kl)
    return Tried(0.0, 0.0, 0.0)
