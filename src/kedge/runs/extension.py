"""Extending a run: the settings that only lengthen it, and the effect on its schedules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.config import Config, load_config
from kedge.errors import ConfigError
from kedge.inspect.record import read_json_object
from kedge.stages.stage import Stage, find_stage, value_of
from kedge.system.output import CONFIG_FILE, FINISHED_FILE, is_run
from kedge.training.checkpoint.store import Checkpoint

__all__ = ["check_extension", "describe_extension", "lengthening"]


def lengthening(folder: Path, config: Config, stage: str) -> list[str]:
    """The fields by which a configuration makes the run in a folder longer, without any other effect on its past.

    Args:
        folder: The run's folder.
        config: The configuration to resume it with.
        stage: Its stage.
    """
    described = find_stage(stage)
    if not described.length or not is_run(folder):
        return []
    saved, now = (each.model_dump(mode="json") for each in (load_config(folder / CONFIG_FILE), config))
    length = described.length
    longer = [length] if _value(now, length) > _value(saved, length) else []
    return longer + [name for name in described.bounds if _is_looser(_value(saved, name), _value(now, name))]


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


def describe_extension(config: Config, stage: str, done: int) -> str:
    """Describe the effect of a longer run on its schedules, in one line.

    Args:
        config: The configuration to resume with.
        stage: The stage.
        done: Updates, or optimizer steps, so far.
    """
    described = find_stage(stage)
    stretched = _stretched(config, described) if described.stretched is None else described.stretched(config)
    if stretched:
        return (
            f"The run continues after update {done}. Stretched to the new length: {', '.join(stretched)}. The result "
            "is not that of a run that was this long from the start."
        )
    condition = ", if the batch size divides the rows"
    if described.unit == "update":
        every = value_of(config, described.evaluations)
        condition = f"; the evaluation after update {done} is an additional one" if every and done % every else ""
    return f"The run continues after update {done}, bit for bit as if it had always been this long{condition}."


def _stretched(config: Config, stage: Stage) -> list[str]:
    """The schedules that are planned over the whole run."""
    [section] = stage.trains
    settings = value_of(config, section).model_dump()
    decay, adapted = settings["schedule"], settings.get("kl_controller", "fixed")
    return [
        *([] if decay == "constant" else [f"the {decay} decay of the learning rate"]),
        *(["its warm-up"] if settings["warmup_fraction"] else []),
        *([] if adapted == "fixed" else ["the KL controller's horizon"]),
    ]


def _is_looser(saved: float | None, now: float | None) -> bool:
    return saved is not None and (now is None or now > saved)


def _value(settings: Mapping[str, Any], dotted: str) -> Any:
    section, _, name = dotted.partition(".")
    return settings[section][name]
