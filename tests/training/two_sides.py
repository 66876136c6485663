"""A control policy trained by two updates beside each other: what tests of the compiled update are made of.

As a program it compiles one of them in earnest. Under pytest the algorithm's functions check their arguments' shapes
in a way that torch's compiler cannot read; a run does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kedge.algorithm.policy_losses import clipped_policy_loss, kl_penalty_policy_loss, unclipped_policy_loss
from kedge.gym import ControlActorCritic, ControlLearner, Normalization, collect_steps, experience_of
from kedge.gym.experience import ControlExperience
from kedge.gym.making import make_environments
from kedge.training.compiled import CompiledUpdate
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer, set_learning_rate
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.update import UpdateResult, ppo_update

LOSSES = {
    "clipped": partial(clipped_policy_loss, clip_range=0.2),
    "unclipped": unclipped_policy_loss,
    "kl_penalty": partial(kl_penalty_policy_loss, kl_coef=3.0),
}


@dataclass
class Side:
    policy: ControlActorCritic
    optimizer: Optimizer

    @property
    def learner(self) -> ControlLearner:
        return ControlLearner(self.policy)

    def tensors(self) -> list[torch.Tensor]:
        """Weights and all that the optimizer keeps."""
        states = [self.optimizer.state[each] for each in self.policy.parameters()]
        return [*self.policy.parameters(), *(each for state in states for each in state.values())]

    def copy(self) -> Side:
        other = side_of(deepcopy(self.policy))
        other.optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        return other


def side_of(policy: ControlActorCritic) -> Side:
    critic = () if policy.share_trunk else policy.critic_parameters()
    return Side(policy, build_optimizer(policy.parameters(), critic_parameters=critic, learning_rate=3e-3))


def play(name: str, *, share_trunk: bool = False) -> tuple[Side, ControlExperience]:
    environments = make_environments(name, 2, seed=0)
    policy = ControlActorCritic(environments.spaces, hidden_sizes=(8,), share_trunk=share_trunk)
    normalization = Normalization(environments.spaces.observation_size, 2)
    steps = collect_steps(environments, policy, normalization, num_steps=32, generator=torch.Generator().manual_seed(0))
    return side_of(policy), experience_of(steps, policy, normalization, gamma=0.99, gae_lambda=0.95)


def objective_of(surrogate: Any = LOSSES["clipped"], **changes: Any) -> Objective:
    settings = {"value_clip_range": None, "value_coef": 0.5, "entropy_coef": 0.01, "whitens_minibatches": True}
    return Objective(surrogate=surrogate, **{**settings, **changes})


def eager(side: Side) -> Callable[..., UpdateResult]:
    return partial(ppo_update, side.learner, side.optimizer)


def take(update: Callable[..., UpdateResult], side: Side, experience: Any, objective: Objective, number: int) -> Any:
    """One update whose shuffles and learning rate are those of its number."""
    set_learning_rate(side.optimizer, 3e-3 / (1 + number))
    generator = torch.Generator().manual_seed(number)
    return update(experience, objective, num_epochs=2, num_minibatches=4, generator=generator, max_grad_norm=0.5)


def main(backend: str) -> None:
    """Three compiled updates; print how far they are from those without, and how many graphs were compiled."""
    ours, experience = play("Pendulum-v1")
    theirs, said = ours.copy(), []
    update = CompiledUpdate(ours.learner, ours.policy, ours.optimizer, said.append)
    if backend != "inductor":
        update.compile = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
    for number, kl_coef in enumerate((3.0, 1.5, 0.0)):
        objective = objective_of(partial(kl_penalty_policy_loss, kl_coef=kl_coef))
        one = take(update, ours, experience, objective, number)
        other = take(eager(theirs), theirs, experience, objective, number)
    pairs = [*zip(ours.tensors(), theirs.tensors(), strict=True)]
    pairs += [(mine.logprobs, its.logprobs) for mine, its in zip(one.passes, other.passes, strict=True)]
    away = max(float((mine - its).detach().abs().max()) for mine, its in pairs)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(json.dumps({"away": away, "graphs": graphs, "said": said}))


if __name__ == "__main__":
    main(sys.argv[1])
