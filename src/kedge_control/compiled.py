"""Makes PPO updates with each optimizer step as one compiled graph: the same result up to rounding, several times as
fast.

A small network's step is mostly overhead: some two hundred operations of a few microseconds each. Compiled, it is one
call of the update's own loss, differentiated by torch, with torch's clip and AdamW. The metrics of its steps stay on
the device until the update has ended. If one of them is not finite, the update is undone and repeated without the
graph, so that the bad step is found before it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.adamw import adamw

from kedge.training.guard import StepCheck, refuse_nonfinite
from kedge.training.objective import Divisors, Objective
from kedge.training.optimizer import CRITIC, all_parameters
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.update import PpoUpdate, UpdateResult, minibatches_of
from kedge_base.machine.progress import say
from kedge_control.experience import ControlExperience, ControlLearner

MOST_GRAPHS = 2
"""Sizes of minibatches for which a graph is compiled; others take their steps without one."""

Numbers: TypeAlias = "dict[str, float]"
"""Settings of the objective that change between updates; a graph gets them as tensors, and is only compiled once."""

MakeObjective: TypeAlias = Callable[..., Objective]
"""Makes the total loss from `Numbers`."""

Step: TypeAlias = Callable[..., Float[Tensor, " figures"]]
"""Takes a step in place: (state, count of steps, rate, batch, rows, numbers) → figures.

The figures are the metrics of the objective in its order, then the gradient norms of the policy and of a separate
critic.
"""

State: TypeAlias = "tuple[list[Tensor], list[Tensor], list[Tensor]]"
"""Weights, first and second moments in the order of the optimizer, shared with the model and the optimizer."""


def _compiled(step: Step) -> Step:
    # Checking all other dependencies of a graph takes a quarter of its time, but they cannot change here.
    only_tensors = getattr(torch.compiler, "keep_tensor_guards_unsafe", None)
    options: dict[str, Any] = {"guard_filter_fn": only_tensors} if only_tensors else {}
    # Calling the kernels from Python and checking every size takes a fifth of a graph's time.
    options |= {"size_asserts": False, "cpp_wrapper": not torch.cuda.is_available()}
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)


@dataclass
class CompiledUpdate:
    """`PpoUpdate` for a policy without a memory, with a pass per minibatch.

    Args:
        learner: Evaluates the policy and the critic.
        optimizer: AdamW on their parameters, with one learning rate and without decay.
        make_objective: Makes the total loss.
        compile: Compiles a step to a graph, like torch's compiler.
    """

    learner: ControlLearner
    optimizer: Optimizer
    make_objective: MakeObjective
    compile: Callable[[Step], Step] = _compiled
    failed: bool = field(default=False, init=False)
    _graphs: dict[tuple[int, int], Step] = field(default_factory=dict, init=False)

    def __call__(
        self,
        experience: ControlExperience,
        numbers: Numbers,
        *,
        num_epochs: int,
        num_minibatches: int,
        generator: torch.Generator,
        max_grad_norm: float | None,
        check_step: StepCheck = refuse_nonfinite,
    ) -> UpdateResult:
        """See `PpoUpdate`, except that `passes` remains empty.

        `check_step` is called only if a value is not finite or the steps cannot be compiled.
        """
        state, counts = self._state()
        tensors = [*(each for table in state for each in table), *counts]
        before = [each.clone() for each in tensors]
        shuffles = generator.get_state()
        if not self.failed and bool(experience.action_mask.all()):
            epochs = [minibatches_of(experience.num_rows, num_minibatches, generator) for _ in range(num_epochs)]
            try:
                taken = self._take(state, counts, experience, numbers, epochs, max_grad_norm)
            except (RuntimeError, OSError) as error:
                # Any failure to compile: no compiler, no space for its files, an unsupported operation.
                self.failed = True
                taken = None
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                say(f"the update could not be compiled and runs without: {reason}")
            if taken is not None:
                return taken
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
        generator.set_state(shuffles)
        return PpoUpdate(
            self.learner,
            self.optimizer,
            experience,
            self.make_objective(**numbers),
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            generator=generator,
            max_grad_norm=max_grad_norm,
            check_step=check_step,
        ).run()

    def _state(self) -> tuple[State, list[Tensor]]:
        """Return the current state, and the optimizer's step counts."""
        parameters = all_parameters(self.optimizer)
        for parameter in parameters:
            own: dict[str, Any] = self.optimizer.state[parameter]
            if not own:  # torch's own initial state
                own["step"] = torch.zeros((), device=parameter.device)
                own["exp_avg"] = torch.zeros_like(parameter)
                own["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.optimizer.state[each] for each in parameters]
        means, squares, counts = ([each[name] for each in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        return ([each.detach() for each in parameters], means, squares), counts

    @torch.no_grad()
    def _take(
        self,
        state: State,
        counts: Sequence[Tensor],
        experience: ControlExperience,
        numbers: Numbers,
        epochs: Sequence[Sequence[Int[Tensor, " rows"]]],
        max_grad_norm: float | None,
    ) -> UpdateResult | None:
        """Take the update's steps as graphs; None without a graph, or if a value is not finite."""
        result = UpdateResult()
        figures: list[Tensor] = []
        objective = self.make_objective(**numbers)
        names = self._names(experience, objective, result)
        device = experience.old_logprobs.device
        # In float64, because torch computes with Python numbers if a step is not compiled.
        given = {name: torch.tensor(each, device=device) for name, each in numbers.items()}
        rate = torch.tensor(self.optimizer.param_groups[0]["lr"], dtype=torch.float64, device=device)
        done = torch.arange(sum(map(len, epochs)), dtype=torch.float64, device=device) + max(map(float, counts))
        for rows in (each.to(device) for minibatches in epochs for each in minibatches):
            step = self._graph(experience, rows, objective, max_grad_norm)
            if step is None:
                return None
            figures.append(step(state, done[len(figures)], rate, experience, rows, given))
        measured = torch.stack(figures)
        if not bool(measured.isfinite().all()):
            return None
        for count in counts:
            count += len(figures)
        result.steps = [dict(zip(names, row, strict=True)) for row in measured.tolist()]
        result.num_steps = result.num_gradients = len(figures)
        return result

    def _names(self, experience: ControlExperience, objective: Objective, result: UpdateResult) -> list[str]:
        """Return the names of a step's figures, and record how they are reduced.

        The pass also makes torch look up the formulas of its KL divergences, which its compiler cannot.
        """
        first = experience.select(slice(0, 1))
        metrics = objective(self.learner.evaluate(first), first, objective.divisors(first)).metrics
        result.reductions = {name: each.reduce for name, each in metrics.items()}
        is_apart = any(group[CRITIC] for group in self.optimizer.param_groups)
        return [*metrics, "policy/grad_norm", *(["value/grad_norm"] if is_apart else [])]

    def _graph(
        self,
        experience: ControlExperience,
        rows: Int[Tensor, " rows"],
        objective: Objective,
        max_grad_norm: float | None,
    ) -> Step | None:
        """Return the compiled step for minibatches of this size; None beyond `MOST_GRAPHS` sizes."""
        key = (experience.num_rows, len(rows))
        if key not in self._graphs and len(self._graphs) < MOST_GRAPHS:
            divisors = objective.divisors(experience.select(rows))
            self._graphs[key] = self.compile(self._step(divisors, max_grad_norm))
        return self._graphs.get(key)

    def _step(self, divisors: Divisors, max_grad_norm: float | None) -> Step:
        """Make a step on minibatches of one size, not compiled yet."""
        make_objective = self.make_objective
        policy = self.learner.policy
        loss = _Loss(policy, self.learner)
        known = {id(each): f"policy.{name}" for name, each in policy.named_parameters()}
        groups = self.optimizer.param_groups
        names = [known[id(each)] for group in groups for each in group["params"]]
        owners = [
            [known[id(each)] for group in groups if group[CRITIC] == critic for each in group["params"]]
            for critic in (False, True)
        ]
        (beta1, beta2), eps = groups[0]["betas"], groups[0]["eps"]

        def step(
            state: State,
            count: Tensor,
            rate: Tensor,
            batch: ControlExperience,
            rows: Tensor,
            numbers: dict[str, Tensor],
        ) -> Tensor:
            objective = make_objective(**numbers)
            minibatch = objective.prepared(batch.select(rows))

            def total(named: dict[str, Tensor]) -> Any:
                return torch.func.functional_call(loss, named, (minibatch, objective, divisors))

            named = dict(zip(names, state[0], strict=True))
            gradients, figures = torch.func.grad(total, has_aux=True)(named)
            norms: list[Tensor] = []
            for owned in ([_Graded(gradients[name]) for name in own] for own in owners if own):
                norms.append(get_total_norm([each.grad for each in owned], foreach=False))
                if max_grad_norm:
                    clip_grads_with_norm_(owned, max_grad_norm, norms[-1], foreach=False)  # pyright: ignore[reportArgumentType]
            adamw(
                state[0],
                [gradients[name] for name in names],
                state[1],
                state[2],
                [],
                [count.clone() for _ in names],
                foreach=False,
                capturable=torch.compiler.is_compiling(),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=rate,
                weight_decay=0.0,
                eps=eps,
                maximize=False,
            )
            return torch.cat([figures, torch.stack(norms)])

        return step


class _Graded(NamedTuple):
    """Holds a gradient for torch's clipping."""

    grad: Tensor


class _Loss(nn.Module):
    """The loss of a minibatch as a module, so that its parameters can be replaced by a function's arguments."""

    def __init__(self, policy: nn.Module, learner: ControlLearner) -> None:
        super().__init__()
        self.policy = policy
        self.learner = learner

    def forward(self, minibatch: ControlExperience, objective: Objective, divisors: Divisors) -> tuple[Tensor, Tensor]:
        """The loss, and the metrics."""
        terms = objective(self.learner.evaluate(minibatch), minibatch, divisors)
        return terms.loss, torch.stack([each.value for each in terms.metrics.values()])
