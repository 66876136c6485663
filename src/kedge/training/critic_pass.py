"""Passes over an update's experience that train the critic alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

from jaxtyping import Int
from torch import Tensor

from kedge.training.guard.guard import StepCheck
from kedge.training.guard.nonfinite import search_minibatch
from kedge.training.learner import B, Learner, T
from kedge.training.metrics import MetricTotals
from kedge.training.objective import Objective
from kedge.training.optimizer import clip_gradients, scale_output_gradients
from kedge.training.optimizer_kinds import Optimizer

__all__ = ["Repeated", "critic_pass", "once"]


class Repeated(Protocol[B]):
    """Makes all passes over a batch, and where memory runs out, makes them again in smaller parts."""

    def __call__(self, batch: B, attempt: Callable[[], T], /) -> T:
        """The result of the attempt."""
        ...


def once(batch: B, attempt: Callable[[], T]) -> T:
    """Makes all passes once."""
    return attempt()


def critic_pass(
    learner: Learner[B],
    optimizer: Optimizer,
    experience: B,
    objective: Objective,
    minibatches: Iterable[Int[Tensor, " rows"]],
    *,
    max_grad_norm: float | None,
    first_step: int,
    check_step: StepCheck,
    repeated: Repeated[B],
) -> tuple[list[dict[str, float]], bool]:
    """One step on the value term per minibatch, on the parameters that only the critic has.

    The policy is not evaluated, and no gradient reaches it: of a shared trunk only the forward pass is computed. Its
    weights, moments and step counts stay as they are.

    Args:
        learner: Evaluates the critic.
        optimizer: Of the learner's parameters.
        experience: The batch.
        objective: The total loss, of which the value term is used.
        minibatches: The rows of each step.
        max_grad_norm: Maximum norm of the critic's gradient; None or 0 disables clipping.
        first_step: Number of the first step within the update, for `check_step`.
        check_step: Called before each step; False refuses the step and ends the pass.
        repeated: As for `ppo_update`.

    Returns:
        The metrics of each step taken, and whether all were taken.

    Source: SAO (arXiv 2607.07508) §3.2: two passes. Open-Reasoner-Zero (arXiv 2503.24290) takes 12 critic steps for
        each one of the policy, on the minibatches of one pass. Spec §6.31.
    """
    steps: list[dict[str, float]] = []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for shuffled in minibatches:
        rows = shuffled.to(experience.old_logprobs.device)
        minibatch = experience.select(rows)
        totals = repeated(minibatch, partial(_gradients, learner, optimizer, objective, minibatch))
        learner.ranks.sum_gradients(parameters)
        scale_output_gradients(optimizer)
        trained = [each for each in parameters if each.grad is not None]
        metrics = {
            **totals.values(learner.ranks),
            "value/grad_norm": clip_gradients(trained, max_grad_norm, learner.ranks),
        }
        alone = replace(objective, train_policy=False)
        search = partial(search_minibatch, learner, alone, minibatch, rows.tolist(), parameters)
        if not check_step(first_step + len(steps), metrics, search):
            return steps, False
        optimizer.step()
        steps.append(metrics)
    return steps, True


def _gradients(learner: Learner[B], optimizer: Optimizer, objective: Objective, minibatch: B) -> MetricTotals:
    """The critic's gradients of this rank's micro-batches."""
    divisors, totals = objective.divisors(minibatch), MetricTotals()
    optimizer.zero_grad(set_to_none=True)
    for part_rows, part in learner.micro_batches(minibatch):
        terms = objective.critic_terms(learner.evaluate_critic(part), part, divisors)
        terms = terms if len(part_rows) else terms.without_effect()
        terms.loss.backward()
        totals.add(terms.metrics)
    return totals
