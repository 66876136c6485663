"""Extending a run: the settings that only lengthen it, and what a longer run does to its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.config import Config, load_config
from kedge.errors import ConfigError
from kedge.inspect.record import read_json_object
from kedge.system.output import CONFIG_FILE, FINISHED_FILE, is_run
from kedge.training.checkpoint.store import Checkpoint
from kedge.training.optimizer import learning_rate_at
from kedge.training.value_warmup import ValueWarmup

__all__ = ["LENGTHS", "check_extension", "describe_extension", "lengthening"]

LENGTHS = {
    "ppo": "ppo.num_updates",
    "sft": "sft.num_epochs",
    "reward": "reward_model.num_epochs",
    "critic": "critic.num_epochs",
    "control": "control.total_steps",
}
"""The length of each stage."""

BOUNDS = ("ppo.eval_patience", "ppo.max_kl")
"""What ends a PPO run early; null for never."""


def lengthening(folder: Path, config: Config, stage: str) -> list[str]:
    """The fields by which a configuration makes the run in a folder longer, without any other effect on its past.

    Args:
        folder: The run's folder.
        config: The configuration to resume it with.
        stage: Its stage.
    """
    if stage not in LENGTHS or not is_run(folder):
        return []
    saved, now = (each.model_dump(mode="json") for each in (load_config(folder / CONFIG_FILE), config))
    length, bounds = LENGTHS[stage], BOUNDS if stage == "ppo" else ()
    longer = [length] if _value(now, length) > _value(saved, length) else []
    return longer + [name for name in bounds if _is_looser(_value(saved, name), _value(now, name))]


def check_extension(folder: Path, checkpoint: Checkpoint | None) -> None:
    """Check that the final state of a finished run was kept; nothing for a run that has not finished.

    Raises:
        ConfigError: It was not.
    """
    ending = read_json_object(folder / FINISHED_FILE)
    summary = ending.get("summary") or {}
    last = ending.get("updates", ending.get("num_steps", summary.get("num_steps")))
    if ending and (checkpoint is None or checkpoint.update != last):
        kept = "no checkpoint" if checkpoint is None else f"only that of update {checkpoint.update}"
        raise ConfigError(
            f"{folder} cannot be extended: it finished after update {last}, but {kept} was kept "
            "(checkpoint.keep_last=true keeps the last one)"
        )


def describe_extension(config: Config, stage: str, done: int, progress: Mapping[str, Any] | None = None) -> str:
    """What a longer run does to the schedule, in one line.

    Args:
        config: The configuration to resume with.
        stage: The stage.
        done: Updates, or optimizer steps, so far.
        progress: The saved progress of the run, for when its critic's warm-up ended.
    """
    stretched = _stretched(config, stage)
    if not stretched:
        every = {"ppo": config.ppo.evaluation.eval_every, "control": config.control.eval_every}.get(stage)
        condition = f"; the evaluation after update {done} is an additional one" if every and done % every else ""
        if stage not in ("ppo", "control"):
            condition = ", if the batch size divides the rows"
        return f"The run goes on after update {done}, bit for bit as if it had always been this long{condition}."
    next_rate = {"ppo": _next_rate, "control": _next_control_rate}.get(stage)
    rate = next_rate(config, done, progress or {}) if next_rate else None
    rate = "" if rate is None else f"; update {done + 1} has a learning rate of {rate:.3g}"
    return (
        f"The run goes on after update {done}. Stretched to the new length: {', '.join(stretched)}{rate}. The result "
        "is not the one of a run that was this long from the start."
    )


def _stretched(config: Config, stage: str) -> list[str]:
    """What a schedule plans over the whole run."""
    if stage == "control":
        loop, clip = config.control.loop, config.control.objective.anneal_clip_range
        decay = [] if loop.schedule == "constant" else [_decay(loop.schedule)]
        compiles = ["what control.compile=auto decides by"] if loop.compile == "auto" else []
        return [*decay, *(["that of the clip range"] if decay and clip else []), *compiles]
    supervised = {"sft": config.sft, "reward": config.reward_model, "critic": config.critic}
    section = config.ppo.loop if stage == "ppo" else supervised[stage]
    optimizer = config.ppo.optimization if stage == "ppo" else supervised[stage].optimization
    stretched = [] if section.schedule == "constant" else [_decay(section.schedule)]
    stretched += ["its warm-up"] if optimizer.warmup_fraction else []
    stretched += ["the KL controller's horizon"] if stage == "ppo" and config.ppo.kl.kl_controller != "fixed" else []
    return stretched


def _decay(schedule: str) -> str:
    return f"the {schedule} decay of the learning rate"


def _next_control_rate(config: Config, done: int, progress: Mapping[str, Any]) -> float:
    loop = config.control.loop
    return learning_rate_at(done, config.control.num_updates, learning_rate=loop.learning_rate, schedule=loop.schedule)


def _next_rate(config: Config, done: int, progress: Mapping[str, Any]) -> float:
    ppo, value = config.ppo, config.ppo.value
    warmup = ValueWarmup(
        most=value.value_warmup_updates, until=value.value_warmup_until, num_updates=ppo.loop.num_updates
    ).resume(progress)
    return learning_rate_at(
        max(0, done - warmup.num_updates),
        warmup.num_policy_updates,
        learning_rate=ppo.loop.learning_rate,
        schedule=ppo.loop.schedule,
        warmup_steps=round(ppo.optimization.warmup_fraction * warmup.num_policy_updates),
    )


def _is_looser(saved: float | None, now: float | None) -> bool:
    return saved is not None and (now is None or now > saved)


def _value(settings: Mapping[str, Any], dotted: str) -> Any:
    section, _, name = dotted.partition(".")
    return settings[section][name]
