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

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from kedge.algorithm.policy_losses import named_surrogate
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer, set_learning_rate
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.update import PpoUpdate, UpdateResult
from kedge_control.compiled import CompiledUpdate
from kedge_control.experience import ControlExperience, ControlLearner, experience_of
from kedge_control.making import EnvironmentSpec, make_environments
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.rollout import collect_steps

LOSSES = ("clipped", "unclipped", "kl_penalty_fixed")


class Random(gymnasium.Env[Any, Any]):
    """Observations at random, actions of any kind."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, actions: spaces.Space[Any]) -> None:
        self.action_space, self.played = actions, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.played += 1
        return self.np_random.random(3, np.float32), float(np.sum(action)), self.played % 9 == 0, False, {}


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a number": ("Pendulum-v1", {}),
    "a number within bounds": ("Pendulum-v1", {"action_bounds": "squash"}),
    "a choice": ("CartPole-v1", {}),
    "several choices": (EnvironmentSpec(lambda: Random(spaces.MultiDiscrete([2, 3]))), {}),
    "several switches": (EnvironmentSpec(lambda: Random(spaces.MultiBinary(3))), {}),
}
"""An environment for each kind of action, and settings of its network."""


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
    critic = () if policy.value_trunk is None else policy.critic_parameters()
    return Side(policy, build_optimizer(policy.parameters(), critic_parameters=critic, learning_rate=3e-3))


def play(source: Any, **settings: Any) -> tuple[Side, ControlExperience]:
    environments = make_environments(source, 2, seed=0)
    policy = ControlActorCritic(environments.spaces, hidden_sizes=(8,), **settings)
    normalization = Normalization(environments.spaces.observation_size, 2)
    steps = collect_steps(environments, policy, normalization, num_steps=32, generator=torch.Generator().manual_seed(0))
    return side_of(policy), experience_of(steps, policy, normalization, gamma=0.99, gae_lambda=0.95)


def maker(loss: str = "clipped", **changes: Any) -> Callable[..., Objective]:
    """Makes the objective from the numbers that change between updates."""
    settings = {"value_clip_range": None, "value_coef": 0.5, "entropy_coef": 0.01, "whitens_minibatches": True}

    def make(clip_range: Any = 0.2, kl_coef: Any = 3.0) -> Objective:
        surrogate = named_surrogate(loss, clip=(clip_range, clip_range), kl_coef=kl_coef)
        return Objective(surrogate=surrogate, **{**settings, **changes})

    return make


def eager(side: Side) -> Callable[..., UpdateResult]:
    return lambda *given, **settings: PpoUpdate(side.learner, side.optimizer, *given, **settings).run()


def take(update: Callable[..., UpdateResult], side: Side, experience: Any, objective: Any, number: int) -> Any:
    """One update whose shuffles and learning rate are those of its number."""
    set_learning_rate(side.optimizer, 3e-3 / (1 + number))
    generator = torch.Generator().manual_seed(number)
    return update(experience, objective, num_epochs=2, num_minibatches=4, generator=generator, max_grad_norm=0.5)


def compare(backend: str, source: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Three compiled updates: how far they are from those without, and how many graphs were compiled."""
    torch._dynamo.reset()
    ours, experience = play(source, **settings)
    theirs, make = ours.copy(), maker("kl_penalty_fixed")
    backends = (
        {}
        if backend == "inductor"
        else {"compile": partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)}
    )
    update = CompiledUpdate(ours.learner, ours.optimizer, make, **backends)
    for number, kl_coef in enumerate((3.0, 1.5, 0.0)):
        take(update, ours, experience, {"kl_coef": kl_coef}, number)
        take(eager(theirs), theirs, experience, make(kl_coef=kl_coef), number)
    pairs = zip(ours.tensors(), theirs.tensors(), strict=True)
    away = max(float((mine - its).detach().abs().max()) for mine, its in pairs)
    return {"away": away, "graphs": torch._dynamo.utils.counters["stats"].pop("unique_graphs"), "failed": update.failed}


def main(backend: str, *kinds: str) -> None:
    """Print the comparison for some kinds of action, or all."""
    print(json.dumps({kind: compare(backend, *KINDS[kind]) for kind in kinds or KINDS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
