"""The PPO update, the only one: K epochs of M minibatches over frozen experience."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.algorithm.experience import Experience, Rollout
from kedge.errors import NumericsError
from kedge.models import ActorCritic, ResponseOutputs, budget_batches
from kedge.training.objective import Objective
from kedge.training.optimiser import clip_gradients

__all__ = ["ExtraLoss", "UpdateResult", "distance_moved", "first_pass", "ppo_update"]

ExtraLoss = Callable[[], Iterable[Tensor]]
"""One more loss for a step (ptx mixing), in parts that add up to it, so that each is freed before the next."""

# SB3 and Spinning Up stop at 1.5 times the target; spec §6.31 follows them.
EARLY_STOP_MARGIN = 1.5


@dataclass(frozen=True)
class UpdateResult:
    """What one update did.

    Attributes:
        steps: The figures of every optimiser step, in order, by metric name; where the very first one went too far,
            those of that step, which was not taken.
        num_steps: Optimiser steps taken.
        stopped_early: The approximate KL went over its limit, and the rest of the epochs was left out.
    """

    steps: list[dict[str, float]]
    num_steps: int
    stopped_early: bool

    def mean(self) -> dict[str, float]:
        """Each figure's mean over the steps; of `…_max` figures, the maximum."""
        names = self.steps[0].keys()
        return {
            name: (max if name.endswith("_max") else _mean)([figures[name] for figures in self.steps]) for name in names
        }


def ppo_update(
    actor_critic: ActorCritic,
    optimizer: Optimizer,
    experience: Experience,
    objective: Objective,
    *,
    num_epochs: int,
    num_minibatches: int,
    temperature: float,
    generator: torch.Generator,
    micro_batch_tokens: int | None = None,
    max_grad_norm: float | None = 1.0,
    early_stop_kl: float | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    train_policy: bool = True,
    extra_loss: ExtraLoss | None = None,
    first_pass: ResponseOutputs | None = None,
) -> UpdateResult:
    """Improve policy and critic on one batch of experience.

    for each of K epochs: shuffle the responses; for each of M minibatches: one step on the total loss

    One minibatch holds all responses: there is nothing to shuffle then.

    Old log probabilities, values, advantages and returns stay as they are. The gradient of a minibatch does not depend
    on how it is split into micro-batches.

    Args:
        actor_critic: What is trained.
        optimizer: Its optimiser.
        experience: The batch.
        objective: The total loss.
        num_epochs: K.
        num_minibatches: M: optimiser steps per epoch.
        temperature: The sampling temperature; divides the logits here, too.
        generator: The stream that shuffles.
        micro_batch_tokens: Tokens per forward and backward pass; None takes the whole minibatch.
        max_grad_norm: Bound on the gradient's norm; None or 0 only measures it.
        early_stop_kl: Target d of the approximate KL, nats per token; above 1.5·d the rest of the update is left out.
        precision: Number format of the matrix products.
        train_policy: False while the critic warms up on a frozen policy.
        extra_loss: One more loss that joins every step.
        first_pass: The first epoch's forward pass, where it was made already.

    Raises:
        NumericsError: A loss or gradient is not finite; the step was not taken.

    Source: PPO algorithm 1; spec §6.31–33.
    """
    steps: list[dict[str, float]] = []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with _frozen(() if train_policy else actor_critic.policy_parameters()):
        for _ in range(num_epochs):
            for rows in _minibatches(experience.rollout.num_responses, num_minibatches, generator):
                optimizer.zero_grad(set_to_none=True)
                figures = _accumulate(
                    actor_critic,
                    experience.select(rows.to(experience.scores.device)),
                    objective,
                    temperature=temperature,
                    micro_batch_tokens=micro_batch_tokens,
                    precision=precision,
                    train_policy=train_policy,
                    extra_loss=extra_loss,
                    outputs=first_pass,
                )
                first_pass = None
                if early_stop_kl is not None and figures["policy/approx_kl"] > EARLY_STOP_MARGIN * early_stop_kl:
                    return UpdateResult(steps or [figures], len(steps), stopped_early=True)
                figures["policy/grad_norm"] = clip_gradients(parameters, max_grad_norm)
                _check_finite(figures)
                optimizer.step()
                steps.append(figures)
    return UpdateResult(steps, len(steps), stopped_early=False)


def first_pass(
    actor_critic: ActorCritic,
    rollout: Rollout,
    *,
    num_minibatches: int,
    micro_batch_tokens: int | None,
    temperature: float,
    precision: Literal["fp32", "bf16"] = "fp32",
    train_policy: bool = True,
    entropy_gradient: bool = False,
    value_after_last: bool = False,
) -> ResponseOutputs | None:
    """The first epoch's forward pass, or None where an epoch has more than one, or the policy is not trained.

    Until the first step, the policy in training is the policy that sampled. So where all responses fit into one pass,
    that pass tells the old log probabilities and values as well, and nothing is computed a second time.

    Args:
        actor_critic: Policy and critic, with the weights that sampled.
        rollout: All rows of the update.
        num_minibatches: M.
        micro_batch_tokens: Tokens that a pass may have; None sets no limit.
        temperature: As in `ppo_update`.
        precision: As in `ppo_update`.
        train_policy: As in `ppo_update`.
        entropy_gradient: An entropy bonus is paid.
        value_after_last: The score stands after the last token.
    """
    fits = micro_batch_tokens is None or sum(rollout.row_lengths) <= micro_batch_tokens
    if num_minibatches > 1 or not fits or not train_policy:
        return None
    return actor_critic(
        rollout,
        temperature=temperature,
        precision=precision,
        entropy_gradient=entropy_gradient,
        value_after_last=value_after_last,
    )


def _check_finite(figures: dict[str, float]) -> None:
    """Refuse a step that would turn the weights into NaN."""
    wrong = {name: figure for name, figure in figures.items() if not math.isfinite(figure)}
    if wrong:
        name, figure = next(iter(wrong.items()))
        raise NumericsError(
            f"{name} is {figure}: the step was not taken, and the weights are those before it; "
            "a lower ppo.learning_rate may help"
        )


@torch.no_grad()
def distance_moved(
    actor_critic: ActorCritic,
    experience: Experience,
    *,
    temperature: float,
    micro_batch_tokens: int | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> float:
    """KL of the sampling policy to the current one, mean of ρ − 1 − log ρ over the counted tokens, nats.

    After the epochs it is the d that the PPO paper's adaptive penalty is steered by.

    Source: PPO §4.
    """
    total, rollout = 0.0, experience.rollout
    for part in _micro_batches(experience, micro_batch_tokens):
        outputs = actor_critic(part.rollout, temperature=temperature, precision=precision)
        log_ratio = torch.where(part.rollout.response_mask, outputs.logprobs - part.old_logprobs, 0.0)
        total += float((log_ratio.expm1() - log_ratio).sum())
    return total / rollout.num_tokens


def _accumulate(
    actor_critic: ActorCritic,
    minibatch: Experience,
    objective: Objective,
    *,
    temperature: float,
    micro_batch_tokens: int | None,
    precision: Literal["fp32", "bf16"],
    train_policy: bool,
    extra_loss: ExtraLoss | None,
    outputs: ResponseOutputs | None = None,
) -> dict[str, float]:
    """The minibatch's gradient, summed up over its micro-batches, and its figures; `outputs` are of all its rows."""
    divisors = objective.divisors(minibatch)
    total: dict[str, Tensor] = {}
    for part in [minibatch] if outputs is not None else _micro_batches(minibatch, micro_batch_tokens):
        figures = outputs or actor_critic(
            part.rollout,
            temperature=temperature,
            precision=precision,
            entropy_gradient=objective.needs_entropy_gradient,
            value_after_last=objective.value_after_last,
        )
        terms = objective(figures, part, divisors, train_policy=train_policy)
        terms.loss.backward()
        _add(total, terms.figures)
    for share in extra_loss() if extra_loss is not None and train_policy else ():
        share.backward()
        _add(total, {"loss/ptx": share.detach()})
    # One wait for the device per step, however many figures and parts.
    return dict(zip(total, torch.stack(list(total.values())).tolist(), strict=True))


def _minibatches(num_rows: int, num_minibatches: int, generator: torch.Generator) -> Sequence[Int[Tensor, " rows"]]:
    """A fresh shuffle of all rows, in M parts of equal size, give or take one row."""
    if num_minibatches == 1:
        return [torch.arange(num_rows)]
    return torch.randperm(num_rows, generator=generator).tensor_split(min(num_minibatches, num_rows))


def _micro_batches(experience: Experience, budget: int | None) -> Iterator[Experience]:
    """Parts of at most so many tokens, rows of like length together."""
    for rows in budget_batches(experience.rollout.row_lengths, budget):
        yield experience.select(torch.tensor(rows, device=experience.scores.device))


def _add(total: dict[str, Tensor], figures: Mapping[str, Tensor]) -> None:
    for name, figure in figures.items():
        combine = torch.maximum if name.endswith("_max") else torch.add
        total[name] = combine(total[name], figure) if name in total else figure


def _mean(figures: Sequence[float]) -> float:
    return sum(figures) / len(figures)


@contextmanager
def _frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """No gradient flows into these parameters."""
    frozen = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
