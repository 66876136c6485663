"""Options that several commands share, and those of a stage, made from its description."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from kedge.cli.completion import complete_override
from kedge.cli.values import weighted_rewards
from kedge.config import LANGUAGE_PRESETS, PRESETS, initial_critic
from kedge.errors import ConfigError
from kedge.stages.descriptions import REWARD
from kedge.stages.stage import Flag

__all__ = [
    "AnyPreset",
    "ConfigFile",
    "Out",
    "Overrides",
    "PresetName",
    "Reward",
    "Seed",
    "parameter",
    "parameters_of",
    "preset_option",
    "settings_of",
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE",
        help="Fields to set: num_updates=50, or ppo.num_updates=50 where several sections have the name. See: kedge "
        "config explain.",
        autocompletion=complete_override,
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (YAML).")]


def preset_option(names: Iterable[str]) -> OptionInfo:
    """The option for some presets."""
    about = "Repeatable; merged in order, the later one counts."
    return typer.Option("--preset", metavar="NAME", help=f"Preset: {', '.join(names)}. {about}")


def _option_of(flag: Flag) -> OptionInfo:
    return typer.Option(*flag.names, metavar=flag.metavar, help=flag.help)


PresetName = Annotated[list[str] | None, preset_option(LANGUAGE_PRESETS)]
AnyPreset = Annotated[list[str] | None, preset_option(PRESETS)]
Reward = Annotated[list[str] | None, _option_of(REWARD)]
Out = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="New or empty folder for the run; by default runs/STAGE, runs/STAGE-2, ..."),
]
Push = Annotated[
    str | None, typer.Option(metavar="ORG/NAME", help="Push the finished model to this repository on the hub.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Random seed; 0 by default.")]
Strict = Annotated[bool | None, typer.Option("--strict", help="Stop, instead of warning, if the results may be wrong.")]
ResumeFrom = Annotated[
    str | None,
    typer.Option("--resume", metavar="DIR|auto", help="Resume this run; auto: the run in --out, or start it there."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--allow-changes", metavar="FIELD", help="Field that may differ from the resumed run. Repeatable."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Load and check everything, time a few rows, print an estimate; write nothing."),
]
Anyway = Annotated[
    bool, typer.Option("--anyway", help="Start even if the plan says that the run cannot fit into memory.")
]


def parameter(name: str, kind: Any, default: Any = None) -> Parameter:
    """A parameter of a command that is made from a description."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def parameters_of(flags: Iterable[Flag]) -> list[Parameter]:
    """The parameters of some flags."""
    kinds = {True: list[str] | None, False: str | None}
    return [parameter(flag.parameter, Annotated[kinds[flag.repeats], _option_of(flag)]) for flag in flags]


def settings_of(flags: Iterable[Flag], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that flags set, by dotted name; None for one that was not given.

    Raises:
        ConfigError: A value cannot be read, or a flag is given without the one that it needs.
    """
    settings: dict[str, Any] = {}
    for flag in flags:
        value = given[flag.parameter]
        settings |= _READERS.get(flag.field, lambda value, field=flag.field: {field: value})(value)
    for flag in flags:
        if flag.only_with and given[flag.parameter] and settings[flag.only_with] is None:
            needed = next(other for other in flags if other.field == flag.only_with)
            raise ConfigError(f"{flag.names[0]} needs {needed.names[0]}")
    return settings


_READERS: Mapping[str, Any] = {
    "reward": lambda value: {"reward": weighted_rewards(value)},
    "ppo.critic_init": initial_critic,
}
"""How the values of a field are written on the command line, where that is not plain."""
