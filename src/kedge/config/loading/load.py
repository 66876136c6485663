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
from kedge.config.presets import PRESETS, find_preset
from kedge.config.schema.root import Config
from kedge.errors import ConfigError
from kedge.stages.stage import find_stage
from kedge.system.version import __version__

__all__ = ["load_config", "preset_conflicts", "resolve", "resolved_yaml", "with_values"]


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    preset: str | Sequence[str] | None = None,
    *,
    stage: str | None = None,
) -> Config:
    """Resolve a run's configuration: flags override overrides, then file, preset and defaults.

    Args:
        path: A YAML file of sections or of dotted names (`ppo.clip_range: 0.1`).
        overrides: `ppo.clip_range=0.1`, or `clip_range=0.1` with a bare name as in `full_name`, in order; the last one
            of a name counts.
        flags: Dotted name → value; None for a flag that was not given.
        preset: Names of presets, merged after those of the file and of overrides.
        stage: The stage whose sections bare names belong to; None for all sections.

    Raises:
        ConfigError: One line with the first mistake; or a preset is given to a file that sets all of its fields.
    """
    document = read_document(path) if path is not None else Document({}, {})
    if isinstance(evaluate := document.settings.get("evaluate"), dict):
        # In config.yaml of older runs; nothing is resampled for intervals now.
        cast("dict[str, Any]", evaluate).pop("num_bootstrap", None)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if preset is not None:
        given["preset"] = preset
    layers = [document.settings, *(_parse_override(override, stage) for override in overrides), given]
    config = resolve(layers, document.places)
    if path is not None:
        _check_effect(config, path, document.settings)
    return config


def resolve(layers: Sequence[Mapping[str, Any]], places: Mapping[str, str] | None = None) -> Config:
    """Merge settings, later layers over earlier ones, on top of the presets that they name.

    The presets of all layers are merged in order. `preset: null` drops those of earlier layers.

    Args:
        layers: Mappings of fields, sections (as mappings) and dotted names.
        places: The place of each dotted name of the first layer, for error messages.

    Raises:
        ConfigError: As in `load_config`.
    """
    nested = [_nest(layer) for layer in layers]
    names = _preset_names(nested)
    recipes = [_nest(find_preset(name).settings) for name in names]
    values = {**_merged([*recipes, *nested]), "preset": names}
    later = {name for layer in nested[1:] for name in _names(layer)}
    try:
        return validated(values, {name: place for name, place in (places or {}).items() if name not in later})
    except ConfigError as error:
        if len(names) > 1 and str(error) == _mistake(_merged(recipes)):
            raise ConfigError(f"presets {', '.join(names)} do not fit together: {error}") from None
        raise


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of the configuration with new values for some dotted names, validated again as a whole."""
    return validated(_merged([config.model_dump(), _nest(values)]), {})


def resolved_yaml(config: Config) -> str:
    """The whole configuration as YAML that `--config` reads, below a comment with the versions."""
    versions = {"kedge": __version__} | {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    body = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return f"# {packages}, Python {platform.python_version()}\n{body}"


def _mistake(values: Mapping[str, Any]) -> str | None:
    """The first mistake in some values, or None."""
    try:
        validated(values, {})
    except ConfigError as error:
        return str(error)
    return None


def _preset_names(layers: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The presets of all layers in order, each at its last place."""
    names: list[Any] = []
    for given in (layer["preset"] for layer in layers if "preset" in layer):
        further = list(cast("Sequence[Any]", given)) if isinstance(given, (list, tuple)) else [given]
        names = [] if given is None else [*(name for name in names if name not in further), *further]
    return [name for index, name in enumerate(names) if name not in names[index + 1 :]]


def _check_effect(config: Config, path: str | Path, settings: Mapping[str, Any]) -> None:
    """Check that no preset is given to a file that sets all of its fields, such as a run's `config.yaml`."""
    file, values = _nest(settings), config.model_dump()
    for name in (name for name in config.preset if name not in _preset_names([file])):
        recipe = find_preset(name).settings
        differing = {dotted: value for dotted, value in recipe.items() if _value(values, dotted) != value}
        if differing and recipe.keys() <= set(_names(file)):
            dotted, value = next(iter(differing.items()))
            raise ConfigError(
                f"preset {name} would have no effect: {path} sets all of its fields, such as "
                f"{dotted}={written(_value(values, dotted))} (preset: {written(value)}); leave the preset out, or "
                "remove those lines"
            )


def preset_conflicts(config: Config, stage: str | None = None) -> str | None:
    """A line about the fields that the presets set differently, with the value in use; None without such fields.

    Fields that the user sets otherwise are left out, as are those of sections that the stage does not read.
    """
    read = Config.model_fields if stage is None else [name for group in find_stage(stage).sections for name in group]
    given: dict[str, dict[str, Any]] = {}
    for name in config.preset:
        for dotted, value in find_preset(name).settings.items():
            given.setdefault(dotted, {})[name] = value
    values, differing = config.model_dump(), list[str]()
    for dotted, by_preset in given.items():
        if dotted.partition(".")[0] not in read:
            continue
        *earlier, (last, used) = by_preset.items()
        others = [f"{written(value)} in {name}" for name, value in earlier if value != used]
        if others and _value(values, dotted) == used:
            differing.append(f"{dotted}={written(used)} as in {last} ({', '.join(others)})")
    return f"presets differ, and the later one counts: {', '.join(differing)}" if differing else None


def _value(values: Mapping[str, Any], dotted: str) -> Any:
    section, _, field = dotted.partition(".")
    return values[section][field]


def _parse_override(override: str, stage: str | None) -> dict[str, Any]:
    name, sign, text = override.partition("=")
    if override in PRESETS:
        raise ConfigError(f"{override} is a preset, and each needs its own --preset; write --preset {override}")
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


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for layer in layers:
        _merge(values, layer)
    return values


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
