"""From a preset, a file, overrides and flags to one resolved configuration, and back to YAML."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from kedge.config.explain.describe import section_type, written
from kedge.config.loading.validation_errors import validated
from kedge.config.loading.yaml_text import Document, parse_value, read_document
from kedge.config.presets import find_preset
from kedge.config.schema.root import Config
from kedge.errors import ConfigError

__all__ = ["load_config", "resolve", "resolved_yaml", "with_values"]


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    preset: str | None = None,
) -> Config:
    """Resolve a run's configuration: flags before overrides before file before preset before defaults.

    Args:
        path: a YAML file of sections; `ppo.clip_range: 0.1` at its top level is understood as well.
        overrides: `ppo.clip_range=0.1`, in order; the last one counts.
        flags: dotted name → value; None stands for a flag that was not given.
        preset: a preset's name; goes before one that the file or an override names.

    Raises:
        ConfigError: one line for whoever wrote it.
    """
    document = read_document(path) if path is not None else Document({}, {})
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if preset is not None:
        given["preset"] = preset
    layers = [document.settings, *(_parse_override(override) for override in overrides), given]
    return resolve(layers, document.places)


def resolve(layers: Sequence[Mapping[str, Any]], places: Mapping[str, str] | None = None) -> Config:
    """Lay settings over each other, later ones first in line, on top of the preset that they name.

    Args:
        layers: mappings of fields, sections (as mappings) and dotted names.
        places: where each dotted name stands, for error messages; a later layer's names have none.

    Raises:
        ConfigError: as in `load_config`.
    """
    nested = [_nest(layer) for layer in layers]
    names = [layer["preset"] for layer in nested if layer.get("preset") is not None]
    recipe = find_preset(names[-1]).settings if names else {}
    values: dict[str, Any] = {}
    for layer in [_nest(recipe), *nested]:
        _lay_over(values, layer)
    later = {name for layer in nested[1:] for name in _names(layer)}
    return validated(values, {name: place for name, place in (places or {}).items() if name not in later})


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The same configuration with some dotted names set anew, checked again as a whole."""
    base = config.model_dump()
    _lay_over(base, _nest(values))
    return validated(base, {})


def resolved_yaml(config: Config) -> str:
    """The whole configuration as YAML that `--config` reads back, under a line with the versions that ran."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("kedge", "torch", "transformers"))
    body = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return f"# {packages}, Python {platform.python_version()}\n{body}"


def _parse_override(override: str) -> dict[str, Any]:
    name, sign, text = override.partition("=")
    if not sign or not name.strip():
        raise ConfigError(f"{written(override)} is not an override; write field=value, e.g. ppo.clip_range=0.1")
    return {name.strip(): parse_value(text, written(override))}


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into section dicts; the value of a dotted name goes before its section's."""
    nested: dict[str, Any] = {}
    for name, value in sorted(settings.items(), key=lambda item: "." in str(item[0])):
        section, dot, field = str(name).partition(".")
        _lay_over(nested, {section: {field: value} if dot else value})
    return nested


def _lay_over(values: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Set the layer's fields in `values`; sections are merged, everything else is replaced."""
    for name, value in layer.items():
        below = values.get(name)
        if section_type(name) and value is None:
            continue  # a section whose lines are all commented out
        if isinstance(below, dict) and isinstance(value, Mapping) and name != "reward":
            values[name] = {**cast("dict[str, Any]", below), **cast("Mapping[str, Any]", value)}
        else:
            values[name] = value


def _names(layer: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}.{field}" if section_type(name) else name
        for name, value in layer.items()
        for field in (cast("dict[str, Any]", value) if isinstance(value, dict) else {"": None})
    ]
