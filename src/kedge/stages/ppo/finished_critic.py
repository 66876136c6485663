"""What `evaluate.critic` names: the critic of a run with the run's policy and settings, or a saved critic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.config import Config, load_config, with_values
from kedge.config.schema.section import Section
from kedge.errors import ConfigError
from kedge.inspect.record import read_config
from kedge.logs.progress import say
from kedge.models import ActorCritic, find_model
from kedge.stages.ppo.saved_critic import with_saved_critic
from kedge.system.output import CHECKPOINTS, CONFIG_FILE, MODEL_FOLDER, is_run
from kedge.training.checkpoint.run_state import Stateful, restore_module
from kedge.training.checkpoint.store import Checkpoint, newest_valid, open_checkpoint

__all__ = ["FoundCritic", "find_critic"]

OFF: Mapping[str, Any] = {
    "ppo.eval_every": None,
    "ppo.eval_patience": None,
    "ppo.critic_check": None,
    "ppo.ptx_coef": 0.0,
    "schedules": {},
}
"""Settings that a check has no use for."""

OF_THE_RUN = ("model", "adapter", "reward", "reward_functions", "rollout", "ppo")
"""What the critic of a run was trained with."""


@dataclass(frozen=True)
class FoundCritic:
    """A critic to check.

    Attributes:
        config: The configuration of PPO with this critic.
        policy: Name of the policy whose returns it predicts.
        update: Updates that the policy has completed.
        checkpoint: The weights of policy and critic; None if `config` names them.
    """

    config: Config
    policy: str
    update: int = 0
    checkpoint: Checkpoint | None = None

    def restore(self, actor_critic: ActorCritic, parts: Mapping[str, Stateful]) -> None:
        """Give the models the checkpoint's weights, and the other parts of the run their state."""
        if self.checkpoint is not None:
            restore_module(actor_critic, self.checkpoint.tensors("actor_critic"))
            for name, part in parts.items():
                part.load_state_dict(self.checkpoint.state["progress"][name])
        actor_critic.requires_grad_(False)


def find_critic(config: Config, *, has_reward: bool = False) -> FoundCritic:
    """Find out what `config.evaluate.critic` names.

    Args:
        config: The configuration of the check.
        has_reward: Rewards were passed from Python.

    Raises:
        ConfigError: The run has no critic, or something is missing or contradicts the run.
        ModelError: There is no such run, checkpoint or model.
        DataError: The checkpoint is damaged.
    """
    source = str(config.evaluate.critic)
    name, at, _ = source.rpartition("@")
    folder = next((Path(os.path.expanduser(each)) for each in (source, name) if each and is_run(Path(each))), None)
    stage = "" if folder is None else read_config(folder)[0].get("stage", "")
    if folder is None or stage not in ("ppo", "critic"):
        return _saved(config, config, source, has_reward=has_reward)
    trained = load_config(folder / CONFIG_FILE)
    if config.model is not None and find_model(config.model) not in _policies(trained, source, stage):
        raise ConfigError(
            f"the critic of {source} predicts the returns of that run's policy; leave out model={config.model}"
        )
    kept = {name: getattr(trained, name) for name in OF_THE_RUN}
    if config.reward:
        kept["reward"] = config.reward
    merged = with_values(config, {name: _plain(value) for name, value in kept.items()})
    if stage == "critic":
        return _saved(config, merged, source, has_reward=has_reward)
    merged = with_values(merged, OFF)
    if merged.ppo.resolved_critic == "none":
        raise ConfigError(f"evaluate.critic={source}: the run has no critic (ppo.advantage={merged.ppo.advantage})")
    checkpoint = _checkpoint(folder, source, is_named=bool(at) and str(folder) != os.path.expanduser(source))
    return FoundCritic(merged, source, checkpoint.update, checkpoint)


def _saved(given: Config, base: Config, source: str, *, has_reward: bool) -> FoundCritic:
    """A critic in a folder of its own, at the start of PPO."""
    for name, flag in {"model": "--model", "reward": "--reward"}.items():
        if not getattr(base, name) and not (name == "reward" and has_reward):
            raise ConfigError(f"evaluate.critic={source} is not a run of PPO: pass {flag}, or set {name}")
    values = {**OFF, "ppo.critic": given.ppo.critic, "ppo.critic_init": source}
    config = with_saved_critic(with_values(base, values))
    return FoundCritic(config, str(config.model))


def _policies(trained: Config, source: str, stage: str) -> list[str]:
    """The models that may be named beside the critic of a run."""
    return [find_model(str(trained.model))] if stage == "critic" else [find_model(source, in_shards=True)]


def _checkpoint(folder: Path, source: str, *, is_named: bool) -> Checkpoint:
    """The checkpoint that the name means; the newest for a run."""
    if is_named:
        model = Path(find_model(source, in_shards=True))
        return open_checkpoint(model.parent if model.name == MODEL_FOLDER else model)
    found = newest_valid(folder / CHECKPOINTS, on_rejected=say)
    if found is None:
        raise ConfigError(
            f"evaluate.critic={source}: the run has no checkpoint, which would contain its critic "
            "(checkpoint.keep_last=true keeps the last one)"
        )
    return found


def _plain(value: Any) -> Any:
    """A section or a list of them as settings."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.model_dump() if isinstance(value, Section) else value
