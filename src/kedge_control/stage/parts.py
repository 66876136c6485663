"""Makes the parts of a control run from its settings: environments, networks, statistics and optimizer."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kedge.algorithm.policy_losses import named_surrogate
from kedge.config import Config
from kedge.ranks import tokens_of
from kedge.runs.run import Run
from kedge.training.checkpoint.state import Stateful
from kedge.training.controllers import Coefficients, Controllers
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.runtime import stream_seed
from kedge_base.errors import ConfigError
from kedge_base.importing import find_named
from kedge_base.stage import value_of
from kedge_control.compiled import CompiledUpdate
from kedge_control.environments import Environments
from kedge_control.experience import ControlLearner
from kedge_control.making import EnvironmentSpec, make_environments
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.rollout import Memory, play_episodes
from kedge_control.stage.settings import ControlConfig
from kedge_control.steps import Episodes, means

LEAST_STEPS = 30_000
"""Optimizer steps from which compiling pays off: it takes 20 s of CPU time and saves a millisecond per step."""

EVALUATED_EPISODES = 10


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    Attributes:
        config: Its configuration.
        spec: The recipe of the environments.
        environments: Played side by side.
        learner: Policy and critic, and how much of a batch they evaluate at once.
        normalization: Statistics of observations and returns.
        memory: The memory of the policy in each environment, if it has one.
        episodes: Returns and lengths of finished episodes.
        optimizer: Of policy and critic.
        coefficients: Those of the entropy bonus and the KL penalty.
        compiled: PPO's update as a graph; None if it is not compiled.
    """

    config: Config
    spec: EnvironmentSpec
    environments: Environments
    learner: ControlLearner
    normalization: Normalization
    memory: Memory
    episodes: Episodes
    optimizer: Optimizer
    coefficients: Coefficients
    compiled: CompiledUpdate | None

    @property
    def settings(self) -> ControlConfig:
        """The section of the configuration."""
        return value_of(self.config, "control")

    @property
    def policy(self) -> ControlActorCritic:
        """Policy and critic."""
        return self.learner.policy

    def resumed(self) -> dict[str, Stateful]:
        """The contents of checkpoints other than the weights and the optimizer's state."""
        return {
            "environments": self.environments,  # first: the others depend on their number
            "normalization": self.normalization,
            "episodes": self.episodes,
            "memory": self.memory,
            "coefficients": self.coefficients,
        }

    def evaluation(self, update: int) -> dict[str, float]:
        """Return `eval/…` metrics, measured in new environments with the same seeds, if this update is evaluated, else
        none.
        """
        use = self.settings
        if use.eval_every is None or (update % use.eval_every and update != use.num_updates):
            return {}
        # The same number as in training, even for fewer episodes, since a function may make a fixed number.
        environments = _environments(self.config, self.spec, "evaluation", beside=self.environments)
        try:
            played = play_episodes(environments, self.policy, self.normalization, num_episodes=EVALUATED_EPISODES)
        finally:
            environments.close()
        return means("eval/", played)


def load_parts(
    config: Config, run: Run, *, env: Callable[..., Any] | None = None, network: Callable[..., Any] | None = None
) -> Parts:
    """Make the environments and everything that is trained in them.

    Args:
        config: The run's configuration.
        run: The run.
        env: Makes an environment, instead of `control.env`.
        network: Makes the layers before the outputs, given the spaces, instead of `control.network`.

    Raises:
        ConfigError: The environment cannot be made, its spaces are not supported, or a network does not fit.
    """
    use: ControlConfig = value_of(config, "control")
    if config.runtime.num_threads is None and run.device.type == "cpu":
        torch.set_num_threads(1)  # a second thread slows small networks down
    spec = EnvironmentSpec(env or str(use.env), use.env_options)
    environments = _environments(config, spec, "episodes")
    spaces = environments.spaces
    if network is None and use.network is not None:
        network = find_named(use.network, word="network", error=ConfigError)
    policy = ControlActorCritic(
        spaces,
        hidden_sizes=use.hidden_sizes,
        activation=use.activation,
        share_trunk=use.critic == "shared",
        initial_log_std=use.initial_log_std,
        action_bounds=use.action_bounds,
        network=network,
        memory_size=use.memory_size,
        seed=stream_seed(config.runtime.seed, "networks"),
    ).to(run.device)
    learner = ControlLearner(policy, run.micro_batch_tokens, use.policy_loss not in ("clipped", "unclipped"))
    optimizer = build_optimizer(
        policy.parameters(),
        critic_parameters=policy.critic_parameters() if use.critic == "separate" else (),
        learning_rate=use.learning_rate,
    )
    normalization = Normalization(
        spaces.observation_size,
        use.num_envs,
        observations=use.normalize_observations and not spaces.is_image,
        rewards=use.reward_scaling,
        gamma=use.gamma,
    )
    compiled = None
    if use.compile is True or (use.compile == "auto" and _pays(use, learner) and has_compiler()):
        compiled = CompiledUpdate(learner, optimizer, partial(objective_of, use))
    return Parts(
        config,
        spec,
        environments,
        learner,
        normalization,
        Memory(policy, use.num_envs),
        Episodes(use.num_envs),
        optimizer,
        _coefficients(use),
        compiled,
    )


def _environments(
    config: Config, spec: EnvironmentSpec, stream: str, beside: Environments | None = None
) -> Environments:
    """The configured environments, each in the first state of an episode."""
    use: ControlConfig = value_of(config, "control")
    seed = stream_seed(config.runtime.seed, stream)
    return make_environments(spec, use.num_envs, seed=seed, vectorization=use.vectorization, beside=beside)


def _coefficients(use: ControlConfig) -> Coefficients:
    """The first update's coefficients; β of the adaptive KL penalty changes during the run."""
    adapts = use.policy_loss == "kl_penalty_adaptive"
    controllers = Controllers(surrogate_kl_target=use.kl_target if adapts else None)
    return Coefficients(
        controllers, kl_coef=0.0, entropy_coef=use.entropy_coef, surrogate_kl_coef=use.surrogate_kl_coef
    )


def objective_of(use: ControlConfig, clip_range: float, kl_coef: float) -> Objective:
    """Make the total loss of an update, with the numbers that change between updates."""
    name = "unclipped" if use.is_trpo else use.policy_loss
    return Objective(
        surrogate=named_surrogate(name, clip=(clip_range, clip_range), kl_coef=kl_coef),
        value_clip_range=None,
        value_coef=use.value_coef,
        entropy_coef=use.entropy_coef,
        whitens_minibatches=use.whiten_advantages == "minibatch",
    )


def _pays(use: ControlConfig, learner: ControlLearner) -> bool:
    """True if compiling pays off: for a run with many small steps and a graph that is known to work."""
    policy = learner.policy
    most = tokens_of(learner.micro_batch)
    steps = use.num_updates * use.num_epochs * use.num_minibatches
    is_plain = not (policy.spaces.is_image or policy.has_custom_network or use.memory_size)
    is_ppo = not use.is_trpo and use.early_stop_kl is None
    is_one_pass = most is None or use.steps_per_update <= most * use.num_minibatches
    return is_plain and is_ppo and is_one_pass and policy.device.type == "cpu" and steps >= LEAST_STEPS


def has_compiler() -> bool:
    """True if the C++ compiler that torch would call exists."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", usual)) is not None
