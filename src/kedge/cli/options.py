"""Options that several commands share, and the options of stages, built from their descriptions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from kedge.config import LANGUAGE_PRESETS, PRESETS, completions, initial_critic
from kedge.stages.descriptions import REWARD
from kedge_base.errors import ConfigError
from kedge_base.stage import Flag, stages
from kedge_base.texts import printable, shortened


def complete_override(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return candidates for an override, with descriptions.

    bash splits words at `=`: for `policy_loss=cl` it asks about `cl`, and has `policy_loss` and `=` before it.
    """
    stage = ctx.info_name if ctx.info_name in stages() else None
    before = [word for word in ctx.params.get("overrides") or () if word != "="]
    if before and "=" not in before[-1]:
        candidates = completions(f"{before[-1]}={incomplete.lstrip('=')}", stage)
        return [(text.partition("=")[2], meaning) for text, meaning in candidates]
    return completions(incomplete, stage)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE",
        help="Fields to set: device=cpu, or runtime.device=cpu where several sections have the name. See: kedge config "
        "explain.",
        autocompletion=complete_override,
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (YAML).")]


def preset_option(names: Iterable[str]) -> OptionInfo:
    """Make the option for some presets."""
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
Anyway = Annotated[
    bool, typer.Option("--anyway", help="Start even if the plan says that the run cannot fit into memory.")
]


def parameter(name: str, kind: Any, default: Any = None) -> Parameter:
    """Make a parameter of a command that is built from a description."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def parameters_of(flags: Iterable[Flag]) -> list[Parameter]:
    """Make the parameters of some flags."""
    return [
        parameter(flag.parameter, Annotated[list[str] | None if flag.repeats else str | None, _option_of(flag)])
        for flag in flags
    ]


def settings_of(flags: Iterable[Flag], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that flags set, by dotted name; None for a flag that was not given.

    Raises:
        ConfigError: A value cannot be read, or a flag is given without another one that it needs.
    """
    settings: dict[str, Any] = {}
    for flag in flags:
        value = given[flag.parameter]
        settings |= _READERS.get(flag.field, lambda value, field=flag.field: {field: value})(value)
    for flag in flags:
        if flag.only_with and given[flag.parameter] and settings[flag.only_with] is None:
            needed = next(other for other in flags if other.field == flag.only_with)
            raise ConfigError(f"{flag.names[0]} needs {needed.names[0]}{flag.otherwise}")
    return settings


_READERS: Mapping[str, Any] = {
    "reward": lambda value: {"reward": weighted_rewards(value)},
    "ppo.critic_init": initial_critic,
}
"""Parsers of values on the command line, for fields with a special notation."""


# A hub id or a path, with or without a split; name:split; or a file.
_NAME = re.compile(r"[\w.-]+(/[\w.-]*)+(:[^\s:]+){0,2}|[\w.-]+(:[^\s:]+){1,2}|[\w.-]+\.\w+")
_DATA_FILE = re.compile(r"\S.*\.(jsonl|ndjson|json|parquet|csv|tsv)(\.(gz|bz2|xz|zst))?(:\S+)?", re.IGNORECASE)


def weighted_rewards(rewards: Sequence[str] | None) -> list[Any] | None:
    """Parse the terms of `--reward`: `file.py:f=0.5` is the reward `file.py:f` with the weight 0.5.

    A text that names an existing file or folder has no weight, even if it contains `=`.

    Raises:
        ConfigError: The part after the last `=` is not a number.
    """
    return None if rewards is None else [_term(reward) for reward in rewards]


def _term(reward: str) -> str | dict[str, Any]:
    source, sign, text = reward.rpartition("=")
    file, _, function = reward.rpartition(":")
    if not sign or os.path.exists(reward) or ("=" not in function and os.path.exists(file)):
        return reward
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not source or not math.isfinite(weight):
        raise ConfigError(
            f"--reward {reward}: what follows the = is a weight and must be a number, as in {source or 'REWARD'}=0.5; "
            "there is no file with this name"
        )
    return {"source": source, "weight": weight}


def literal_prompts(prompts: Sequence[str] | None) -> list[str] | None:
    """Return the texts of `--prompts`, if they are texts; None if they name files, folders or hub ids.

    A value is a text if no file or folder has that name, it does not end like a file name, and it cannot be a hub id
    because it has no slash, or contains a space or another character that ids cannot have.

    Raises:
        ConfigError: Some are texts and some are names.
    """
    texts = [prompt for prompt in prompts or () if _is_text(prompt)]
    if not texts:
        return None
    if names := [prompt for prompt in prompts or () if prompt not in texts]:
        raise ConfigError(
            f"--prompts: {texts[0]!r} is a text and {names[0]!r} the name of a file or data set; give one kind"
        )
    return texts


OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=.*", re.DOTALL)


def names_and_overrides(entries: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate names of models, files or folders from fields to set; an existing path is a name, even if it has `=`."""
    overrides = [entry for entry in entries if OVERRIDE.fullmatch(entry) and not os.path.exists(entry)]
    return [entry for entry in entries if entry not in overrides], overrides


def announced(texts: list[str]) -> list[str]:
    """Print that these values are used as texts, and return them."""
    first = printable(shortened(texts[0], 40))
    more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    typer.echo(f"--prompts {first!r}{more}: taken as the text of a prompt; no file has that name", err=True)
    return texts


def _is_text(prompt: str) -> bool:
    if os.path.lexists(prompt) or _DATA_FILE.fullmatch(prompt) or prompt.startswith(("/", "./", "../", "~")):
        return False
    return _NAME.fullmatch(prompt) is None
