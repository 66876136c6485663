"""The plan of a run that is about to start: said in one line, and a reason to stop where it cannot fit."""

from __future__ import annotations

import warnings
from pathlib import Path

from kedge.config import Config, with_values
from kedge.errors import ConfigError, KedgeError
from kedge.invocation import num_ranks
from kedge.logs.progress import say
from kedge.models.pretrained import base_source
from kedge.pipelines.planning.lengths import Lengths
from kedge.pipelines.planning.plan import Counted, count_ppo, plan_of
from kedge.pipelines.planning.this_machine import this_machine
from kedge.plan.devices import Device
from kedge.plan.machine import MachinePlan
from kedge.plan.machine_report import format_bytes, peak_line
from kedge.plan.shape import read_shape

__all__ = ["plan_before"]

LEAST = 2**28
"""Bytes below which a run is not planned: nobody asks whether it fits."""
LOWEST = 0.85
"""The closed form's largest error, as a factor; the largest that was measured is smaller: docs/memory.md."""
SHORT = 8
"""Tokens of a prompt, where none could be read."""
REMEDIES = (
    {"runtime.activation_checkpointing": True},
    {"adapter.kind": "lora", "runtime.activation_checkpointing": True},
)
"""What a refusal tries, in this order; kedge plan has more."""


def plan_before(config: Config, stage: str, *, anyway: bool = False) -> MachinePlan | None:
    """Say the peak of a PPO run, and refuse it if it cannot fit, before anything is loaded.

    Only what is certain counts against a run: weights, gradients and moments that are trained, and the peak if every
    response had two tokens, less the largest error.

    Args:
        config: The resolved configuration.
        stage: Its stage.
        anyway: Start it in any case.

    Returns:
        The plan; None for a run on several ranks, one that is small, or one whose models cannot be planned.

    Raises:
        ConfigError: It cannot fit.
    """
    if num_ranks() > 1 or _is_small(config):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers; loading shows them
            device, counted = this_machine(config.runtime.device), count_ppo(config)
            plan = plan_of(counted, on_cpu=not device.accelerator)
            say(peak_line(plan, device))
            if device.memory is None or plan.needed <= device.memory or anyway:
                return plan
            least = _least(config, counted, device)
            if least > device.memory:
                raise ConfigError(_refusal(config, stage, counted, plan, device, least))
            return plan
    except ConfigError:
        raise
    except Exception:  # the stage itself says what is wrong with a model or with data; a plan is no reason to stop
        return None


def _is_small(config: Config) -> bool:
    """Whether a generous bound is far below any machine's memory; reads a local config.json alone."""
    try:
        shape = read_shape(Path(base_source(str(config.model))))  # of an adapter, its base
    except KedgeError:
        return False
    rows = config.rollout.num_prompts * config.rollout.num_responses
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = min(config.runtime.first_pass_tokens or rows * longest, rows * longest)
    models = 3 + len(config.reward)
    states = 400 * shape.layers * shape.hidden * tokens
    logits = 40 * min(2**24, tokens * shape.vocabulary)
    return 16 * models * shape.parameters + states + logits + rows * longest * 2 * shape.key_value_bytes < LEAST


def _least(config: Config, counted: Counted, device: Device) -> float:
    """Bytes that the run needs in any case."""
    trained = sum(size for name, size in counted.figures.items() if name.endswith(".trained"))
    state = sum(part.bytes for part in plan_of(counted).phases[-1].parts if part.kind == "optimizer")
    lengths = Lengths((SHORT,)) if counted.lengths.assumed else counted.lengths
    shortest = count_ppo(config, response=2, lengths=lengths)
    return max(2 * trained + state, LOWEST * plan_of(shortest).peak.bytes)


def _refusal(config: Config, stage: str, counted: Counted, plan: MachinePlan, device: Device, least: float) -> str:
    assert device.memory is not None
    needs = f"{stage} needs {format_bytes(plan.needed)} of memory in {plan.peak.name}, at least {format_bytes(least)}"
    there = f"{device.name} has {format_bytes(device.memory)} ({device.bound})"
    for changes in REMEDIES:
        try:
            other = count_ppo(with_values(config, changes), lengths=counted.lengths)
        except KedgeError:  # the change does not go with the other settings
            continue
        needed = plan_of(other, on_cpu=not device.accelerator).needed
        if needed < device.memory:
            settings = " ".join(f"{name}={str(value).lower()}" for name, value in changes.items())
            return f"{needs}, and {there}; set {settings} ({format_bytes(needed)}), or pass --anyway"
    return f"{needs}, and {there}; take a smaller model (kedge plan), or pass --anyway"
