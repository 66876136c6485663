"""The PPO update, the only one: K epochs of M minibatches over frozen experience."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.algorithm.experience import Experience, Rollout
from kedge.models import ActorCritic, ResponseOutputs, budget_batches
from kedge.training.guard.guard import Judge, largest_ratio, refuse_nonfinite
from kedge.training.guard.nonfinite import Offender, search_minibatch
from kedge.training.objective import Divisors, Objective, Terms
from kedge.training.optimizer import clip_gradients

__all__ = ["ExtraLoss", "Pass", "UpdateResult", "distance_moved", "first_pass", "ppo_update"]

ExtraLoss = Callable[[], Iterable[Tensor]]
"""One more loss for a step (ptx mixing), in parts that add up to it, so that each is freed before the next."""

# SB3 and Spinning Up stop at 1.5 times the target; spec §6.31 follows them.
EARLY_STOP_MARGIN = 1.5


@dataclass(frozen=True)
class Pass:
    """What the policy said of each token as an epoch came by; NaN where it has not come.

    Attributes:
        logprobs: Its log probability, nats.
        entropies: Entropy of the distribution that it was drawn from, nats.
    """

    logprobs: Float[Tensor, "batch time"]
    entropies: Float[Tensor, "batch time"]

    @classmethod
    def over(cls, rollout: Rollout) -> Pass:
        """One that is yet to come."""
        return cls(*(torch.full_like(rollout.logprobs, torch.nan) for _ in range(2)))

    def note(self, rows: Int[Tensor, " rows"], outputs: ResponseOutputs) -> None:
        """It has come by these rows."""
        self.logprobs[rows] = outputs.logprobs.detach()
        self.entropies[rows] = outputs.entropy.detach()


@dataclass(frozen=True)
class UpdateResult:
    """What one update did.

    Attributes:
        steps: The figures of every optimiser step, in order, by metric name; where the very first one went too far,
            those of that step, which was not taken. None where the very first one was refused.
        num_steps: Optimiser steps taken.
        stopped_early: The approximate KL went over its limit, and the rest of the epochs was left out.
        refused: The judge refused a step, and the rest of the epochs was left out.
        passes: What the policy in training said of every token, epoch by epoch, the last perhaps not whole.
    """

    steps: list[dict[str, float]]
    num_steps: int
    stopped_early: bool
    refused: bool = False
    passes: list[Pass] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Each figure's mean over the steps, of `…_max` and `…_min` figures the extreme, and what is of the update.

        `policy/first_ratio_max` says how far the first step's ratios were from 1, either way: under the weights that
        sampled they are 1.
        """
        names = self.steps[0].keys() if self.steps else ()
        means = {name: _combine(name, [figures[name] for figures in self.steps]) for name in names}
        first = {"policy/first_ratio_max": largest_ratio(self.steps[0])} if self.steps else {}
        return {**means, **first, "policy/optimiser_steps": self.num_steps}


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
    judge: Judge = refuse_nonfinite,
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
        judge: Asked before each step whether it may be taken; after one that may not, the rest is left out.

    Raises:
        NumericsError: The judge has it so: by default, where a loss or gradient is not finite. The step was not taken.

    Source: PPO algorithm 1; spec §6.31–33.
    """
    steps: list[dict[str, float]] = []
    passes: list[Pass] = []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    learner = _Learner(actor_critic, objective, temperature, precision, train_policy)
    with _frozen(() if train_policy else actor_critic.policy_parameters()):
        for _ in range(num_epochs):
            passes.append(Pass.over(experience.rollout))
            for shuffled in _minibatches(experience.rollout.num_responses, num_minibatches, generator):
                optimizer.zero_grad(set_to_none=True)
                rows = shuffled.to(experience.scores.device)
                minibatch = experience.select(rows)
                figures = _accumulate(
                    learner,
                    minibatch,
                    micro_batch_tokens=micro_batch_tokens,
                    extra_loss=extra_loss,
                    outputs=first_pass,
                    note=lambda part, outputs, rows=rows, visited=passes[-1]: visited.note(rows[part], outputs),
                )
                first_pass = None
                figures["policy/grad_norm"] = clip_gradients(parameters, max_grad_norm)
                if not judge(len(steps), figures, partial(_search, learner, minibatch, parameters, rows.tolist())):
                    return UpdateResult(steps, len(steps), stopped_early=False, refused=True, passes=passes)
                if early_stop_kl is not None and figures["policy/approx_kl"] > EARLY_STOP_MARGIN * early_stop_kl:
                    return UpdateResult(steps or [figures], len(steps), stopped_early=True, passes=passes)
                optimizer.step()
                steps.append(figures)
    return UpdateResult(steps, len(steps), stopped_early=False, passes=passes)


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
    for _, part in _micro_batches(experience, micro_batch_tokens):
        outputs = actor_critic(part.rollout, temperature=temperature, precision=precision)
        log_ratio = torch.where(part.rollout.response_mask, outputs.logprobs - part.old_logprobs, 0.0)
        total += float((log_ratio.expm1() - log_ratio).sum())
    return total / rollout.num_tokens


@dataclass(frozen=True)
class _Learner:
    """Who learns, and what from: the same for every minibatch of an update."""

    actor_critic: ActorCritic
    objective: Objective
    temperature: float
    precision: Literal["fp32", "bf16"]
    train_policy: bool

    def outputs(self, rollout: Rollout) -> ResponseOutputs:
        return self.actor_critic(
            rollout,
            temperature=self.temperature,
            precision=self.precision,
            entropy_gradient=self.objective.needs_entropy_gradient,
            value_after_last=self.objective.value_after_last,
        )

    def terms(self, outputs: ResponseOutputs, part: Experience, divisors: Divisors) -> Terms:
        return self.objective(outputs, part, divisors, train_policy=self.train_policy)


def _accumulate(
    learner: _Learner,
    minibatch: Experience,
    *,
    micro_batch_tokens: int | None,
    extra_loss: ExtraLoss | None,
    outputs: ResponseOutputs | None,
    note: Callable[[Tensor, ResponseOutputs], None],
) -> dict[str, float]:
    """The minibatch's gradient, summed up over its micro-batches, and its figures.

    `outputs` are of all its rows, where they are there already; `note` is told what comes out for which of its rows.
    """
    divisors = learner.objective.divisors(minibatch)
    total: dict[str, Tensor] = {}
    whole = [(torch.arange(minibatch.rollout.num_responses), minibatch)]
    for rows, part in _micro_batches(minibatch, micro_batch_tokens) if outputs is None else whole:
        said = outputs or learner.outputs(part.rollout)
        note(rows, said)
        terms = learner.terms(said, part, divisors)
        terms.loss.backward()
        _add(total, terms.figures)
    for share in extra_loss() if extra_loss is not None and learner.train_policy else ():
        share.backward()
        _add(total, {"loss/ptx": share.detach()})
    # One wait for the device per step, however many figures and parts.
    return dict(zip(total, torch.stack(list(total.values())).tolist(), strict=True))


def _search(
    learner: _Learner, minibatch: Experience, parameters: Sequence[nn.Parameter], rows: Sequence[int]
) -> Offender:
    """Who is to blame for a minibatch's figures, as a row of the whole batch."""
    divisors = learner.objective.divisors(minibatch)

    def evaluate(part: Experience) -> tuple[ResponseOutputs, Tensor]:
        outputs = learner.outputs(part.rollout)
        return outputs, learner.terms(outputs, part, divisors).loss

    found = search_minibatch(evaluate, minibatch, parameters)
    return found if found.row is None else replace(found, row=rows[found.row])


def _minibatches(num_rows: int, num_minibatches: int, generator: torch.Generator) -> Sequence[Int[Tensor, " rows"]]:
    """A fresh shuffle of all rows, in M parts of equal size, give or take one row."""
    if num_minibatches == 1:
        return [torch.arange(num_rows)]
    return torch.randperm(num_rows, generator=generator).tensor_split(min(num_minibatches, num_rows))


def _micro_batches(experience: Experience, budget: int | None) -> Iterator[tuple[Int[Tensor, " rows"], Experience]]:
    """Parts of at most so many tokens, rows of like length together, each with the numbers of its rows."""
    for numbers in budget_batches(experience.rollout.row_lengths, budget):
        rows = torch.tensor(numbers, device=experience.scores.device)
        yield rows, experience.select(rows)


def _add(total: dict[str, Tensor], figures: Mapping[str, Tensor]) -> None:
    for name, figure in figures.items():
        combine = {"_max": torch.maximum, "_min": torch.minimum}.get(name[-4:], torch.add)
        total[name] = combine(total[name], figure) if name in total else figure


def _combine(name: str, figures: Sequence[float]) -> float:
    extreme = {"_max": max, "_min": min}.get(name[-4:])
    return extreme(figures) if extreme else sum(figures) / len(figures)


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
