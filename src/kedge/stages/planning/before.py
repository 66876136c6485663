"""Prints the plan of a run that is about to start, and stops a run that cannot fit."""

from __future__ import annotations

import warnings
from pathlib import Path

from kedge.config import Config, with_values
from kedge.errors import ConfigError, KedgeError
from kedge.logs.progress import say
from kedge.stages.planning.devices import Device, this_machine
from kedge.stages.planning.hollow import read_blueprint
from kedge.stages.planning.plan import LEAST_TOKENS, Counted, as_on, count_stage, rlhf_stages, written
from kedge.stages.planning.report import MachinePlan, format_bytes, peak_line
from kedge.stages.planning.rows import Lengths
from kedge.stages.planning.updates import SAMPLING
from kedge.system.invocation import num_ranks
from kedge.system.texts import error_text

__all__ = ["is_small", "plan_before", "plan_chain_before"]

LOWEST = 0.85
"""The largest error of a plan, as a factor; the largest that was measured is smaller: bench/plan/RESULTS.md."""
SHORT = 8
"""Tokens of a prompt or an answer, where none could be read."""
LEAST = 2**28
"""Bytes below which a run is not planned."""


def plan_before(config: Config, stage: str, *, anyway: bool = False, label: str = "") -> MachinePlan | None:
    """Say the peak of a run, and refuse it if it cannot fit, before anything is loaded.

    Only what is certain counts against a run: weights, gradients and moments that are trained, and the peak if every
    response had two tokens, less the largest error.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic or ppo.
        anyway: Start it in any case.
        label: Prefix of the messages.

    Returns:
        The plan; None for a run on several ranks, a small one, or one with models that cannot be planned.

    Raises:
        ConfigError: It cannot fit.
    """
    if num_ranks() > 1 or is_small(config, stage):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers; loading shows them
            device = this_machine(config.runtime.device)
            counted = count_stage(as_on(device, config), stage)
            plan = counted.plan(on_cpu=not device.accelerator)
            say(f"{label}{peak_line(plan, device)}")
            if device.memory is None or plan.needed <= device.memory or anyway:
                return plan
            least = _least(config, stage, counted)
            if least > device.memory:
                raise ConfigError(_refusal(config, stage, counted, plan, device, least))
            return plan
    except ConfigError:
        raise
    except KedgeError:  # the stage itself reports errors of a model or of data
        return None
    except Exception as error:  # of a model's code, run without contents; a failed plan must not stop the run
        say(f"{label}peak memory could not be planned: {type(error).__name__}: {error_text(error)}")
        return None


def plan_chain_before(config: Config, stage: str = "rlhf", *, anyway: bool = False) -> dict[str, MachinePlan]:
    """Plan each stage of `kedge rlhf` before the first one starts; stages without a plan are left out."""
    try:
        stages = list(rlhf_stages(config))
    except KedgeError:  # the chain itself reports the error
        return {}
    plans = {name: plan_before(each, name, anyway=anyway, label=f"{name}: ") for name, each in stages}
    return {name: plan for name, plan in plans.items() if plan is not None}


def is_small(config: Config, stage: str) -> bool:
    """A generous bound is far below any machine's memory; reads config.json alone."""
    source = (config.reward_model.base if stage == "reward" else None) or config.model
    try:
        blueprint = read_blueprint(str(source), trust_remote_code=config.runtime.trust_remote_code)
    except KedgeError:
        return False
    text = blueprint.config.get_text_config()
    width = text.hidden_size
    layers = text.num_hidden_layers
    vocabulary = text.vocab_size
    wide = max(8 * width, 4 * (getattr(text, "intermediate_size", None) or 0))
    parameters = width * (2 * vocabulary + layers * (4 * width + wide))
    samples = stage in SAMPLING
    rows, longest = _rows(config, stage)
    tokens = min(config.runtime.first_pass_tokens or rows * longest, rows * longest)
    models = 3 + len(config.reward) if samples else 1
    states = 400 * layers * width * tokens
    logits = 40 * min(2**24, tokens * vocabulary)
    cache = rows * longest * 8 * layers * width if samples else 0
    return 16 * models * parameters + states + logits + cache < LEAST


def _rows(config: Config, stage: str) -> tuple[int, int]:
    """The rows of an update or a step, and a bound on their tokens."""
    if stage in SAMPLING:
        each = config.critic.num_responses if stage == "critic" else config.rollout.num_responses
        return config.rollout.num_prompts * each, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if stage == "sft":
        data = config.data.demonstrations
        count = config.sft.batch_size
        longest = config.data.max_length
    else:
        data = config.data.comparisons
        count = config.reward_model.batch_size
        longest = 2 * config.data.max_length
    return count, min(longest, _longest_line(data))


def _longest_line(names: list[str]) -> int:
    """Bytes of the longest line of small local files, at least as many as its tokens; else a number above all."""
    longest = 0
    for name in names:
        path = Path(name)
        if path.suffix != ".jsonl" or not path.is_file() or path.stat().st_size > LEAST // 2**8:
            return LEAST
        longest = max(longest, *map(len, path.read_bytes().splitlines() or [b""]))
    return longest or LEAST


def _least(config: Config, stage: str, counted: Counted) -> float:
    """Bytes that the run needs in any case."""
    trained = sum(counted.of_roles("trained").values())
    state = sum(part.bytes for part in counted.plan().phases[-1].parts if part.kind == "optimizer")
    lengths = counted.subject.lengths
    shortest = count_stage(
        config, stage, response=2, lengths=Lengths((SHORT,), (SHORT,)) if lengths.assumed else lengths
    )
    return max(2 * trained + state, LOWEST * shortest.plan().peak.bytes)


def _refusal(config: Config, stage: str, counted: Counted, plan: MachinePlan, device: Device, least: float) -> str:
    assert device.memory is not None
    needs = f"{stage} needs {format_bytes(plan.needed)} of memory in {plan.peak.name}, at least {format_bytes(least)}"
    there = f"{device.name} has {format_bytes(device.memory)} ({device.bound})"
    samples = stage in SAMPLING
    smaller = {"runtime.activation_checkpointing": True} if samples else {"runtime.micro_batch_tokens": LEAST_TOKENS}
    for changes in (smaller, {"adapter.kind": "lora", **smaller}):
        try:
            other = count_stage(with_values(config, changes), stage, lengths=counted.subject.lengths)
        except KedgeError:  # the change does not go with the other settings
            continue
        needed = other.plan(on_cpu=not device.accelerator).needed
        if needed < device.memory:
            return f"{needs}, and {there}; set {written(changes)} ({format_bytes(needed)}), or pass --anyway"
    return f"{needs}, and {there}; take a smaller model (kedge plan), or pass --anyway"
