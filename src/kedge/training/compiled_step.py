"""One optimizer step of PPO as a single function of tensors, for torch.compile.

The loss is `Objective` over the learner's own pass, differentiated by torch; here are only the clip and Adam. Whatever
changes from update to update is a tensor, because a graph is compiled again for every other number in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kedge.training.learner import B, Learner
from kedge.training.objective import Divisors, Objective
from kedge.training.optimizer import CRITIC
from kedge.training.optimizer_kinds import Optimizer

__all__ = ["AdamGroup", "AdamState", "Step", "Surrogates", "make_step"]

# As in torch's `clip_grads_with_norm_`.
NORM_EPSILON = 1e-6

Named = dict[str, Tensor]

Step = Callable[..., tuple[Float[Tensor, " figures"], Float[Tensor, "two rows time"]]]
"""Takes a step in place: (weights and moments, batch, rows, rates, settings of the surrogate) → (figures, tables).

The figures are the metrics of the objective in its order, then the gradient norms of the groups' owners; the tables are
log probabilities and entropies. The rates are the step size of every group, and √(1 − β₂ᵗ) of every group.
"""


@dataclass(frozen=True)
class AdamGroup:
    """A group of parameters of torch's Adam.

    Attributes:
        names: Of the parameters.
        is_critic: Whether they belong to a critic that shares no gradient with the policy.
        betas: Decay rates of the moments.
        eps: ε.
    """

    names: tuple[str, ...]
    is_critic: bool
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class AdamState:
    """The tensors that a step changes, by the parameter's name; they are those of the model and of the optimizer.

    Attributes:
        weights: Without a gradient of their own.
        means: First moments.
        squares: Second moments.
        counts: Steps so far, which the caller counts.
    """

    weights: Named
    means: Named
    squares: Named
    counts: Named

    @classmethod
    def of(cls, policy: nn.Module, optimizer: Optimizer) -> AdamState:
        """The tensors as they are now; moments that the optimizer does not have yet begin as torch begins them."""
        named = {name: each for name, each in policy.named_parameters() if each.requires_grad}
        for parameter in named.values():
            state: dict[str, Any] = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = {name: optimizer.state[parameter] for name, parameter in named.items()}
        moments = [{name: each[key] for name, each in states.items()} for key in ("exp_avg", "exp_avg_sq", "step")]
        return cls({name: each.detach() for name, each in named.items()}, *moments)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [each for table in (self.weights, self.means, self.squares, self.counts) for each in table.values()]


def groups_of(policy: nn.Module, optimizer: Optimizer) -> list[AdamGroup]:
    """The optimizer's groups, by the names of the policy's parameters."""
    names = {id(each): name for name, each in policy.named_parameters()}
    return [
        AdamGroup(
            tuple(names[id(each)] for each in group["params"]), group[CRITIC], tuple(group["betas"]), group["eps"]
        )
        for group in optimizer.param_groups
    ]


@dataclass(frozen=True)
class Surrogates:
    """The objectives of a run, which differ in numbers of their surrogate only.

    Attributes:
        objective: With the surrogate's function alone.
        fixed: Settings of the surrogate that are not numbers.
        names: Its numbers, such as the clip range.
    """

    objective: Objective
    fixed: Mapping[str, Any]
    names: tuple[str, ...]

    @classmethod
    def of(cls, objective: Objective) -> tuple[Surrogates, Named]:
        """What an objective has in common with the others, and its numbers as tensors."""
        surrogate = objective.surrogate
        settings = dict(surrogate.keywords) if isinstance(surrogate, partial) else {}
        function = surrogate.func if isinstance(surrogate, partial) else surrogate
        numbers = {name: torch.tensor(each) for name, each in settings.items() if isinstance(each, float)}
        fixed = {name: each for name, each in settings.items() if name not in numbers}
        return cls(replace(objective, surrogate=function), fixed, tuple(numbers)), numbers

    def with_numbers(self, numbers: Named) -> Objective:
        """The objective with these numbers."""
        return replace(self.objective, surrogate=partial(self.objective.surrogate, **self.fixed, **numbers))


class _Loss(nn.Module):
    """The loss of a minibatch as a module, so that its parameters can be replaced by a function's arguments."""

    def __init__(self, policy: nn.Module, learner: Learner[Any]) -> None:
        super().__init__()
        self.policy, self.learner = policy, learner

    def forward(self, minibatch: Any, objective: Objective, divisors: Divisors) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss; the metrics, and log probabilities and entropies."""
        outputs = self.learner.evaluate(minibatch)
        terms = objective(outputs, minibatch, divisors)
        figures = torch.stack([each.value for each in terms.metrics.values()])
        return terms.loss, (figures, torch.stack([outputs.logprobs, outputs.entropy]).detach())


def make_step(
    learner: Learner[B],
    policy: nn.Module,
    surrogates: Surrogates,
    groups: Sequence[AdamGroup],
    divisors: Divisors,
    max_grad_norm: float | None,
) -> Step:
    """A step on minibatches of one size, not compiled yet.

    Args:
        learner: Evaluates the policy and the critic.
        policy: Their parameters.
        surrogates: The total loss without its changing numbers.
        groups: The optimizer's.
        divisors: Of every minibatch of that size.
        max_grad_norm: Maximum gradient norm; see `ppo_update`.
    """
    loss = _Loss(policy, learner)

    def step(state: AdamState, batch: B, rows: Int[Tensor, " rows"], rates: Tensor, numbers: Named) -> Any:
        objective = surrogates.with_numbers(numbers)
        minibatch = objective.prepared(batch.select(rows))

        def total(weights: Named) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            named = {f"policy.{name}": each for name, each in weights.items()}
            return torch.func.functional_call(loss, named, (minibatch, objective, divisors))

        gradients, (figures, tables) = torch.func.grad(total, has_aux=True)(state.weights)
        norms = [_clip(gradients, each, max_grad_norm) for each in _owners(groups)]
        for number, group in enumerate(groups):
            for name in group.names:
                _adam(state, name, gradients[name], group, rates[number], rates[len(groups) + number])
        return torch.cat([figures, torch.stack(norms)]), tables

    return step


def _owners(groups: Sequence[AdamGroup]) -> list[list[str]]:
    """The names of the policy's parameters, and of a separate critic's."""
    owners = [
        [name for group in groups if group.is_critic == critic for name in group.names] for critic in (False, True)
    ]
    return [names for names in owners if names]


def _clip(gradients: Named, names: Sequence[str], max_norm: float | None) -> Tensor:
    """Scale gradients as `clip_gradients` does; return their norm before that."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradients[name]) for name in names]))
    if max_norm:
        scale = (max_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
        for name in names:
            gradients[name] = gradients[name] * scale
    return norm


def _adam(state: AdamState, name: str, gradient: Tensor, group: AdamGroup, rate: Tensor, correction: Tensor) -> None:
    """θ ← θ − lr/(1−β₁ᵗ) · m / (√v / √(1−β₂ᵗ) + ε), in place."""
    mean, square = state.means[name], state.squares[name]
    mean.lerp_(gradient, 1.0 - group.betas[0])
    square.mul_(group.betas[1]).addcmul_(gradient, gradient, value=1.0 - group.betas[1])
    state.weights[name].sub_(rate * mean / (square.sqrt() / correction + group.eps))
