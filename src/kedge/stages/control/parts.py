"""What a control run is made of: environments, networks, statistics, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kedge.config import Config
from kedge.errors import ConfigError
from kedge.gym.environments import Environments
from kedge.gym.episodes import Episodes
from kedge.gym.experience import ControlExperience
from kedge.gym.learner import ControlLearner
from kedge.gym.making import AtariFrames, EnvironmentSpec, make_environments
from kedge.gym.memory import Memory
from kedge.gym.networks import ControlActorCritic
from kedge.gym.normalization import Normalization
from kedge.logs.progress import say
from kedge.runs.run import Run
from kedge.stages.control.compiling import compiled_update
from kedge.system.importing import find_named
from kedge.training.checkpoint.run_state import Stateful
from kedge.training.compiled import CompiledUpdate
from kedge.training.controllers import Coefficients, Controllers
from kedge.training.optimizer import build_optimizer
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.runtime import stream_seed

__all__ = ["Given", "Parts", "load_parts", "make_run_environments"]


@dataclass(frozen=True)
class Given:
    """Functions from Python in place of configured names.

    Attributes:
        env: Makes an environment.
        network: Makes the layers in front of the outputs, from the spaces.
    """

    env: Callable[..., Any] | None = None
    network: Callable[..., Any] | None = None

    def named(self) -> dict[str, object]:
        """The functions by the fields that they replace."""
        return {"control.env": self.env, "control.network": self.network}


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    Attributes:
        environments: Played side by side.
        learner: Policy and critic, and how much of a batch they evaluate at once.
        normalization: Statistics of observations and returns.
        memory: What a policy with a memory remembers in each environment.
        episodes: Returns and lengths of finished episodes.
        optimizer: Of policy and critic.
        coefficients: Of the entropy bonus and the KL penalty.
        compiled: PPO's update as a graph; None if it is not compiled.
        spec: How further environments of the kind are made.
    """

    environments: Environments
    learner: ControlLearner
    normalization: Normalization
    memory: Memory
    episodes: Episodes
    optimizer: Optimizer
    coefficients: Coefficients
    compiled: CompiledUpdate[ControlExperience] | None
    spec: EnvironmentSpec

    @property
    def policy(self) -> ControlActorCritic:
        """Policy and critic."""
        return self.learner.policy

    def resumed(self) -> dict[str, Stateful]:
        """What checkpoints hold besides the weights and the optimizer's state."""
        return {
            "normalization": self.normalization,
            "episodes": self.episodes,
            "memory": self.memory,
            "coefficients": self.coefficients,
            "environments": _Resumable(self.environments),
        }


@dataclass(frozen=True)
class _Resumable:
    """Environments that say which of their episodes could not be restored."""

    environments: Environments

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return self.environments.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        if lost := self.environments.load_state_dict(state):
            say(
                f"{len(lost)} of {self.environments.num_envs} episodes could not be played again to where they were: "
                f"{self.environments.name} does not repeat itself from a seed. They begin anew, and the run goes on "
                "differently from one that was not interrupted."
            )


def load_parts(config: Config, run: Run, given: Given) -> Parts:
    """Make the environments and everything that is trained in them.

    Raises:
        ConfigError: The environment cannot be made, its spaces are not supported, or a network does not fit.
    """
    settings, seed = config.control, config.runtime.seed
    if config.runtime.num_threads is None and run.device.type == "cpu":
        torch.set_num_threads(1)  # small networks: another thread only costs
    spec = environment_spec(config, given)
    environments = make_run_environments(config, spec, settings.num_envs, stream_seed(seed, "episodes"))
    spaces, use, networks = environments.spaces, settings, settings
    policy = ControlActorCritic(
        spaces,
        hidden_sizes=networks.hidden_sizes,
        activation=networks.activation,
        share_trunk=networks.critic == "shared",
        initial_log_std=networks.initial_log_std,
        orthogonal=networks.initialization == "orthogonal",
        action_bounds=use.action_bounds,
        network=_network(config, given),
        memory_size=networks.memory_size,
        seed=stream_seed(seed, "networks"),
    ).to(run.device)
    normalization = Normalization(
        spaces.observation_size,
        use.num_envs,
        observations=use.normalize_observations and not spaces.is_image,
        rewards=use.reward_scaling,
        gamma=settings.gamma,
        clip=use.normalization_clip,
    )
    separate = networks.critic == "separate"
    optimizer = build_optimizer(
        policy.parameters(),
        critic_parameters=policy.critic_parameters() if separate else (),
        learning_rate=settings.learning_rate,
        adam_eps=settings.adam_eps,
    )
    episodes, coefficients = Episodes(use.num_envs), coefficients_of(config)
    learner, memory = ControlLearner(policy, run.micro_batch_tokens), Memory(policy, use.num_envs)
    compiled = compiled_update(config, learner, optimizer)
    return Parts(environments, learner, normalization, memory, episodes, optimizer, coefficients, compiled, spec)


def make_run_environments(config: Config, spec: EnvironmentSpec, num_envs: int, seed: int) -> Environments:
    """The configured environments, each in the first state of an episode."""
    return make_environments(spec, num_envs, seed=seed, vectorization=config.control.vectorization)


def environment_spec(config: Config, given: Given) -> EnvironmentSpec:
    """How the configured environment is made."""
    use, atari = config.control, config.control
    frames = AtariFrames(
        frame_skip=atari.frame_skip,
        stack=atari.frame_stack,
        noop_max=atari.noop_max,
        ends_with_life=atari.life_loss_ends_episode,
    )
    source = given.env or str(use.env)
    return EnvironmentSpec(source, settings=use.env_options, max_episode_steps=use.max_episode_steps, atari=frames)


def coefficients_of(config: Config) -> Coefficients:
    """The first update's coefficients, of which β of the adaptive KL penalty changes during the run."""
    use = config.control
    adaptive = use.policy_loss == "kl_penalty_adaptive"
    controllers = Controllers(
        kl="fixed",
        kl_target=1.0,
        kl_horizon=1,
        kl_wait_updates=0,
        surrogate_kl_target=use.surrogate_kl_target if adaptive else None,
    )
    return Coefficients(
        controllers, kl_coef=0.0, entropy_coef=use.entropy_coef, surrogate_kl_coef=use.surrogate_kl_coef
    )


def _network(config: Config, given: Given) -> Callable[..., Any] | None:
    name = config.control.network
    return given.network or (None if name is None else find_named(name, word="network", error=ConfigError))
