"""`kedge plan STAGE`: the plan of a stage on one machine, with its alternatives, as text."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kedge.config import Config, with_values
from kedge.errors import ConfigError, KedgeError
from kedge.plan.devices import Device, find_device
from kedge.plan.machine import MachinePlan, Speed
from kedge.plan.machine_report import Alternative, format_bytes, machine_report
from kedge.stages.planning.alternatives import alternatives_of
from kedge.stages.planning.critic import CriticCount
from kedge.stages.planning.plan import Counted, count_stage, plan_of
from kedge.stages.planning.probe import probe_ppo
from kedge.stages.planning.stages import rlhf_stages
from kedge.stages.planning.supervised import SupervisedCount
from kedge.stages.planning.this_machine import as_on, has_own_memory, measured_speed, this_machine
from kedge.training.runtime import resolve_device, set_threads

__all__ = ["plan_machine"]

PROBED = ("rollout", "reward", "experience", "train")


def plan_machine(
    config: Config,
    stage: str,
    *,
    device_name: str | None = None,
    price_per_hour: float | None = None,
    probe: bool = False,
) -> str:
    """The plan of a stage as text; nothing is loaded but config.json and some rows of the data.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic, ppo or rlhf, whose stages are planned one after the other.
        device_name: See `find_device`; None for this machine.
        price_per_hour: Of the device; None for no costs.
        probe: Also run shallow models; see `probe_ppo`.

    Raises:
        KedgeError: A model has no usable config.json, or there is no such device.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers; the stage itself shows them
        return _planned(config, stage, device_name, price_per_hour, probe)


def _planned(config: Config, stage: str, device_name: str | None, price_per_hour: float | None, probe: bool) -> str:
    if stage == "rlhf":
        stages = rlhf_stages(config)
        return "\n\n".join(
            _planned(each, name, device_name, price_per_hour, probe and name == "ppo") for name, each in stages
        )
    device = this_machine(config.runtime.device) if device_name is None else find_device(device_name)
    accelerator = None if device.is_this else device.accelerator
    config = as_on(device, config)
    counted = count_stage(config, stage, accelerator=accelerator)
    speed = _speed(config, device, counted)
    plan = plan_of(counted, speed, on_cpu=not device.accelerator)
    heads = _heads(config, stage, device, counted, plan)
    if probe and stage != "ppo":
        raise ConfigError(f"--probe works for ppo, not for {stage}")
    if probe:
        peaks = probe_ppo(counted)
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in peaks.items() if name in PROBED)
        heads.append(f"probe: {format_bytes(max(peaks.values()))}; {parts}")
    others: list[Alternative] = []
    for settings, changes in alternatives_of(config, stage, counted.count.blueprints, on_gpu=has_own_memory(device)):
        try:
            changed = _changed(counted, stage, with_values(config, changes), changes, accelerator)
        except KedgeError:  # the change does not go with the other settings
            continue
        other = plan_of(changed, speed, on_cpu=not device.accelerator)
        if other.peak.bytes < 0.99 * plan.peak.bytes:
            others.append(Alternative(settings, other))
    return machine_report(plan, device, heads, others, price_per_hour=price_per_hour)


def _changed(
    counted: Counted, stage: str, config: Config, changes: Mapping[str, Any], accelerator: bool | None
) -> Counted:
    """The run with other settings; an optimizer changes none of the passes, nor where its state is."""
    if all(name.endswith((".optimizer", ".offload_optimizer")) for name in changes):
        return replace(counted, count=replace(counted.count, config=config))
    return count_stage(config, stage, accelerator=accelerator, lengths=counted.lengths)


def _speed(config: Config, device: Device, counted: Counted) -> Speed | None:
    if device.speed is not None or (device.accelerator and not device.is_this):
        return device.speed
    set_threads(config.runtime.num_threads)
    own = resolve_device(config.runtime.device) if device.is_this else torch.device("cpu")
    width = int(next(iter(counted.count.blueprints.values())).config.get_text_config().hidden_size)
    return measured_speed(own, counted.count.precision, width=width)


def _heads(config: Config, stage: str, device: Device, counted: Counted, plan: MachinePlan) -> list[str]:
    """What is planned."""
    figures = counted.figures
    roles = [
        name.removesuffix(".parameters") for name, size in figures.items() if name.endswith(".parameters") and size
    ]
    sizes = ", ".join(f"{role} {_number(figures[f'{role}.parameters'])}" for role in roles)
    trained = sum(figures[f"{role}.trained"] for role in roles) / 4
    speed = "" if device.speed is None else f", by {device.speed.origin}"
    source = config.reward_model.base or config.model if stage == "reward" else config.model
    return [
        f"{stage} of {source} on {device.name}{speed}; products in {counted.count.precision}",
        f"parameters: {sizes}; {_number(trained)} of them are trained",
        _rows(counted),
    ]


def _rows(counted: Counted) -> str:
    rows, origin = counted.count.rows, counted.lengths.origin
    shortest, longest = min(rows.prompts), max(rows.prompts)
    span = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
    if isinstance(counted.count, SupervisedCount):
        kind = "demonstrations" if counted.count.stage == "sft" else "comparisons"
        return f"a step: {rows.count:,} {kind} of {min(rows.lengths)} to {max(rows.lengths)} tokens in all ({origin})"
    unit = "a part" if isinstance(counted.count, CriticCount) else "an update"
    return (
        f"{unit}: {rows.count:,} responses of at most {max(rows.responses)} tokens, all taken to be that long; "
        f"prompts of {span} tokens ({origin})"
    )


def _number(count: float) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,.0f}"
