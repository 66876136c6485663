"""Plans a stage on one machine, from its configuration and the config.json of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from kedge.config import Config
from kedge.errors import ConfigError
from kedge.models import Precision, model_width, resolve_precision
from kedge.models.hollow import Blueprint, read_blueprint
from kedge.plan.machine import MachinePlan, Speed
from kedge.stages.critic.inputs import as_first_update
from kedge.stages.planning.counting import Figures, extrapolated
from kedge.stages.planning.critic import CriticCount
from kedge.stages.planning.lengths import Lengths, demonstration_lengths, prompt_lengths
from kedge.stages.planning.ppo import PpoCount, ppo_rows
from kedge.stages.planning.supervised import Supervised, SupervisedCount, supervised_rows
from kedge.training.runtime import resolve_device

__all__ = ["Counted", "count_ppo", "count_stage", "plan_of"]

SHALLOW = 2
"""Blocks of the models whose passes are counted, and one more; the others add as much as the last."""
PROCESS = 0.6 * 2**30
"""Of Python, torch and transformers."""
ALLOCATOR, ALLOCATOR_ON_CPU = 0.06, 0.2
"""Shares of the tensors' bytes that the allocators of CUDA and of a CPU add; the latter keeps freed memory for the next
pass, and a fifth is a usual value, not a bound: docs/memory.md."""


Count: TypeAlias = PpoCount | CriticCount | SupervisedCount


@dataclass(frozen=True)
class Counted:
    """A stage whose passes were counted.

    Attributes:
        count: The stage.
        figures: At its full depth.
        lengths: Of its rows.
    """

    count: Count
    figures: Figures
    lengths: Lengths


def plan_of(counted: Counted, speed: Speed | None = None, *, on_cpu: bool = False) -> MachinePlan:
    """The plan of a stage.

    Args:
        counted: Its passes.
        speed: Of the machine; None for no times.
        on_cpu: Whether the process's own memory counts.
    """
    count, figures = counted.count, counted.figures
    process, overhead = (PROCESS, ALLOCATOR_ON_CPU) if on_cpu else (0.0, ALLOCATOR)
    phases, units = count.phases(figures, speed), count.num_units(counted.lengths)
    return MachinePlan(count.stage, phases, units, count.sft_steps(figures), process, overhead)


def count_stage(
    config: Config,
    stage: str,
    *,
    accelerator: bool | None = None,
    response: int | None = None,
    lengths: Lengths | None = None,
) -> Counted:
    """Count the passes of sft, reward, critic or ppo; arguments and errors as of `count_ppo`."""
    if stage == "ppo":
        return count_ppo(config, accelerator=accelerator, response=response, lengths=lengths)
    if stage == "critic":
        return _count_critic(config, accelerator=accelerator, response=response, lengths=lengths)
    kind: Supervised = "reward" if stage == "reward" else "sft"
    source = (config.reward_model.base if kind == "reward" else None) or config.model
    blueprint = read_blueprint(str(source), trust_remote_code=config.runtime.trust_remote_code)
    accelerated, precision = _numerics(config, str(source), accelerator)
    lengths = lengths or demonstration_lengths(config, "demonstrations" if kind == "sft" else "comparisons")
    rows, role = supervised_rows(config, kind, lengths), "policy" if kind == "sft" else "reward model"
    return _counted(SupervisedCount(config, kind, {role: blueprint}, rows, precision, accelerated), lengths)


def count_ppo(
    config: Config, *, accelerator: bool | None = None, response: int | None = None, lengths: Lengths | None = None
) -> Counted:
    """Count the passes of a PPO run; nothing but config.json and some rows of the data is read.

    Args:
        config: The resolved configuration.
        accelerator: Whether it runs on one; None for the run's own device.
        response: Tokens of each response; None for the most that are sampled.
        lengths: Of the prompts; None reads some of the data.

    Raises:
        ModelError: A model has no usable config.json.
        ConfigError: The run cannot be planned.
    """
    blueprints = _blueprints(config)
    accelerated, precision = _numerics(config, str(config.model), accelerator)
    lengths = lengths or prompt_lengths(config)
    most = config.rollout.max_new_tokens if response is None else response
    count = PpoCount(config, blueprints, ppo_rows(config, lengths.prompts, most), precision, accelerated)
    return _counted(count, lengths)


def _count_critic(
    config: Config, *, accelerator: bool | None, response: int | None, lengths: Lengths | None
) -> Counted:
    first = as_first_update(config, holds_out=False)
    accelerated, precision = _numerics(config, str(config.model), accelerator)
    lengths = lengths or prompt_lengths(config)
    most = config.rollout.max_new_tokens if response is None else response
    rows = ppo_rows(first, lengths.prompts, most)
    return _counted(CriticCount(config, _blueprints(first), rows, precision, accelerated, lengths.rows), lengths)


def _counted(count: Count, lengths: Lengths) -> Counted:
    """The figures at full depth, from shallow models if the layers are alike."""
    alike = all(each.alike for each in count.blueprints.values())
    return Counted(count, extrapolated(count.figures, count.layers, SHALLOW if alike else None), lengths)


def _numerics(config: Config, source: str, accelerator: bool | None) -> tuple[bool, Precision]:
    """Whether the run is on an accelerator, and the number format of its products."""
    named = config.runtime.precision
    if accelerator is not None:
        return accelerator, ("bf16" if accelerator else "fp32") if named == "auto" else named
    device = resolve_device(config.runtime.device)
    width = model_width(source, trust_remote_code=config.runtime.trust_remote_code)
    return device.type != "cpu", resolve_precision(named, device, width=width)


def _blueprints(config: Config) -> Mapping[str, Blueprint]:
    """The models of a PPO run that have weights of their own, apart from the reference, which is as the policy."""

    def read(source: str) -> Blueprint:
        return read_blueprint(source, trust_remote_code=config.runtime.trust_remote_code)

    if config.model is None:
        raise ConfigError("kedge plan needs a model: pass --model, or set it in the configuration")
    policy = read(config.model)
    rewards = {f"reward: {term.name or term.source}": term for term in config.reward if not term.is_function}
    models = {role: read(term.source) for role, term in rewards.items()}
    found = {"policy": policy}
    if config.ppo.resolved_critic == "separate":
        value, scored = config.ppo, [role for role, term in rewards.items() if term.weight]
        copied = models[scored[0]] if value.critic_init != "policy" and len(scored) == 1 else policy
        named = value.names_critic
        found["critic"] = read(str(value.critic_init)) if named else copied
    return {role: replace(each) for role, each in {**found, **models}.items()}
