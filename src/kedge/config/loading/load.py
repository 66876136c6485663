"""Resolves presets, files, overrides and flags to one configuration, and writes it as YAML."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_origin

import yaml

from kedge.config.explain.describe import find_field, section_type, written
from kedge.config.loading.names import full_name
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
    *,
    stage: str | None = None,
) -> Config:
    """Resolve a run's configuration: flags override overrides, then file, preset and defaults.

    Args:
        path: A YAML file of sections or of dotted names (`ppo.clip_range: 0.1`).
        overrides: `ppo.clip_range=0.1`, or `clip_range=0.1` with a bare name as in `full_name`, in order; the last one
            of a name counts.
        flags: Dotted name → value; None for a flag that was not given.
        preset: A preset's name; overrides one in the file or in an override.
        stage: The stage whose sections bare names belong to; None for all sections.

    Raises:
        ConfigError: One line with the first mistake.
    """
    document = read_document(path) if path is not None else Document({}, {})
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if preset is not None:
        given["preset"] = preset
    layers = [document.settings, *(_parse_override(override, stage) for override in overrides), given]
    return resolve(layers, document.places)


def resolve(layers: Sequence[Mapping[str, Any]], places: Mapping[str, str] | None = None) -> Config:
    """Merge settings, later layers over earlier ones, on top of the preset that they name.

    Args:
        layers: Mappings of fields, sections (as mappings) and dotted names.
        places: The place of each dotted name of the first layer, for error messages.

    Raises:
        ConfigError: As in `load_config`.
    """
    nested = [_nest(layer) for layer in layers]
    names = [layer["preset"] for layer in nested if layer.get("preset") is not None]
    recipe = find_preset(names[-1]).settings if names else {}
    values: dict[str, Any] = {}
    for layer in [_nest(recipe), *nested]:
        _merge(values, layer)
    later = {name for layer in nested[1:] for name in _names(layer)}
    return validated(values, {name: place for name, place in (places or {}).items() if name not in later})


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of the configuration with new values for some dotted names, validated again as a whole."""
    base = config.model_dump()
    _merge(base, _nest(values))
    return validated(base, {})


def resolved_yaml(config: Config) -> str:
    """The whole configuration as YAML that `--config` reads, below a comment with the versions."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("kedge", "torch", "transformers"))
    body = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return f"# {packages}, Python {platform.python_version()}\n{body}"


def _parse_override(override: str, stage: str | None) -> dict[str, Any]:
    name, sign, text = override.partition("=")
    if not sign or not name.strip():
        raise ConfigError(f"{written(override)} is not an override; write field=value, e.g. ppo.clip_range=0.1")
    value = parse_value(text, written(override))
    return {full_name(name.strip(), stage, value=value): value}


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into section dicts; a dotted name overrides its section's value.

    A dotted name whose first part is neither a section nor a mapping stays as it is, and is refused as unknown:
    `reward.clip=3` would otherwise become a reward named clip with weight 3.
    """
    nested: dict[str, Any] = {}
    for name, value in sorted(settings.items(), key=lambda item: "." in str(item[0])):
        section, dot, field = str(name).partition(".")
        _merge(nested, {section: {field: value}} if dot and _holds_names(section) else {str(name): value})
    return nested


def _holds_names(name: str) -> bool:
    """Whether a name at the top level is a section, or a mapping of names such as `schedules`."""
    field = find_field(name)
    return section_type(name) is not None or (field is not None and get_origin(field.annotation) is dict)


def _merge(values: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Merge a layer into `values`: sections are merged, everything else is replaced."""
    for name, value in layer.items():
        below = values.get(name)
        if section_type(name) and value is None:
            continue  # a section with all its lines commented out
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
