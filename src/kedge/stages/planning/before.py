"""The plan of a run that is about to start: said in one line, and a reason to stop where it cannot fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from kedge.config import Config, with_values
from kedge.errors import ConfigError, KedgeError
from kedge.logs.progress import say
from kedge.plan.devices import Device
from kedge.plan.machine import MachinePlan
from kedge.plan.machine_report import format_bytes, peak_line
from kedge.stages.planning.alternatives import LEAST_TOKENS, SAMPLING
from kedge.stages.planning.lengths import Lengths
from kedge.stages.planning.plan import Counted, count_stage, plan_of
from kedge.stages.planning.small import is_small
from kedge.stages.planning.stages import rlhf_stages
from kedge.stages.planning.this_machine import as_on, this_machine
from kedge.system.invocation import num_ranks
from kedge.system.texts import error_text

__all__ = ["plan_before", "plan_chain_before"]

LOWEST = 0.85
"""The closed form's largest error, as a factor; the largest that was measured is smaller: docs/memory.md."""
SHORT = 8
"""Tokens of a prompt or an answer, where none could be read."""


def plan_before(config: Config, stage: str, *, anyway: bool = False) -> MachinePlan | None:
    """Say the peak of a run, and refuse it if it cannot fit, before anything is loaded.

    Only what is certain counts against a run: weights, gradients and moments that are trained, and the peak if every
    response had two tokens, less the largest error.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic or ppo.
        anyway: Start it in any case.

    Returns:
        The plan; None for a run on several ranks, one that is small, or one whose models cannot be planned.

    Raises:
        ConfigError: It cannot fit.
    """
    return _plan(config, stage, "", anyway=anyway)


def plan_chain_before(config: Config, stage: str = "rlhf", *, anyway: bool = False) -> dict[str, MachinePlan]:
    """The same for each stage of `kedge rlhf`, before the first one begins; without those that have no plan.

    Args:
        config: The resolved configuration of the chain.
        stage: rlhf.
        anyway: Start it in any case.

    Raises:
        ConfigError: A stage cannot fit.
    """
    try:
        stages = list(rlhf_stages(config))
    except KedgeError:  # the chain itself says what is wrong
        return {}
    plans = {name: _plan(each, name, f"{name}: ", anyway=anyway) for name, each in stages}
    return {name: plan for name, plan in plans.items() if plan is not None}


def _plan(config: Config, stage: str, label: str, *, anyway: bool) -> MachinePlan | None:
    if num_ranks() > 1 or is_small(config, stage):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers; loading shows them
            device = this_machine(config.runtime.device)
            counted = count_stage(as_on(device, config), stage)
            plan = plan_of(counted, on_cpu=not device.accelerator)
            say(f"{label}{peak_line(plan, device)}")
            if device.memory is None or plan.needed <= device.memory or anyway:
                return plan
            least = _least(config, stage, counted)
            if least > device.memory:
                raise ConfigError(_refusal(config, stage, counted, plan, device, least))
            return plan
    except ConfigError:
        raise
    except KedgeError:  # the stage itself says what is wrong with a model or with data
        return None
    except Exception as error:  # of a model's code, run without contents; a plan is no reason to stop
        say(f"{label}peak memory could not be planned: {type(error).__name__}: {error_text(error)}")
        return None


def _least(config: Config, stage: str, counted: Counted) -> float:
    """Bytes that the run needs in any case."""
    trained = sum(size for name, size in counted.figures.items() if name.endswith(".trained"))
    state = sum(part.bytes for part in plan_of(counted).phases[-1].parts if part.kind == "optimizer")
    lengths = Lengths((SHORT,), (SHORT,)) if counted.lengths.assumed else counted.lengths
    shortest = count_stage(config, stage, response=2, lengths=lengths)
    return max(2 * trained + state, LOWEST * plan_of(shortest).peak.bytes)


def _refusal(config: Config, stage: str, counted: Counted, plan: MachinePlan, device: Device, least: float) -> str:
    assert device.memory is not None
    needs = f"{stage} needs {format_bytes(plan.needed)} of memory in {plan.peak.name}, at least {format_bytes(least)}"
    there = f"{device.name} has {format_bytes(device.memory)} ({device.bound})"
    for changes in _remedies(stage):
        try:
            other = count_stage(with_values(config, changes), stage, lengths=counted.lengths)
        except KedgeError:  # the change does not go with the other settings
            continue
        needed = plan_of(other, on_cpu=not device.accelerator).needed
        if needed < device.memory:
            settings = " ".join(f"{name}={str(value).lower()}" for name, value in changes.items())
            return f"{needs}, and {there}; set {settings} ({format_bytes(needed)}), or pass --anyway"
    return f"{needs}, and {there}; take a smaller model (kedge plan), or pass --anyway"


def _remedies(stage: str) -> Iterator[Mapping[str, object]]:
    """What a refusal tries, in this order; kedge plan has more."""
    if stage in SAMPLING:
        smaller: Mapping[str, object] = {"runtime.activation_checkpointing": True}
    else:
        smaller = {"runtime.micro_batch_tokens": LEAST_TOKENS}
    yield smaller
    yield {"adapter.kind": "lora", **smaller}
