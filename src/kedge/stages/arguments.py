"""Splits the arguments of a stage's Python function into settings and Python objects."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, cast

from kedge.algorithm.own import function_name
from kedge.config import Config, config_from_settings, full_settings, initial_critic
from kedge.config.explain.describe import section_type
from kedge.data.fields import is_conversation
from kedge.data.records import table_rows
from kedge.rewards import RewardSpec, RewardTerm
from kedge.runs.claim import claim_free_folder
from kedge.runs.loaded_models import LoadedModel, NamedModels, is_pretrained
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import IN_MEMORY_FOLDER, check_output, is_run
from kedge_base.stage import Stage

StrPath: TypeAlias = "str | os.PathLike[str]"
"""A folder, a file or a hub id."""

Model: TypeAlias = "StrPath | LoadedModel | tuple[Any, Any]"
"""A model's folder or hub id, or a loaded model with its tokenizer, possibly as a pair."""

Data: TypeAlias = "StrPath | Iterable[Any]"
"""A file, folder or hub id; a list of texts, rows or files; a `Dataset`, `DatasetDict` or pandas DataFrame."""

Reward: TypeAlias = "RewardSpec | LoadedModel | RewardTerm"
Weighted: TypeAlias = "Reward | Sequence[Reward] | Mapping[RewardSpec | LoadedModel, float]"
"""A reward model by name or loaded, `module:function`, or a function; a list of them, or a mapping to weights."""

NAMES_CODE = ("ppo.advantage", "ppo.policy_loss", "environment.source")
"""Fields with the name of a function or class, or else with another value."""

LOADED = "kedge.LoadedModel(model, tokenizer)"

UNNAMED = object()
"""The value of a field that was set to a Python object without a name."""


@contextmanager
def with_named_models(stage: Stage, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Save loaded models in the run's folder; return the arguments with these folders in their place."""
    found = NamedModels(Path())
    named_models(stage, given, found)
    if not found.models:
        yield dict(given)
        return
    run = _output(given.get("out"), stage.name)
    named = NamedModels(run / IN_MEMORY_FOLDER)
    replaced = named_models(stage, given, named)
    with named.saved():
        yield {**replaced, "out": str(run)}


def named_models(stage: Stage, given: Mapping[str, Any], models: NamedModels) -> dict[str, Any]:
    """Return the arguments with folders instead of loaded models; rows of data contain no models."""
    named = {name for name, field in _fields(stage).items() if not field.startswith("data.")}
    folders = {name: "model" if name == "policy" else name for name in named}
    return {name: models.name(value, folders[name]) if name in named else value for name, value in given.items()}


def _fields(stage: Stage) -> dict[str, str]:
    """The configuration field that each parameter of a stage's function sets."""
    flags = {name.strip("-"): flag.field for flag in stage.flags for name in flag.names}
    return {**flags, **stage.arguments, "out": "out"}


def _output(out: StrPath | None, stage: str) -> Path:
    if out is None:
        return claim_free_folder(Path("runs") / stage)
    return Path(out).expanduser() if is_run(Path(out)) else check_output(out)


def resolved_arguments(stage: Stage, given: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """Resolve the configuration from the arguments of a stage's function, and return the Python objects that it cannot
    hold.
    """
    if given.get("model") is not None and given.get("policy") is not None:
        raise ConfigError("model and policy are two names of the same argument; give one of them")
    fields = _fields(stage)
    # `data={"max_length": 512}` is a section, although `data` is also the name of a flag.
    flags = {name for name in fields if type(given.get(name)) is not dict or section_type(name) is None}
    own = {name: value for name, value in given.items() if name in flags and value is not None}
    parts: list[Mapping[str, Any]] = [{name: value for name, value in given.items() if name not in flags}]
    objects: dict[str, Any] = {}
    for name, value in own.items():
        values, kept = read_argument(fields[name], value, name)
        parts.append(values or {fields[name]: UNNAMED})
        if kept is not None:
            objects[name] = kept
    found = full_settings(stage.name, *parts)
    named = {name: value for name, value in found.items() if value is not UNNAMED}
    return config_from_settings(stage.name, named), objects


def read_argument(field: str, value: Any, name: str) -> tuple[Mapping[str, Any], Any]:
    """Return the settings that an argument sets, and the Python object itself if the settings cannot hold it.

    Raises:
        ConfigError: The argument has the wrong type.
    """
    if field.startswith("data."):
        return _rows(field, value)
    if field == "reward":
        return _rewards(value)
    if callable(value) and not is_pretrained(value):
        return {field: f"python:{function_name(value)}"} if field in NAMES_CODE else {}, value
    if field == "ppo.critic_init" and isinstance(value, str | Mapping):
        return {"ppo.critic": value} if isinstance(value, Mapping) else initial_critic(value), None
    if field in NAMES_CODE:
        return {field: value}, None
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a folder, a hub id or {LOADED}, not {_shown(value)}")
    return {field: os.fspath(cast("StrPath", value))}, None


def is_whole(value: object) -> bool:
    """True for an integer, including NumPy's; False for a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(name: str, value: Any, *, least: int) -> None:
    """Check that an argument is an integer of at least `least` (`ConfigError` if not)."""
    if not is_whole(value) or value < least:
        raise ConfigError(f"{name} must be a whole number of {least} or more; it is {value!r}")


def _rows(field: str, data: Any) -> tuple[Mapping[str, Any], list[Any] | None]:
    """Read data: file names become a setting, rows and texts an object."""
    if isinstance(data, (str, os.PathLike)):
        return {field: [os.fspath(cast("StrPath", data))]}, None
    entries = list(table_rows(data, field))
    named = (str, os.PathLike) if field == "data.comparisons" else os.PathLike
    if entries and all(isinstance(entry, named) for entry in entries):
        return {field: [os.fspath(entry) for entry in entries]}, None
    return {}, [{"messages": entry} if is_conversation(entry) else entry for entry in entries]


def _rewards(reward: Any) -> tuple[Mapping[str, Any], list[RewardTerm] | None]:
    """Read rewards: objects if at least one is a Python function, otherwise a setting."""
    if isinstance(reward, Mapping):
        terms = [_weighted(spec, weight) for spec, weight in cast("Mapping[Any, Any]", reward).items()]
    else:
        entries: Sequence[Any] = reward if isinstance(reward, (list, tuple)) else [reward]
        terms = [entry if isinstance(entry, RewardTerm) else _weighted(entry, 1.0) for entry in entries]
    if any(callable(term.reward) for term in terms):
        return {}, terms
    return {
        "reward": [
            {"source": str(term.reward), "weight": term.weight, "settings": dict(term.settings), "name": term.name}
            for term in terms
        ]
    }, None


def _weighted(spec: Any, weight: object) -> RewardTerm:
    if is_pretrained(spec) or not (isinstance(spec, (str, os.PathLike)) or callable(spec)):
        raise ConfigError(
            f"reward must be a folder, a hub id, 'module:function', a function, {LOADED}, or a list of these; not "
            f"{_shown(spec)}"
        )
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"the weight of a reward must be a number, not {weight!r}")
    return RewardTerm(os.fspath(spec) if isinstance(spec, os.PathLike) else spec, float(weight))


def _shown(value: object) -> str:
    """Format a value of the wrong type for an error message."""
    alone = " without its tokenizer" if is_pretrained(value) and hasattr(value, "forward") else ""
    return f"an object of type {type(value).__name__}{alone}"
