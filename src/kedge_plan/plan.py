"""Plans a stage on one machine: its memory, its time, and the effects of other settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kedge.config import Config, with_values
from kedge.models import model_width, resolve_precision
from kedge.training.host_state import AT_A_TIME
from kedge.training.runtime import resolve_device, set_threads
from kedge_base.errors import KedgeError, ModelError
from kedge_base.stage import find_stage
from kedge_base.texts import typed_error_text
from kedge_plan.counting import Figures
from kedge_plan.devices import Device, Speed, find_device, measured_speed, this_machine
from kedge_plan.report import MachinePlan, PlannedPhase, machine_report
from kedge_plan.rows import Lengths, lengths_of
from kedge_plan.updates import Subject, subject_of

PHASES = ("rollout", "reward", "experience", "fit", "train", "ptx", "step", "evaluation")
PROCESS = 0.6 * 2**30
"""Bytes that a process needs for Python, torch and transformers."""
ALLOCATOR = 0.06
ALLOCATOR_ON_CPU = 0.2
"""Share of the tensors' bytes that the allocator adds, on CUDA and on a CPU. The CPU's keeps freed memory for the next
pass; a fifth is typical, not a bound: bench/plan/RESULTS.md."""
IN_8_BITS = 1 / 4 + 1 / 256
"""Size of 8-bit Adam's state, with a scale per 256 numbers, relative to fp32."""
HOST_BANDWIDTH = 20e9
"""Byte/s that PCIe 4.0 reaches between a GPU and host memory, of a nominal 31.5 GB/s."""
LEAST_TOKENS = 512
RECOMPUTES = "runtime.activation_checkpointing"
OF_PASSES = ("activations", "logits", "key–value cache")
"""Uses of memory that are freed at the end of a phase."""


class Unplannable(ModelError):
    """Raised if a model's code fails on tensors without contents."""


@dataclass(frozen=True)
class Counted:
    """A stage with a counted update.

    Attributes:
        subject: The stage.
        figures: The counts at full depth.
    """

    subject: Subject
    figures: Figures

    def plan(self, device: Device | None = None, speed: Speed | None = None) -> MachinePlan:
        """Make the plan.

        Args:
            device: Its device, whose process counts if it is a CPU; None for a GPU.
            speed: The machine's speed; None for a plan without times.
        """
        subject = self.subject
        config = subject.config
        figures = self.figures
        phases = tuple(self._phase(name, speed) for name in PHASES if ("work", name, "calls") in figures)
        if subject.stage == "ppo" and config.rollout.max_staleness:
            phases = _while_sampling(phases)
        is_gpu = device is None or device.accelerator
        process, overhead = (0.0, ALLOCATOR) if is_gpu else (PROCESS, ALLOCATOR_ON_CPU)
        again = config.runtime.recomputes
        cost = self.of_roles("cost")
        steps = cost["update"] / cost["step"] if cost else None
        return MachinePlan(subject.stage, subject.work.unit, phases, subject.num_units, steps, process, overhead, again)

    def of_roles(self, name: str) -> dict[str, float]:
        """The `parameters`, `trained` or `resting` bytes of each role, or the `cost` of an update and of a step."""
        return {figure[1]: size for figure, size in self.figures.items() if figure[0] == name}

    def _phase(self, name: str, speed: Speed | None) -> PlannedPhase:
        config = self.subject.config
        share = IN_8_BITS if self.subject.optimizer_in(config) == "adamw8bit" else 1.0
        moves = "optimizer" in config.runtime.offload
        parts: dict[str, dict[tuple[str, str], float]] = {}
        state = 0.0
        for figure, size in self.figures.items():
            if figure[:2] == ("held", name):
                _, _, part, kind, role = figure
                if kind == "optimizer":
                    size = share * size
                    state += size
                    if moves:
                        size = min(size, 2 * share * AT_A_TIME) if name == "step" else 0.0
                parts.setdefault(part, {})[kind, role] = size
        held = max(parts.values(), key=lambda part: sum(part.values()))
        if speed is None:
            return PlannedPhase(name, held)
        work = {figure[2]: size for figure, size in self.figures.items() if figure[:2] == ("work", name)}
        seconds = speed.seconds(work)
        if name == "step" and moves:
            seconds += 2 * state / HOST_BANDWIDTH * self.subject.work.optimizer_steps(config)
        for role, size in self.of_roles("resting").items():
            if name == {"reference": "experience", "judge": None}.get(role, "reward"):
                seconds += size / HOST_BANDWIDTH
        return PlannedPhase(name, held, seconds)


def _while_sampling(phases: Sequence[PlannedPhase]) -> tuple[PlannedPhase, ...]:
    """Add to each phase the memory of sampling and scoring later responses in the background."""
    background = [phase for phase in phases if phase.name in ("rollout", "reward")]
    passes = [{label: size for label, size in each.held.items() if label[0] in OF_PASSES} for each in background]
    added = max(passes, key=lambda held: sum(held.values()))
    return tuple(
        phase
        if phase in background or phase.name == "evaluation"
        else replace(
            phase, held={label: phase.held.get(label, 0.0) + added.get(label, 0.0) for label in {**phase.held, **added}}
        )
        for phase in phases
    )


def count_stage(
    config: Config,
    stage: str,
    *,
    accelerator: bool | None = None,
    response: int | None = None,
    lengths: Lengths | None = None,
) -> Counted:
    """Count an update of a stage from config.json and some rows of the data.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic or ppo.
        accelerator: Count as on an accelerator or not; None uses the run's device.
        response: Tokens of each sampled response; None for the longest allowed.
        lengths: The data's lengths; None reads some rows.

    Raises:
        ModelError: A model has no usable config.json.
        ConfigError: The run cannot be planned.
        Unplannable: A model's code fails on tensors without contents.
    """
    source = find_stage(stage).starting_model(config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' warnings; the stage itself shows them
            precision = config.runtime.precision
            if accelerator is None:
                device = resolve_device(config.runtime.device)
                accelerator = device.type != "cpu"
                width = model_width(str(source), trust_remote_code=config.runtime.trust_remote_code)
                precision = resolve_precision(precision, device, width=width)
            elif precision == "auto":
                precision = "bf16" if accelerator else "fp32"
            lengths = lengths or lengths_of(config, stage)
            subject = subject_of(config, stage, lengths, precision, accelerator=accelerator, response=response)
            return Counted(subject, subject.figures())
    except KedgeError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise Unplannable(
            f"{stage} of {source} cannot be planned: without its weights the model's code raises "
            f"{typed_error_text(error, 100)}"
        ) from error


def count_on(device: Device, config: Config, stage: str) -> Counted:
    """Count a stage on a device, without the settings that have no effect there; errors as in `count_stage`.

    `runtime.activation_checkpointing=auto` is on if the run fits only so, or not at all, and the model can do it.
    """
    config = as_on(device, config)
    decides = config.runtime.activation_checkpointing == "auto"
    kept = with_values(config, {RECOMPUTES: False}) if decides else config
    counted = count_stage(kept, stage, accelerator=_kind(device))
    if decides and counted.plan(device).needed > device.room:
        return _changed(counted, device, {RECOMPUTES: True}) or counted
    return counted


def plan_machine(
    config: Config,
    stage: str,
    *,
    device_name: str | None = None,
    price_per_hour: float | None = None,
    command: str = "",
) -> str:
    """Plan a stage, and return the plan as text; only config.json and some rows of the data are loaded.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic, ppo, or rlhf, whose stages are planned in turn.
        device_name: See `find_device`; None for this machine.
        price_per_hour: The device's price; None leaves out costs.
        command: The command that starts the run; settings with which it would fit are shown behind it.

    Raises:
        KedgeError: A model has no usable config.json, or the device is unknown.
    """
    if stage == "rlhf":
        given: Any = {"device_name": device_name, "price_per_hour": price_per_hour, "command": command}
        return "\n\n".join(plan_machine(each, name, **given) for name, each in rlhf_stages(config))
    device = this_machine(config.runtime.device) if device_name is None else find_device(device_name)
    counted = count_on(device, config, stage)
    speed = _speed(config, device, counted)
    plan = counted.plan(device, speed)
    less = 0.99 * plan.peak.bytes
    others = {name: other for name, other in proposals(counted, device, speed) if other.peak.bytes < less}
    found = dict(remedies(counted, device, device.room)) if plan.excess(device.room) else {}
    return machine_report(
        plan,
        device,
        _heads(device, counted),
        others,
        price_per_hour=price_per_hour,
        remedies=found,
        command=command or f"kedge {stage}",
    )


def as_on(device: Device, config: Config) -> Config:
    """Drop the settings that have no effect on a device."""
    if config.runtime.offload and not device.has_own_memory:
        return with_values(config, {"runtime.offload": []})
    return config


def rlhf_stages(config: Config) -> Iterator[tuple[str, Config]]:
    """The stages of an RLHF round with their configurations; trained models have the shape of those they start from."""
    trained = {"source": config.reward_model.base or config.model, "name": "trained"}
    scored = with_values(config, {"reward": [trained, *(term.model_dump() for term in config.reward)]})
    yield "sft", config
    yield "reward", config
    if config.rlhf.train_critic:
        yield "critic", scored
        scored = with_values(scored, {"ppo.critic": config.critic.kind, "ppo.critic_init": config.critic.base})
    yield "ppo", scored


def proposals(counted: Counted, device: Device, speed: Speed | None = None) -> Iterator[tuple[str, MachinePlan]]:
    """Make plans with other settings, keyed by the settings as written on the command line, by what they cost."""
    for changes in _alternatives(counted, device):
        if (other := _changed(counted, device, changes)) is not None:
            yield _written(changes), other.plan(device, speed)


def remedies(counted: Counted, device: Device, room: float) -> Iterator[tuple[str, MachinePlan]]:
    """Find settings with which a run fits, the cheapest first; those that train something else come last.

    If no other one is enough, those that help are added up in this order, and every sum is yielded up to the one that
    fits.

    Args:
        counted: The run.
        device: Its device.
        room: Bytes that it may take.

    Yields:
        Settings with their plans; those that do not fit are parts of the next one.
    """
    trains = ("adapter.", counted.subject.work.critic_field)
    last: list[tuple[str, MachinePlan]] = []
    is_found = False
    for name, plan in proposals(counted, device):
        if plan.excess(room) == 0:
            if name.startswith(trains):
                last.append((name, plan))
            else:
                is_found = True
                yield name, plan
    if not is_found:
        yield from _sums(counted, device, room, unless=trains if last else ())
    yield from last


def _sums(
    counted: Counted, device: Device, room: float, *, unless: tuple[str, ...]
) -> Sequence[tuple[str, MachinePlan]]:
    """Add up settings until the run fits, without those that begin with `unless`; nothing if they are not enough."""
    together: dict[str, Any] = {}
    sums: list[tuple[str, MachinePlan]] = []
    tried = list[dict[str, Any]]()
    plan = counted.plan(device)
    while plan.excess(room):
        changes = next((each for each in _alternatives(counted, device) if each not in tried), None)
        if changes is None or any(name.startswith(unless) for name in changes):
            return ()
        tried.append(changes)
        other = _changed(counted, device, changes)
        if other is not None and (less := other.plan(device)).excess(room) < 0.99 * plan.excess(room):
            counted, plan = other, less
            together |= changes
            sums.append((_written(together), plan))
    return sums


def _changed(counted: Counted, device: Device, changes: Mapping[str, Any]) -> Counted | None:
    """The stage with other settings; None if they conflict with others."""
    subject = counted.subject
    try:
        config = with_values(subject.config, changes)
        moves_models = "frozen" in {*config.runtime.offload} ^ {*subject.config.runtime.offload}
        is_stand_in = changes.get("optimization.optimizer") == "adamw8bit" or "runtime.offload" in changes
        if is_stand_in and not moves_models:
            return replace(counted, subject=replace(subject, config=config))
        return count_stage(config, subject.stage, accelerator=_kind(device), lengths=subject.lengths)
    except KedgeError:
        return None


def _written(changes: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        several = isinstance(value, list) and len(value) > 1
        return f"[{','.join(value)}]" if several else str(value[0] if isinstance(value, list) else value).lower()

    return " ".join(f"{name}={text(value)}" for name, value in changes.items())


def _alternatives(counted: Counted, device: Device) -> Iterator[dict[str, Any]]:
    """List changes of settings that may save memory: first those that cost time, then those that round, then those
    that train something else.
    """
    subject = counted.subject
    config = subject.config
    runtime = config.runtime
    samples = find_stage(subject.stage).samples
    budget = runtime.first_pass_tokens
    if budget is None or budget > 2 * LEAST_TOKENS:
        yield {"runtime.micro_batch_tokens": max(4096 if budget is None else budget // 4, LEAST_TOKENS)}
    rows = subject.rows.count
    if samples and config.rollout.micro_batch_size is None and rows > 8:
        yield {"rollout.micro_batch_size": max(8, rows // 4)}
    has_frozen = len(counted.of_roles("parameters")) > 1
    for name, is_useful in (("frozen", has_frozen), ("optimizer", True)):
        if is_useful and device.has_own_memory and name not in runtime.offload:
            yield {"runtime.offload": [*runtime.offload, name]}
    recomputed = {RECOMPUTES: True}
    if not runtime.recomputes:
        yield recomputed
    optimizer = subject.optimizer_in(config)
    if optimizer == "adamw":
        yield {"optimization.optimizer": "adamw8bit"}
    if has_frozen:
        small = ["int8"] if all(each.saved_bf16 for each in subject.blueprints.values()) else ["bf16", "int8"]
        yield from ({"runtime.frozen_dtype": dtype} for dtype in small if runtime.frozen_dtype != dtype)
    if optimizer in ("adamw", "adamw8bit"):
        yield {"optimization.optimizer": "adafactor"}
    if "critic" in subject.blueprints:
        yield {subject.work.critic_field: "shared"}
    if config.adapter.kind == "none":
        yield {"adapter.kind": "lora"}
        if not runtime.recomputes:
            yield {"adapter.kind": "lora", **recomputed}
    elif config.adapter.kind == "lora" and config.adapter.base_dtype != "nf4":
        yield {"adapter.base_dtype": "nf4"}


def _kind(device: Device) -> bool | None:
    """`accelerator` of `count_stage` for a device."""
    return None if device.is_this else device.accelerator


def _speed(config: Config, device: Device, counted: Counted) -> Speed | None:
    if device.speed is not None or (device.accelerator and not device.is_this):
        return device.speed
    set_threads(config.runtime.num_threads)
    own = resolve_device(config.runtime.device) if device.is_this else torch.device("cpu")
    subject = counted.subject
    width = int(next(iter(subject.blueprints.values())).config.get_text_config().hidden_size)
    return measured_speed(own, subject.precision, width=width)


def _heads(device: Device, counted: Counted) -> list[str]:
    """The subject of a plan."""
    subject = counted.subject
    stage = find_stage(subject.stage)
    sizes = ", ".join(f"{role} {_number(size)}" for role, size in counted.of_roles("parameters").items())
    trained = _number(sum(counted.of_roles("trained").values()) / 4)
    rows = subject.rows
    speed = "" if device.speed is None else f", by {device.speed.origin}"
    if stage.samples:
        told = (
            f"{rows.count:,} responses of at most {max(rows.responses)} tokens, all taken to be that long; "
            f"prompts of {_span(rows.prompts)} tokens"
        )
    else:
        told = f"{rows.count:,} {subject.work.rows} of {_span(rows.row_lengths)} tokens in all"
    return [
        f"{stage.name} of {stage.starting_model(subject.config)} on {device.name}{speed}; products in "
        f"{subject.precision}",
        f"parameters: {sizes}; {trained} of them are trained",
        f"each {subject.work.unit}: {told} ({subject.lengths.origin})",
    ]


def _span(lengths: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(lengths), max(lengths)})))


def _number(count: float) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,.0f}"
