"""The PPO update with each optimizer step as one compiled graph: the same result up to rounding, several times as fast.

A small network's step is mostly overhead: some hundred operations of a few microseconds each. Compiled, it is one call.
Its metrics stay on the device until the update has ended. If one is not finite then, the update is undone and repeated
without the graph, which finds the step before it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kedge.training.compiled_step import AdamGroup, AdamState, Step, Surrogates, groups_of, make_step
from kedge.training.guard.guard import StepCheck, refuse_nonfinite
from kedge.training.learner import B, Learner
from kedge.training.metrics import Reduction
from kedge.training.objective import Objective
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.update import EpochPass, UpdateResult, minibatches_of, ppo_update

__all__ = ["CompiledUpdate", "can_compile_optimizer"]

MOST_GRAPHS = 2
"""Sizes of minibatches for which a graph is compiled; others take their steps without one."""


def _compiled(step: Step) -> Step:
    # Checking everything else that a graph depends on takes a quarter of its time; here it cannot change.
    only_tensors = getattr(torch.compiler, "keep_tensor_guards_unsafe", None)
    options: dict[str, Any] = {"guard_filter_fn": only_tensors} if only_tensors else {}
    # Calling the kernels from Python, with a check of every size, takes a fifth of it.
    options |= {"size_asserts": False, "cpp_wrapper": not torch.cuda.is_available()}
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)


@dataclass
class CompiledUpdate(Generic[B]):
    """`ppo_update` for a policy whose passes are whole minibatches in one process.

    Args:
        learner: Evaluates the policy and the critic.
        policy: The module with their parameters.
        optimizer: Of these parameters; see `can_compile_optimizer`.
        say: Is told once why steps are not compiled, if they cannot be.
        compile: Makes a graph of a step; torch's compiler.
    """

    learner: Learner[B]
    policy: nn.Module
    optimizer: Optimizer
    say: Callable[[str], None]
    compile: Callable[[Step], Step] = _compiled
    failed: bool = field(default=False, init=False)
    _graphs: list[tuple[Any, Step]] = field(default_factory=list, init=False)
    _named: tuple[Any, list[str], dict[str, Reduction]] | None = field(default=None, init=False)

    def __call__(
        self,
        experience: B,
        objective: Objective,
        *,
        num_epochs: int,
        num_minibatches: int,
        generator: torch.Generator,
        max_grad_norm: float | None,
        check_step: StepCheck = refuse_nonfinite,
    ) -> UpdateResult:
        """See `ppo_update`. `check_step` is called only if a value is not finite or the steps cannot be compiled."""
        state, before_shuffles = AdamState.of(self.policy, self.optimizer), generator.get_state()
        before = [each.clone() for each in state.tensors()]
        minibatches = [minibatches_of(experience.num_rows, num_minibatches, generator) for _ in range(num_epochs)]
        if (taken := self._attempt(state, experience, objective, minibatches, max_grad_norm)) is not None:
            return taken
        with torch.no_grad():
            for tensor, old in zip(state.tensors(), before, strict=True):
                tensor.copy_(old)
        generator.set_state(before_shuffles)
        return ppo_update(
            self.learner,
            self.optimizer,
            experience,
            objective,
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            generator=generator,
            max_grad_norm=max_grad_norm,
            check_step=check_step,
        )

    def _attempt(
        self,
        state: AdamState,
        experience: B,
        objective: Objective,
        epochs: Sequence[Sequence[Int[Tensor, " rows"]]],
        max_grad_norm: float | None,
    ) -> UpdateResult | None:
        """The update's steps as graphs; None if there is no graph, or a value is not finite."""
        # A graph's divisors are those of rows without padding, and it has one count of steps.
        uneven = len({float(each) for each in state.counts.values()}) > 1 or not bool(experience.action_mask.all())
        if self.failed or uneven:
            return None
        try:
            return self._take(state, experience, objective, epochs, max_grad_norm)
        except (RuntimeError, OSError) as error:
            # Whatever a compiler meets: no compiler, no space for its files, an operation that it does not know.
            self.failed = True
            self.say(f"the update could not be compiled and runs without: {_first_line(error)}")
            return None

    @torch.no_grad()
    def _take(
        self,
        state: AdamState,
        experience: B,
        objective: Objective,
        epochs: Sequence[Sequence[Int[Tensor, " rows"]]],
        max_grad_norm: float | None,
    ) -> UpdateResult | None:
        """See `_attempt`."""
        device = experience.old_logprobs.device
        surrogates, numbers = Surrogates.of(objective)
        numbers = {name: each.to(device) for name, each in numbers.items()}
        groups = groups_of(self.policy, self.optimizer)
        result, figures = UpdateResult(), []
        names, result.reductions = self._names(experience, objective, surrogates, groups)
        steps = {
            len(rows): self._graph(experience, surrogates, groups, rows, max_grad_norm)
            for rows in {len(rows): rows for minibatches in epochs for rows in minibatches}.values()
        }
        rates = iter(self._rates(state, groups, sum(map(len, epochs))).to(device))
        changed = replace(state, counts={})  # every tensor that a graph is given is checked in every step
        for minibatches in epochs:
            tables: list[Tensor] = []
            for rows in (each.to(device) for each in minibatches):
                step = steps[len(rows)]
                if step is None:
                    return None
                measured, table = step(changed, experience, rows, next(rates), numbers)
                figures.append(measured)
                tables.append(table)
            result.passes.append(_epoch_pass(experience, torch.cat(tuple(minibatches)).to(device), tables))
        measured = torch.stack(figures)
        if not bool(measured.isfinite().all()):
            return None
        for count in state.counts.values():
            count += len(figures)
        result.steps = [dict(zip(names, row, strict=True)) for row in measured.tolist()]
        result.num_steps = result.num_gradients = len(figures)
        return result

    def _graph(
        self,
        experience: B,
        surrogates: Surrogates,
        groups: Sequence[AdamGroup],
        rows: Int[Tensor, " rows"],
        max_grad_norm: float | None,
    ) -> Step | None:
        """The compiled step for minibatches like this one of experience like this."""
        key = (experience.num_rows, len(rows), surrogates, groups, max_grad_norm)
        for known, step in self._graphs:
            if known == key:
                return step
        if len(self._graphs) >= MOST_GRAPHS:
            return None
        divisors = surrogates.objective.divisors(experience.select(rows))
        step = make_step(self.learner, self.policy, surrogates, groups, divisors, max_grad_norm)
        self._graphs.append((key, self.compile(step)))
        return self._graphs[-1][1]

    def _names(
        self, experience: B, objective: Objective, surrogates: Surrogates, groups: Sequence[AdamGroup]
    ) -> tuple[list[str], dict[str, Reduction]]:
        """The names of a step's figures, and how those of the objective are reduced."""
        if self._named is not None and self._named[0] == (surrogates, groups):
            return self._named[1], dict(self._named[2])
        first = experience.select(slice(0, 1))
        terms = objective(self.learner.evaluate(first), first, objective.divisors(first))
        reductions: dict[str, Reduction] = {name: each.reduce for name, each in terms.metrics.items()}
        owners = {group.is_critic for group in groups}
        norms = [name for name, critic in (("policy/grad_norm", False), ("value/grad_norm", True)) if critic in owners]
        self._named = (surrogates, groups), [*terms.metrics, *norms], reductions
        return self._named[1], dict(reductions)

    def _rates(self, state: AdamState, groups: Sequence[AdamGroup], num_steps: int) -> Float[Tensor, "steps rates"]:
        """What Adam's steps are scaled by, from the number of each step; in float64 first, as in torch."""
        done = float(next(iter(state.counts.values())))
        numbers = torch.arange(1, num_steps + 1, dtype=torch.float64) + done
        sizes = [
            settings["lr"] / (1.0 - group.betas[0] ** numbers)
            for group, settings in zip(groups, self.optimizer.param_groups, strict=True)
        ]
        corrections = [(1.0 - group.betas[1] ** numbers).sqrt() for group in groups]
        return torch.stack([*sizes, *corrections], -1).float()


def can_compile_optimizer(optimizer: Optimizer) -> bool:
    """Whether the graph's Adam is this optimizer's: torch's, without decay and with torch's ε."""
    return type(optimizer) is torch.optim.AdamW and not any(
        group["weight_decay"] or group["amsgrad"] or group["maximize"] or "tf1_eps" in group
        for group in optimizer.param_groups
    )


def _epoch_pass(experience: Any, order: Int[Tensor, " rows"], tables: Sequence[Tensor]) -> EpochPass:
    """The epoch's log probabilities and entropies, in the order of the rows."""
    epoch, (logprobs, entropies) = EpochPass.empty(experience), torch.cat(list(tables), 1)
    epoch.logprobs[order], epoch.entropies[order], epoch.visited[order] = logprobs, entropies, True
    return epoch


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
