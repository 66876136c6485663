"""Prints the plan of a run that is about to start and what would make it fit, and stops a run that cannot fit."""

from __future__ import annotations

from kedge.config import Config, with_values
from kedge_base.errors import ConfigError, KedgeError
from kedge_base.machine.invocation import num_ranks
from kedge_base.machine.memory import with_unit
from kedge_base.machine.progress import say
from kedge_base.stage import find_stage
from kedge_plan.devices import Device, this_machine
from kedge_plan.hollow import read_blueprint
from kedge_plan.plan import Counted, Unplannable, count_on, count_stage, remedies, rlhf_stages
from kedge_plan.report import MachinePlan, peak_line
from kedge_plan.rows import Lengths

LOWEST = 0.85
"""Factor for the largest error of a plan; measured errors are smaller: bench/plan/RESULTS.md."""
SHORT = 8
"""Tokens assumed for a prompt or an answer if no data could be read."""
SMALL = 2**22
"""Models with fewer parameters are not planned, since counting takes about a second."""


def plan_before(config: Config, stage: str, *, anyway: bool = False, label: str = "") -> MachinePlan | None:
    """Print a run's planned peak, and reject the run if it cannot fit, before anything is loaded.

    Only a certain lower bound counts against a run: trained weights with their gradients and moments, or the peak with
    responses of two tokens, less the plan's largest error.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic or ppo.
        anyway: Never refuse.
        label: Prefix of the messages.

    Returns:
        The plan; None for a run on several ranks, with a small model, or with models that cannot be planned.

    Raises:
        ConfigError: It cannot fit.
    """
    if num_ranks() > 1 or is_small(config, stage):
        return None
    try:
        device = this_machine(config.runtime.device)
        counted = count_on(device, config, stage)
    except ConfigError:
        raise
    except Unplannable as error:
        say(f"{label}{error}; its memory is not checked")
        return None
    except KedgeError:  # the stage itself reports errors of a model or of data
        return None
    plan = counted.plan(device)
    say(f"{label}{peak_line(plan, device)}")
    if device.memory is None or plan.needed <= device.room:
        return plan
    if plan.needed > device.memory and not anyway and (least := _least(counted)) > device.memory:
        needs = f"{stage} needs {with_unit(plan.needed)} of memory in {plan.peak.name}, at least {with_unit(least)}"
        there = f"{device.name} has {with_unit(device.memory)} ({device.bound})"
        raise ConfigError(f"{needs}, and {there}; {_advice(counted, device, device.memory)}, or pass --anyway")
    say(f"{label}if memory runs out: {_advice(counted, device, device.room)}")
    return plan


def plan_chain_before(config: Config, stage: str = "rlhf", *, anyway: bool = False) -> dict[str, MachinePlan]:
    """Plan each stage of `kedge rlhf` before the first one starts; stages without a plan are left out."""
    try:
        stages = list(rlhf_stages(config))
    except KedgeError:  # the chain itself reports the error
        return {}
    plans = {name: plan_before(each, name, anyway=anyway, label=f"{name}: ") for name, each in stages}
    return {name: plan for name, plan in plans.items() if plan is not None}


def is_small(config: Config, stage: str) -> bool:
    """True if the model is far too small to fill any machine's memory; reads only config.json."""
    source = str(find_stage(stage).starting_model(config))
    try:
        text = read_blueprint(source, trust_remote_code=config.runtime.trust_remote_code).config.get_text_config()
        width = text.hidden_size
        wide = max(8 * width, 4 * (getattr(text, "intermediate_size", None) or 0))
        return width * (2 * text.vocab_size + text.num_hidden_layers * (4 * width + wide)) < SMALL
    except (KedgeError, AttributeError):
        return False


def _least(counted: Counted) -> float:
    """A lower bound on the bytes that the run needs."""
    subject = counted.subject
    trained = sum(counted.of_roles("trained").values())
    [step] = [phase for phase in counted.plan().phases if phase.name == "step"]
    state = sum(size for (kind, _), size in step.held.items() if kind == "optimizer")
    lengths = Lengths((SHORT,), (SHORT,)) if subject.lengths.assumed else subject.lengths
    # Of the queued versions of the weights, only the newest is certain to exist.
    config = with_values(subject.config, {"rollout.max_staleness": min(1, subject.config.rollout.max_staleness)})
    shortest = count_stage(config, subject.stage, response=2, lengths=lengths).plan()
    # The evaluation does not count: it needs less memory if there are fewer prompts.
    peak = max(phase.bytes for phase in shortest.phases if phase.name != "evaluation")
    return max(2 * trained + state, LOWEST * peak)


def _advice(counted: Counted, device: Device, room: float) -> str:
    """Say which settings make the run fit."""
    for settings, plan in remedies(counted, device, room):
        if plan.excess(room) == 0:
            return f"set {settings} ({with_unit(plan.needed)})"
    return "take a smaller model (kedge plan)"
