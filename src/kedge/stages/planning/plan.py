"""Plans a stage on one machine: its memory, its time, and the effects of other settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kedge.config import Config, with_values
from kedge.errors import KedgeError
from kedge.models import model_width, resolve_precision
from kedge.stages.planning.counting import Figures
from kedge.stages.planning.devices import Device, Speed, find_device, measured_speed, this_machine
from kedge.stages.planning.report import MachinePlan, Part, Phase, machine_report
from kedge.stages.planning.rows import Lengths, lengths_of
from kedge.stages.planning.updates import SAMPLING, SECTIONS, Subject, subject_of
from kedge.training.host_state import AT_A_TIME
from kedge.training.runtime import resolve_device, set_threads

__all__ = ["LEAST_TOKENS", "Counted", "as_on", "count_stage", "plan_machine", "rlhf_stages", "written"]

PHASES = ("rollout", "reward", "experience", "fit", "train", "step")
PROCESS = 0.6 * 2**30
"""Bytes of Python, torch and transformers."""
ALLOCATOR = 0.06
ALLOCATOR_ON_CPU = 0.2
"""Shares of the tensors' bytes that the allocators of CUDA and of a CPU add; the latter keeps freed memory for the next
pass, and a fifth is a usual value, not a bound: bench/plan/RESULTS.md."""
IN_8_BITS = 1 / 4 + 1 / 256
"""Bytes of Adam's state in 8 bits, with a scale per 256 numbers, over those in fp32."""
HOST_BANDWIDTH = 20e9
"""Byte/s between a GPU and the host's memory: what PCIe 4.0 reaches of its 31.5."""
LEAST_TOKENS = 512


@dataclass(frozen=True)
class Counted:
    """A stage with a counted update.

    Attributes:
        subject: The stage.
        figures: At its full depth.
    """

    subject: Subject
    figures: Figures

    def plan(self, speed: Speed | None = None, *, on_cpu: bool = False) -> MachinePlan:
        """The plan.

        Args:
            speed: Of the machine; None for no times.
            on_cpu: The process's own memory counts.
        """
        subject = self.subject
        work = self.figures
        phases = tuple(self._phase(name, speed) for name in PHASES if f"work|{name}|calls" in work)
        flops = sum(size for name, size in work.items() if name.startswith("work|") and name.endswith("|flops"))
        step = 6 * work.get("parameters|policy", 0.0) * subject.rows.tokens
        process, overhead = (PROCESS, ALLOCATOR_ON_CPU) if on_cpu else (0.0, ALLOCATOR)
        steps = flops / step if subject.stage in SAMPLING else None
        return MachinePlan(subject.stage, phases, subject.num_units, steps, process, overhead)

    def of_roles(self, name: str) -> dict[str, float]:
        """`parameters`, or `trained` bytes, of each role."""
        return {figure.partition("|")[2]: size for figure, size in self.figures.items() if figure.startswith(name)}

    def _phase(self, name: str, speed: Speed | None) -> Phase:
        parts: dict[str, list[Part]] = {}
        config = self.subject.config
        state = 0.0
        settings = config.optimization.of(SECTIONS[self.subject.stage])
        share = IN_8_BITS if settings.optimizer == "adamw8bit" else 1.0
        for figure, size in self.figures.items():
            if figure.startswith(f"held|{name}|"):
                _, _, part, kind, role = figure.split("|")
                if kind == "optimizer":
                    size, state = share * size, state + share * size
                    if "optimizer" in config.runtime.offload:
                        size = min(size, 2 * share * AT_A_TIME) if name == "step" else 0.0
                parts.setdefault(part, []).append(Part(role, kind, size))
        most = max(parts.values(), key=lambda each: sum(part.bytes for part in each))
        if speed is None:
            return Phase(name, tuple(most))
        seconds = speed.seconds(self.figures, f"work|{name}|")
        if name == "step" and "optimizer" in config.runtime.offload:
            seconds += 2 * state / HOST_BANDWIDTH * self._num_steps
        return Phase(name, tuple(most), seconds)

    @property
    def _num_steps(self) -> int:
        loop = self.subject.config.ppo
        return loop.num_epochs * loop.num_minibatches if self.subject.stage == "ppo" else 1


def count_stage(
    config: Config,
    stage: str,
    *,
    accelerator: bool | None = None,
    response: int | None = None,
    lengths: Lengths | None = None,
) -> Counted:
    """Count an update of a stage; only config.json and some rows of the data are read.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic or ppo.
        accelerator: It runs on one; None for the run's own device.
        response: Tokens of each sampled response; None for the most that are sampled.
        lengths: Of the data; None reads some of it.

    Raises:
        ModelError: A model has no usable config.json.
        ConfigError: The run cannot be planned.
    """
    source = str((config.reward_model.base if stage == "reward" else None) or config.model)
    precision = config.runtime.precision
    if accelerator is None:
        device = resolve_device(config.runtime.device)
        accelerator = device.type != "cpu"
        width = model_width(source, trust_remote_code=config.runtime.trust_remote_code)
        precision = resolve_precision(config.runtime.precision, device, width=width)
    elif precision == "auto":
        precision = "bf16" if accelerator else "fp32"
    lengths = lengths or lengths_of(config, stage)
    subject = subject_of(config, stage, lengths, precision, accelerator=accelerator, response=response)
    return Counted(subject, subject.figures())


def plan_machine(
    config: Config, stage: str, *, device_name: str | None = None, price_per_hour: float | None = None
) -> str:
    """The plan of a stage as text; only config.json and some rows of the data are loaded.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic, ppo, or rlhf: its stages are planned one after the other.
        device_name: See `find_device`; None for this machine.
        price_per_hour: Of the device; None for no costs.

    Raises:
        KedgeError: A model has no usable config.json, or the device is unknown.
    """
    if stage == "rlhf":
        given: Any = {"device_name": device_name, "price_per_hour": price_per_hour}
        return "\n\n".join(plan_machine(each, name, **given) for name, each in rlhf_stages(config))
    device = this_machine(config.runtime.device) if device_name is None else find_device(device_name)
    config = as_on(device, config)
    accelerator = None if device.is_this else device.accelerator
    on_cpu = not device.accelerator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers; the stage itself shows them
        counted = count_stage(config, stage, accelerator=accelerator)
        speed = _speed(config, device, counted)
        plan = counted.plan(speed, on_cpu=on_cpu)
        others = dict[str, MachinePlan]()
        for changes in _alternatives(config, stage, counted, device):
            try:
                changed = with_values(config, changes)
                if all(name.endswith("optimizer") for name in changes):  # that changes none of the passes
                    other = replace(counted, subject=replace(counted.subject, config=changed))
                else:
                    other = count_stage(changed, stage, accelerator=accelerator, lengths=counted.subject.lengths)
            except KedgeError:  # the change does not go with the other settings
                continue
            if (found := other.plan(speed, on_cpu=on_cpu)).peak.bytes < 0.99 * plan.peak.bytes:
                others[written(changes)] = found
    return machine_report(plan, device, _heads(stage, device, counted), others, price_per_hour=price_per_hour)


def as_on(device: Device, config: Config) -> Config:
    """The configuration without what has no effect on a device."""
    if config.runtime.offload and not device.has_own_memory:
        return with_values(config, {"runtime.offload": []})
    return config


def rlhf_stages(config: Config) -> Iterator[tuple[str, Config]]:
    """The stages of a round with their configurations; each model has the shape of the one that it starts from."""
    scored = config if config.reward else with_values(config, {"reward": [config.reward_model.base or config.model]})
    yield "sft", config
    yield "reward", config
    if config.rlhf.train_critic:
        yield "critic", scored
        trained = {"ppo.critic": config.critic.kind, "ppo.critic_init": config.critic.base}
        scored = with_values(scored, trained)
    yield "ppo", scored


def written(changes: Mapping[str, Any]) -> str:
    """Settings as on the command line."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in changes.items())


def _alternatives(config: Config, stage: str, counted: Counted, device: Device) -> Iterator[dict[str, Any]]:
    """Changes of settings that may take less memory."""
    budget = config.runtime.first_pass_tokens
    runtime = config.runtime
    samples = stage in SAMPLING
    if budget is None or budget > 2 * LEAST_TOKENS:
        yield {"runtime.micro_batch_tokens": max(4096 if budget is None else budget // 4, LEAST_TOKENS)}
    recomputed = {"runtime.activation_checkpointing": True} if samples else {}
    if samples and not runtime.activation_checkpointing:
        yield recomputed
    if "critic" in counted.subject.blueprints:
        yield {"critic.kind" if stage == "critic" else "ppo.critic": "shared"}
    if len(counted.of_roles("parameters")) > 1:
        yield from ({"runtime.frozen_dtype": dtype} for dtype in ("bf16", "int8") if runtime.frozen_dtype != dtype)
    rows = counted.subject.rows.count
    if samples and config.rollout.micro_batch_size is None and rows > 8:
        yield {"rollout.micro_batch_size": max(8, rows // 4)}
    if config.adapter.kind == "none":
        yield {"adapter.kind": "lora"}
        if samples:
            yield {"adapter.kind": "lora", **recomputed}
    elif config.adapter.kind == "lora" and config.adapter.base_dtype != "nf4":
        yield {"adapter.base_dtype": "nf4"}
    if config.optimization.of(SECTIONS[stage]).optimizer == "adamw":
        yield {"optimization.optimizer": "adamw8bit"}
    if device.has_own_memory and "optimizer" not in runtime.offload:
        yield {"runtime.offload": [*runtime.offload, "optimizer"]}


def _speed(config: Config, device: Device, counted: Counted) -> Speed | None:
    if device.speed is not None or (device.accelerator and not device.is_this):
        return device.speed
    set_threads(config.runtime.num_threads)
    own = resolve_device(config.runtime.device) if device.is_this else torch.device("cpu")
    subject = counted.subject
    width = int(next(iter(subject.blueprints.values())).config.get_text_config().hidden_size)
    return measured_speed(own, subject.precision, width=width)


def _heads(stage: str, device: Device, counted: Counted) -> list[str]:
    """The subject of a plan."""
    subject = counted.subject
    sizes = counted.of_roles("parameters")
    trained = sum(counted.of_roles("trained").values()) / 4
    config = subject.config
    rows = subject.rows
    source = config.reward_model.base or config.model if stage == "reward" else config.model
    speed = "" if device.speed is None else f", by {device.speed.origin}"
    shortest = min(rows.prompts)
    longest = max(rows.prompts)
    origin = subject.lengths.origin
    span = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
    if stage in SAMPLING:
        told = f"{'a part' if stage == 'critic' else 'an update'}: {rows.count:,} responses of at most "
        told += f"{max(rows.responses)} tokens, all taken to be that long; prompts of {span} tokens ({origin})"
    else:
        kind = "demonstrations" if stage == "sft" else "comparisons"
        told = f"a step: {rows.count:,} {kind} of {min(rows.lengths)} to {max(rows.lengths)} tokens in all ({origin})"
    return [
        f"{stage} of {source} on {device.name}{speed}; products in {subject.precision}",
        f"parameters: {', '.join(f'{role} {_number(size)}' for role, size in sizes.items())}; "
        f"{_number(trained)} of them are trained",
        told,
    ]


def _number(count: float) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,.0f}"
