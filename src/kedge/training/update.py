"""The PPO update: K epochs of M minibatches over frozen experience."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Generic

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kedge.algorithm.experience import PolicyOutputs
from kedge.algorithm.policy_losses import MAX_LOG_RATIO
from kedge.ranks import ALONE, Ranks
from kedge.training.guard import BadValue, StepCheck, first_nonfinite, largest_ratio, refuse_nonfinite
from kedge.training.learner import B, Batch, Learner
from kedge.training.objective import Divisors, Metric, Objective, Reduction, Terms
from kedge.training.optimizer import all_parameters, clip_by_owner, clip_gradients, scale_output_gradients
from kedge.training.optimizer_kinds import Optimizer
from kedge_base.errors import ConfigError

ExtraLoss = Iterator[Callable[[], Iterable[Tensor]]]
"""An additional loss for each step (ptx mixing), as parts that add up; each part is freed before the next."""

ReadStates = Callable[[Int[Tensor, " rows"], Float[Tensor, "slots dim"]], object]
"""Reads the hidden states of some rows."""

# As in SB3 and Spinning Up, where also only the policy's steps end; spec §6.31.
EARLY_STOP_MARGIN = 1.5


class MetricTotals:
    """The metrics of one minibatch, accumulated over its micro-batches."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self.reductions: dict[str, Reduction] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Add a micro-batch's metrics."""
        for name, metric in metrics.items():
            self.reductions[name] = metric.reduce
            total = self._totals.get(name)
            self._totals[name] = metric.value if total is None else _combine(metric.reduce, total, metric.value)

    def values(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """The totals over all ranks as Python floats, with one device synchronization."""
        by_rank = ranks.everyones(torch.stack(list(self._totals.values())))
        totals = by_rank[0]
        for figures in by_rank[1:]:
            pairs = zip(self._totals, totals, figures, strict=True)
            totals = torch.stack([_combine(self.reductions[name], *pair) for name, *pair in pairs])
        return dict(zip(self._totals, totals.tolist(), strict=True))


def _combine(reduce: Reduction, one: Tensor, other: Tensor) -> Tensor:
    return {"mean": torch.add, "max": torch.maximum, "min": torch.minimum}[reduce](one, other)


def reduce_steps(steps: Sequence[Mapping[str, float]], reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Reduce each metric over all steps; `mean` unless `reductions` says otherwise."""
    extremes = {"max": max, "min": min}
    reduced: dict[str, float] = {}
    for name in steps[0] if steps else ():
        values = [step[name] for step in steps]
        extreme = extremes.get(reductions.get(name, "mean"))
        reduced[name] = extreme(values) if extreme else sum(values) / len(values)
    return reduced


@dataclass(frozen=True)
class EpochPass:
    """Log probabilities and entropies of all actions during one epoch; NaN for rows not yet visited.

    Attributes:
        logprobs: Log probabilities under the weights at the row's minibatch, in nats.
        entropies: Entropies of the actions' distributions, in nats.
        visited: The rows that this rank has visited.
    """

    logprobs: Float[Tensor, "batch time"]
    entropies: Float[Tensor, "batch time"]
    visited: Bool[Tensor, " batch"]

    @classmethod
    def empty(cls, batch: Batch) -> EpochPass:
        """An empty pass: every entry NaN."""
        tables = (torch.full_like(batch.old_logprobs, torch.nan) for _ in range(2))
        return cls(*tables, visited=torch.zeros_like(batch.old_logprobs[:, 0], dtype=torch.bool))

    def record(self, rows: Int[Tensor, " rows"], outputs: PolicyOutputs) -> None:
        """Fill in the rows of a micro-batch, if it had an effect."""
        if len(rows):
            self.logprobs[rows] = outputs.logprobs.detach()
            self.entropies[rows] = outputs.entropy.detach()
            self.visited[rows] = True


@dataclass
class UpdateResult:
    """The result of an update, filled in while it runs.

    Attributes:
        steps: The metrics of every optimizer step, in order, and of the step that exceeded the KL limit, although it
            was not taken; empty if the first step is refused.
        reductions: Reduction of each metric over steps.
        passes: Each epoch's log probabilities and entropies; the last can be incomplete.
        num_steps: Optimizer steps taken.
        critic_steps: The metrics of every step that trained the critic alone.
        num_gradients: Gradients of the total loss that were computed: of the steps taken, and of one that was refused
            or exceeded the KL limit.
        num_critic_gradients: Gradients of the value term alone that were computed.
        num_readings: Passes over all responses without gradients; can be a fraction.
        trained_share: Share of the responses that were trained on; None for all.
        stopped_early: The approximate KL exceeded its limit; the policy's remaining steps were skipped.
        refused: `check_step` refused a step, and the remaining steps were skipped; or there was nothing to train on.
        distance_moved: Result of the function with this name; None if it was not measured.
        reused_first_pass: The epochs reused the forward pass from which the experience was collected.
        learning_rates: The policy's, as `learning_rate`, and the critic's, as `critic`, if it has a separate one.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    reductions: dict[str, Reduction] = field(default_factory=dict)
    passes: list[EpochPass] = field(default_factory=list)
    num_steps: int = 0
    critic_steps: list[dict[str, float]] = field(default_factory=list)
    num_gradients: int = 0
    num_critic_gradients: int = 0
    num_readings: float = 0
    trained_share: float | None = None
    stopped_early: bool = False
    refused: bool = False
    distance_moved: float | None = None
    reused_first_pass: bool = False
    learning_rates: Mapping[str, float] = field(default_factory=dict[str, float])

    def metrics(self) -> dict[str, float]:
        """Each metric reduced over the steps, and the metrics of the whole update.

        `policy/first_ratio_max` is the largest ratio or inverse ratio of the first step. It should be 1, because the
        weights have not changed since the old log probabilities, unless those are the sampler's under older weights.
        """
        first = {"policy/first_ratio_max": largest_ratio(self.steps[0])} if self.steps else {}
        losses = [step["value/loss"] for step in self.critic_steps]
        extra = {"value/extra_steps": len(losses), "value/extra_loss": sum(losses) / len(losses)} if losses else {}
        figures = {"policy/distance_moved": self.distance_moved, "policy/trained_share": self.trained_share}
        known = {name: each for name, each in figures.items() if each is not None}
        reduced = reduce_steps(self.steps, self.reductions)
        return {**reduced, **first, "policy/optimizer_steps": self.num_steps, **extra, **known}


@dataclass
class PpoUpdate(Generic[B]):
    """Trains policy and critic on one batch of experience.

    for each of K epochs: shuffle the rows; for each of M minibatches: one step on the total loss
        then C − 1 passes of M steps on the value term alone, for the critic's own parameters
        once the KL limit has ended the policy's steps, its remaining passes also train only the critic

    Old log probabilities, values, advantages and returns are fixed. The gradient of a minibatch does not depend on its
    split into micro-batches. A single minibatch holds all rows and is not shuffled.

    For K below 1, each step trains on a random share K of its minibatch, divided by K: the expected gradient and the
    expected metrics, except the extreme ratios, are those of the whole minibatch.

    Additional epochs do nothing once a step is refused, or, without a critic, once the KL limit has ended the policy's
    steps.

    Attributes:
        learner: Evaluates the policy and the critic.
        optimizer: The optimizer of the learner's parameters.
        experience: The batch.
        objective: The total loss; steps that train only the critic use only its value term.
        num_epochs: K, a whole number or below 1.
        num_minibatches: M, optimizer steps per epoch.
        generator: Random generator of the shuffles and of the choice of rows.
        max_grad_norm: Maximum gradient norm of the policy and, separately, of a critic that shares no gradient; None or
            0 disables clipping.
        num_critic_epochs: C ≥ 1, the critic's passes per epoch; see `take_critic_epoch`.
        critic_generator: Random generator of their shuffles; None for `generator`.
        early_stop_kl: Target d of the approximate KL, nats per action; above 1.5·d the policy's remaining steps are
            skipped. The critic's steps are still taken: they do not move the policy.
        extra_loss: An additional loss, added to every step.
        check_step: Called before each step; False refuses the step and skips the rest of the update.
        on_step: Called with the metrics of each step that is taken, before the weights change.
        read_states: Called with the rows of each pass of the policy's first epoch and their hidden states.
        result: The result so far.

    Source: PPO algorithm 1; spec §6.31–33.
    """

    learner: Learner[B]
    optimizer: Optimizer
    experience: B
    objective: Objective
    _: KW_ONLY
    num_epochs: float
    num_minibatches: int
    generator: torch.Generator
    max_grad_norm: float | None
    num_critic_epochs: int = 1
    critic_generator: torch.Generator | None = None
    early_stop_kl: float | None = None
    extra_loss: ExtraLoss | None = None
    check_step: StepCheck = refuse_nonfinite
    on_step: Callable[[Mapping[str, float]], object] = lambda _: None
    read_states: ReadStates | None = None
    result: UpdateResult = field(default_factory=UpdateResult)
    _num_chosen = _num_offered = 0

    def run(self) -> UpdateResult:
        """Make all epochs.

        Raises:
            ConfigError: Only the critic is to be trained, and the learner has no critic.
            NumericsError: Raised by `check_step`, by default if a loss or gradient is not finite. The step was not
                taken.
        """
        if not (self.objective.train_policy or self.learner.needs_values):
            raise ConfigError("there is no critic to warm up")
        for _ in range(math.ceil(self.num_epochs)):
            self.take_epoch()
            for _ in range(self.num_critic_epochs - 1 if self.learner.needs_values else 0):
                self.take_critic_epoch()
        return self.result

    def take_epoch(self) -> None:
        """Take a step on the total loss for each minibatch.

        From the minibatch that exceeds the KL limit, and in later epochs, steps train only the critic.
        """
        result = self.result
        minibatches = self._minibatches(self.generator)
        if self._is_over:
            return
        if is_policys := not result.stopped_early:
            result.passes.append(EpochPass.empty(self.experience))
        for rows in minibatches:
            if not result.stopped_early:
                self._take_policy_step(rows)
            if result.stopped_early:
                self._take_critic_step(rows)
        if is_policys:
            epoch = result.passes[-1]
            self.learner.ranks.fill_in(epoch.visited, epoch.logprobs, epoch.entropies)

    def take_critic_epoch(self) -> None:
        """Take one step on the value term per minibatch, on the parameters that only the critic has.

        The policy is not evaluated, and no gradient reaches it: a shared trunk only computes its forward pass. Its
        weights, moments and step counts stay as they are.

        Source: SAO (arXiv 2607.07508) §3.2: two passes. Open-Reasoner-Zero (arXiv 2503.24290) takes 12 critic steps for
            each one of the policy, on the minibatches of one pass. Spec §6.31.
        """
        for rows in self._minibatches(self.critic_generator or self.generator):
            self._take_critic_step(rows)

    def _minibatches(self, generator: torch.Generator) -> Sequence[Int[Tensor, " rows"]]:
        return minibatches_of(len(self.experience.old_logprobs), self.num_minibatches, generator)

    @cached_property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return all_parameters(self.optimizer)

    @property
    def _is_over(self) -> bool:
        return self.result.refused or (self.result.stopped_early and not self.learner.needs_values)

    def _take_policy_step(self, rows: Int[Tensor, " rows"]) -> None:
        if self._is_over:
            return
        result = self.result
        minibatch = self._minibatch(rows)
        if self.objective.whitens_minibatches:
            minibatch = self.objective.prepared(minibatch)
        rows, minibatch, divisors = self._chosen(rows, minibatch)
        more = next(self.extra_loss) if self.extra_loss else tuple
        terms = partial(self._policy_terms, divisors, rows.to(self._device))
        moving = self.objective.rows_with_gradient(minibatch, trains_critic=self.learner.needs_values)
        totals = self._gradients(minibatch, terms, more, moving=moving)
        ranks = self.learner.ranks
        metrics = {**totals.values(ranks), **clip_by_owner(self.optimizer, self.max_grad_norm, ranks)}
        result.num_gradients += 1
        result.reductions.update(totals.reductions)
        if not self._is_allowed(metrics, self.objective, minibatch, rows):
            return
        result.steps.append(metrics)
        if self.early_stop_kl is not None and metrics["policy/approx_kl"] > EARLY_STOP_MARGIN * self.early_stop_kl:
            result.stopped_early = True
            return
        self.on_step(metrics)
        self.optimizer.step()
        result.num_steps += 1

    def _take_critic_step(self, rows: Int[Tensor, " rows"]) -> None:
        if self._is_over:
            return
        result = self.result
        rows, minibatch, divisors = self._chosen(rows, self._minibatch(rows))
        totals = self._gradients(
            minibatch,
            lambda _, part: self.objective.critic_terms(self.learner.evaluate_critic(part), part, divisors),
        )
        scale_output_gradients(self.optimizer)
        ranks = self.learner.ranks
        metrics = {
            **totals.values(ranks),
            "value/grad_norm": clip_gradients(self._parameters, self.max_grad_norm, ranks),
        }
        result.num_critic_gradients += 1
        if self._is_allowed(metrics, replace(self.objective, train_policy=False), minibatch, rows):
            self.on_step(metrics)
            self.optimizer.step()
            result.critic_steps.append(metrics)

    @property
    def _device(self) -> torch.device:
        return self.experience.old_logprobs.device

    def _minibatch(self, rows: Int[Tensor, " rows"]) -> B:
        if len(rows) == len(self.experience.old_logprobs):
            return self.experience
        return self.experience.select(rows.to(self._device))

    def _chosen(self, rows: Int[Tensor, " rows"], minibatch: B) -> tuple[Int[Tensor, " rows"], B, Divisors]:
        """Return the rows of a minibatch that the step trains on, and the divisors of its sums over them."""
        divisors = self.objective.divisors(minibatch)
        if self.num_epochs >= 1:
            return rows, minibatch, divisors
        chosen = random_rows(len(rows), share=self.num_epochs, generator=self.generator)
        share = len(chosen) / len(rows)
        self._num_chosen += len(chosen)
        self._num_offered += len(rows)
        self.result.trained_share = self._num_chosen / self._num_offered
        return rows[chosen], minibatch.select(chosen.to(self._device)), divisors.scaled(share)

    def _gradients(
        self,
        minibatch: B,
        terms_of: Callable[..., Terms],
        more: Callable[[], Iterable[Tensor]] = tuple,
        *,
        moving: Bool[Tensor, " batch"] | None = None,
    ) -> MetricTotals:
        """Compute the gradients of a minibatch and of additional losses, summed over the ranks; return this rank's
        metrics.

        Args:
            minibatch: The responses of the step.
            terms_of: The loss of a micro-batch, `(rows, part) -> terms`.
            more: Additional losses.
            moving: The rows that have a gradient; the others take no backward pass. None for all.
        """

        def backward() -> MetricTotals:
            self.optimizer.zero_grad(set_to_none=True)
            totals = MetricTotals()
            for rows, part, has_gradient in self._passes(minibatch, moving):
                with torch.set_grad_enabled(has_gradient):
                    terms = terms_of(rows, part)
                terms = terms if len(rows) else terms.without_effect()
                if has_gradient:
                    terms.loss.backward()
                totals.add(terms.metrics)
            for share in more():
                share.backward()
                totals.add({"loss/ptx": Metric(share.detach())})
            return totals

        totals = self.learner.repeated(minibatch, backward)
        self.learner.ranks.sum_gradients(self._parameters)
        return totals

    def _passes(
        self, minibatch: B, moving: Bool[Tensor, " batch"] | None
    ) -> Iterator[tuple[Int[Tensor, " rows"], B, bool]]:
        """Split a minibatch into micro-batches, each with the numbers of its rows and whether it has a gradient."""
        # A reused first pass is a single graph, so no rows can be left out.
        if moving is None or moving.all() or self.learner.has_first_pass(minibatch):
            for rows, part in self.learner.micro_batches(minibatch):
                yield rows, part, True
            return
        for has_gradient, chosen in ((True, moving), (False, ~moving)):
            numbers = chosen.nonzero().squeeze(-1)
            for rows, part in self.learner.micro_batches(minibatch.select(numbers)):
                yield numbers[rows], part, has_gradient

    def _is_allowed(
        self, metrics: Mapping[str, float], objective: Objective, minibatch: B, rows: Int[Tensor, " rows"]
    ) -> bool:
        """Return True if the check allows a step with these metrics; otherwise end the update."""
        search = partial(
            search_minibatch,
            self.learner,
            objective,
            minibatch,
            rows.tolist(),
            self._parameters,
            partial(scale_output_gradients, self.optimizer),
        )
        result = self.result
        result.refused = not self.check_step(result.num_steps + len(result.critic_steps), metrics, search)
        return not result.refused

    def _policy_terms(
        self, divisors: Divisors, rows: Int[Tensor, " rows"], part_rows: Int[Tensor, " part"], part: B
    ) -> Terms:
        """Compute the total loss of a micro-batch, and record its rows in the epoch."""
        outputs = self.learner.evaluate(part)
        rows = rows[part_rows]
        self.result.passes[-1].record(rows, outputs)
        # Only in the first epoch: later, a row may be evaluated on another rank, and would be read twice.
        if self.read_states is not None and outputs.states is not None and len(rows) and len(self.result.passes) == 1:
            self.read_states(rows, outputs.states)
        return self.objective(outputs, part, divisors)


def search_minibatch(
    learner: Learner[B],
    objective: Objective,
    minibatch: B,
    numbers: Sequence[int],
    parameters: Sequence[nn.Parameter],
    scale: Callable[[], object],
) -> BadValue:
    """Recompute a minibatch row by row to find the row behind a bad loss or gradient.

    Slow; only for steps that failed. Overwrites the parameters' gradients.

    Args:
        learner: Evaluates the policy and the critic.
        objective: The loss.
        minibatch: The responses of the step.
        numbers: Their rows in the update.
        parameters: The parameters whose gradients count.
        scale: Scales the gradients before their norm is taken, as the step does.

    Returns:
        The first non-finite value; if all are finite, the largest gradient norm of a row.
    """
    divisors = objective.divisors(minibatch)
    found: list[BadValue] = []
    for index, row in enumerate(numbers):
        part = minibatch.select(slice(index, index + 1))
        outputs = learner.evaluate(part)
        loss = objective(outputs, part, divisors).loss
        if bad := first_nonfinite(
            [
                ("the policy's log probability", outputs.logprobs, part.action_mask),
                ("the policy's entropy", outputs.entropy, part.action_mask),
                ("the critic's value", outputs.values, part.reward_mask),
            ]
        ):
            return replace(bad, row=row)
        if loss.isfinite():
            found.append(BadValue("the gradient norm", _gradient_norm(loss, parameters, learner.ranks, scale), row))
        else:
            found.append(BadValue("the loss", float(loss.detach()), row))
    if len(found) > 1 and not any(math.isfinite(each.value) for each in found):
        return replace(found[0], what=f"{found[0].what} of each response", row=None)
    return max(found, key=lambda each: each.value if math.isfinite(each.value) else math.inf)


def _gradient_norm(
    loss: Tensor, parameters: Sequence[nn.Parameter], ranks: Ranks, scale: Callable[[], object]
) -> float:
    """Compute the gradient norm of one row, which is the same on every rank."""
    for parameter in parameters:
        parameter.grad = None
    if ranks.is_sharded:
        (loss / ranks.count).backward()
        ranks.sum_gradients(parameters)
    else:
        loss.backward()
    scale()
    return clip_gradients(parameters, None, ranks)


@torch.no_grad()
def distance_moved(learner: Learner[B], experience: B) -> float:
    """KL from the sampling policy to the current one in nats, averaged over the actions: the exact KL if the policy
    computes it, else ρ − 1 − log ρ.

    After the epochs, it is d of the PPO paper's adaptive penalty.

    Source: PPO §4.
    """

    def summed() -> float:
        total = 0.0
        for rows, part in learner.micro_batches(experience):
            outputs = learner.evaluate(part)
            if len(rows):
                log_ratio = (outputs.logprobs - part.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
                log_ratio = torch.where(part.action_mask, log_ratio, 0.0)
                total += float((log_ratio.expm1() - log_ratio if outputs.kl is None else outputs.kl).sum())
        return total

    return learner.ranks.sums([learner.repeated(experience, summed)])[0] / int(experience.action_mask.sum())


def random_rows(count: int, *, share: float, generator: torch.Generator) -> Int[Tensor, " rows"]:
    """Choose a share of some rows, rounded to a whole number above 0, without replacement."""
    chosen = torch.randperm(count, generator=generator)[: max(1, round(share * count))]
    return chosen.sort().values


def trained_rows(
    num_rows: int, num_minibatches: int, *, share: float, generator: torch.Generator
) -> Int[Tensor, " rows"]:
    """Find the rows that `PpoUpdate` will train on in an epoch on a share of each minibatch."""
    parts = minibatches_of(num_rows, num_minibatches, generator)
    chosen = [part[random_rows(len(part), share=share, generator=generator)] for part in parts]
    return torch.cat(chosen).sort().values


def minibatches_of(num_rows: int, num_minibatches: int, generator: torch.Generator) -> Sequence[Int[Tensor, " rows"]]:
    """Split all rows in random order into M parts that differ by at most one row; a single part is in order."""
    if num_minibatches == 1:
        return [torch.arange(num_rows)]
    return torch.randperm(num_rows, generator=generator).tensor_split(min(num_minibatches, num_rows))
