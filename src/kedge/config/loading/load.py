"""Resolves presets, files, overrides and Python settings to one configuration, and compares two of them."""

import importlib.metadata
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kedge.config.explain.describe import accepts, all_fields, find_field, section_type, unknown, written
from kedge.config.loading.names import full_name
from kedge.config.loading.yaml_text import Document, parse_value, read_document, to_yaml
from kedge.config.presets import PRESETS, find_preset
from kedge.config.schedules import check_schedules
from kedge.config.schema.judge import JudgeConfig
from kedge.config.schema.rewards import RewardTermConfig
from kedge.config.schema.root import Config
from kedge.config.schema.section import is_parameters, parameters_of
from kedge_base.errors import ConfigError
from kedge_base.packages import current_names
from kedge_base.stage import find_stage
from kedge_base.version import __version__


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
        path: A YAML file with sections or dotted names (`ppo.clip_range: 0.1`).
        overrides: `ppo.clip_range=0.1`, or `clip_range=0.1` with a bare name as in `full_name`, in order; the last one
            of a name counts.
        flags: Dotted name → value; None for a flag that was not given.
        preset: Names of presets, merged after the presets of the file and of overrides.
        stage: Bare names are looked up in its sections; None for all sections.

    Raises:
        ConfigError: One line with the first mistake; or a preset is given to a file that sets all of its fields.
    """
    document = read_document(path) if path is not None else Document({}, {})
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if preset is not None:
        given["preset"] = preset
    layers = [document.settings, *(_parse_override(override, stage) for override in overrides), given]
    config = resolve(layers, document.places)
    if path is not None:
        _check_effect(config, path, document.settings)
    return config


def resolve(layers: Sequence[Mapping[str, Any]], places: Mapping[str, str] | None = None) -> Config:
    """Merge layers of settings, later ones over earlier ones, on top of the presets that they name.

    The presets of all layers are merged in order. `preset: null` drops the presets of earlier layers.

    Args:
        layers: Mappings of fields, sections (as mappings) and dotted names.
        places: The place of each dotted name of the first layer, for error messages.

    Raises:
        ConfigError: As in `load_config`.
    """
    flat = [flat_settings(layer) for layer in layers]
    names = _preset_names(flat)
    recipes = _merged(find_preset(name).settings for name in names)
    later = {name for layer in flat[1:] for name in layer}
    try:
        return validated(
            nested({**_merged([recipes, *flat]), "preset": names}),
            {name: place for name, place in (places or {}).items() if name not in later},
        )
    except ConfigError as error:
        if len(names) > 1 and str(error) == _mistake(recipes):
            raise ConfigError(f"presets {', '.join(names)} do not fit together: {error}") from None
        raise


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of the configuration with new values for some dotted names, validated again as a whole."""
    return validated(nested(_merged([flat_settings(config.model_dump()), flat_settings(values)])), {})


def resolved_yaml(config: Config) -> str:
    """Format the full configuration as YAML that `--config` reads, after a comment with the versions."""
    versions = {"kedge": __version__} | {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"# {packages}, Python {platform.python_version()}\n{to_yaml(config.model_dump(mode='json'))}"


def _mistake(values: Mapping[str, Any]) -> str | None:
    """Return the first mistake in some values, or None."""
    try:
        validated(nested(values), {})
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
    file, values = flat_settings(settings), flat_settings(config.model_dump())
    for name in (name for name in config.preset if name not in _preset_names([file])):
        recipe = find_preset(name).settings
        differing = {dotted: value for dotted, value in recipe.items() if values[dotted] != value}
        if differing and recipe.keys() <= file.keys():
            dotted, value = next(iter(differing.items()))
            raise ConfigError(
                f"preset {name} would have no effect: {path} sets all of its fields, such as "
                f"{dotted}={written(values[dotted])} (preset: {written(value)}); leave the preset out, or "
                "remove those lines"
            )


def preset_conflicts(config: Config, stage: str | None = None) -> str | None:
    """Describe in one line the fields on which the presets disagree, with the value in use; None without such fields.

    Fields that the user sets explicitly are left out, as are fields of sections that the stage does not read.
    """
    read = Config.model_fields if stage is None else [name for group in find_stage(stage).sections for name in group]
    given: dict[str, dict[str, Any]] = {}
    for name in config.preset:
        for dotted, value in find_preset(name).settings.items():
            given.setdefault(dotted, {})[name] = value
    values, differing = flat_settings(config.model_dump()), list[str]()
    for dotted, by_preset in given.items():
        if dotted.partition(".")[0] not in read:
            continue
        *earlier, (last, used) = by_preset.items()
        others = [f"{written(value)} in {name}" for name, value in earlier if value != used]
        if others and values[dotted] == used:
            differing.append(f"{dotted}={written(used)} as in {last} ({', '.join(others)})")
    return f"presets differ, and the later one counts: {', '.join(differing)}" if differing else None


def _parse_override(override: str, stage: str | None) -> dict[str, Any]:
    name, sign, text = override.partition("=")
    if override in PRESETS:
        raise ConfigError(f"{override} is a preset, and each needs its own --preset; write --preset {override}")
    if not sign or not name.strip():
        right = "--config and the file" if name.endswith((".yaml", ".yml")) else "field=value, e.g. ppo.clip_range=0.1"
        raise ConfigError(f"{written(override)} is not an override; write {right}")
    value = parse_value(text, written(override))
    return {full_name(name.strip(), stage, value=value): value}


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten settings to dotted names; a dotted name overrides the value in its section.

    A section whose lines are all commented out has no value and adds no settings. A text in the place of a section is
    its `source`, such as the class of an environment.
    """
    flat: dict[str, Any] = {}
    for name, value in sorted(settings.items(), key=lambda item: "." in str(item[0])):
        dotted = f"{prefix}{name}"
        if not _holds_names(dotted):
            flat[dotted] = value
        elif isinstance(value, Mapping):
            flat |= flat_settings(cast("Mapping[str, Any]", value), f"{dotted}.")
        elif isinstance(value, str) and find_field(f"{dotted}.source"):
            flat[f"{dotted}.source"] = value
        elif value is not None or section_type(dotted) is None:
            flat[dotted] = value
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings given by dotted name.

    A dotted name that starts with neither a section nor a mapping is unchanged, and rejected as unknown:
    `reward.clip=3` would otherwise become a reward named clip with weight 3.
    """
    made: dict[str, Any] = {}
    for dotted, value in flat.items():
        level, path, rest = made, "", dotted
        while "." in rest:
            part, _, further = rest.partition(".")
            path = f"{path}.{part}" if path else part
            if not _holds_names(path) or not isinstance(level.setdefault(part, {}), dict):
                break
            level, rest = level[part], further
        level[rest] = value
    return made


def _holds_names(name: str) -> bool:
    """True if a name is a section, or at the top level a mapping of names such as `schedules`."""
    if section_type(name) is not None:
        return True
    field = None if "." in name else find_field(name)
    return field is not None and get_origin(field.annotation) is dict


def _merged(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers of dotted names; a plain value leaves the other parameters of an earlier one, a mapping none."""
    merged: dict[str, Any] = {}
    for layer in layers:
        whole = tuple(f"{name}." for name, value in layer.items() if isinstance(value, Mapping))
        merged = {name: value for name, value in merged.items() if not name.startswith(whole)}
        for name, value in layer.items():
            kind = getattr(find_field(name), "annotation", None)
            is_plain = is_parameters(kind) and not isinstance(value, Mapping)
            keeps = is_plain and isinstance(merged.get(name), Mapping)
            merged[name] = {**merged[name], next(iter(parameters_of(kind))): value} if keeps else value
    return merged


def config_from_settings(stage: str, *layers: Mapping[str, Any]) -> Config:
    """Resolve the configuration of a stage from keyword settings.

    Args:
        stage: sft, reward, critic, ppo, rlhf, generate or evaluate.
        layers: Settings, later ones over earlier ones: dotted names, sections as dicts, top-level fields (`preset`
            included), and bare names of fields, if only one of the sections that the stage reads has a field of that
            name.

    Raises:
        ConfigError: A name is unknown or ambiguous.
    """
    find_stage(stage)
    return resolve([full_settings(stage, layer) for layer in layers])


def full_settings(stage: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """Expand a stage's keyword settings, given in several parts, to full names; see `config_from_settings`.

    Of two names of a field in one part, the later one counts, as on the command line.

    Raises:
        ConfigError: A name is unknown or ambiguous, or a field is in two parts.
    """
    found: dict[str, Any] = {}
    for part in parts:
        named = {full_name(name, stage, value=value): value for name, value in part.items()}
        if repeated := found.keys() & named.keys():
            raise ConfigError(f"{min(repeated)} is given twice; keep one")
        found |= named
    return found


MAX_NAMES = 10


def validated(values: Mapping[str, Any], places: Mapping[str, str]) -> Config:
    """Validate nested values.

    Args:
        values: Top-level fields and section dicts.
        places: The place of each dotted name, for the message (`run.yaml:12`).

    Raises:
        ConfigError: One line with the first mistake, and the names of other invalid fields.
    """
    try:
        config = Config.model_validate(current_names(values))
    except ValidationError as error:
        raise ConfigError(_one_line(error, places)) from None
    check_schedules(config, lambda error: _one_line(error, {}))
    return config


def _one_line(error: ValidationError, places: Mapping[str, str]) -> str:
    errors = error.errors(include_url=False)
    named = [(_dotted(error), error) for error in errors]
    field = named[0][0]
    # A mistake in a parameter says more than that no form of the value fits.
    name, first = max(
        named, key=lambda each: each[0].startswith(f"{field}.") or (each[0], each[1]["type"]) == (field, "value_error")
    )
    others = [written(each) for each in dict(named) if each not in (name, field)]
    unnamed = f" and {len(others) - MAX_NAMES} more" if len(others) > MAX_NAMES else ""
    more = f" (also wrong: {', '.join(others[:MAX_NAMES])}{unnamed})" if others else ""
    combination = first["type"] == "value_error" and find_field(name) is None
    place = f"{places[name]}: " if name in places and not combination else ""
    return f"{place}{_message(first, name)}{more}"


def _dotted(error: ErrorDetails) -> str:
    """The field's dotted name: pydantic's location without list index and union branch."""
    parts = [str(part) for part in error["loc"]]
    depth = 1
    while depth < len(parts) and section_type(".".join(parts[:depth])):
        depth += 1
    if error["type"] == "extra_forbidden" and depth == 1 and isinstance(error["input"], dict):
        inside = cast("dict[object, object]", error["input"])
        return ".".join([*parts, *(str(field) for field in list(inside)[:1])])  # gives a better suggestion
    name = ".".join(parts[:depth])
    named = [*parameters_of(getattr(find_field(name), "annotation", None))][1:]
    if named and error["type"] == "extra_forbidden":
        named += parts[-1:]
    return ".".join([name, *(part for part in parts[depth:] if part in named)])


def _message(error: ErrorDetails, name: str) -> str:
    if error["type"] == "value_error":
        reason = str(error.get("ctx", {}).get("error"))
        return f"{name}={written(error['input'])}: {reason}" if find_field(name) else reason
    if name == "reward":
        return _reward_message(error)
    if name.startswith("reward."):
        trained = f"reward_model.{name.partition('.')[2]}"
        meant = f"; did you mean {trained}?" if find_field(trained) else ""
        return (
            f"{written(name)} is not a field: reward is a source, or sources with their weights, such as "
            f"reward='{{rewards.py:brief: 0.5}}'{meant}"
        )
    field = find_field(name)
    if field is None and section_type(name) is None:
        sections = [] if "." in name else [part for part in Config.model_fields if section_type(part)]
        inner = (f"{dotted}.{part}" for dotted, field in all_fields() for part in parameters_of(field.annotation))
        return unknown(name, [*dict(all_fields()), *inner, *sections])
    expected = accepts(field) if field else "a section of fields"
    is_missing = error["type"] == "missing" and name.endswith(f".{error['loc'][-1]}")
    return f"{name} must be {expected}; it is {'missing' if is_missing else written(error['input'])}"


def _reward_message(error: ErrorDetails) -> str:
    part = str([*error["loc"], "", ""][2])
    field = RewardTermConfig.model_fields.get(part)
    if field and error["type"] != "missing":
        return f"reward: the {part} must be {accepts(field)}; it is {written(error['input'])}"
    if error["type"] == "extra_forbidden":
        return f"reward: {part} is not one of {', '.join(RewardTermConfig.model_fields)}"
    return (
        "reward must be a source, a list of sources, a mapping source: weight, or a list of {source, weight}; "
        f"it has {written(error['input'])}"
    )


FREE = (
    "out",
    "preset",
    "runtime.report",
    "runtime.loggers",
    "runtime.num_samples",
    "runtime.strict",
    "runtime.parallel",
    "checkpoint",
    "push",
    *(f"judge.{name}" for name in JudgeConfig.model_fields if name not in ("rubric", "max_tokens")),
    "rlhf.min_labels",
)
"""Settings that cannot change a result: folder, preset name, logs, warnings, checkpoints, servers, and limits on
judges; and how many labels a round waits for, which are data that come later.

`runtime.num_threads`, `runtime.device` and the micro-batch sizes are not in the list: they change the order of
summation, and thus the last bits of a result.
"""


def changed_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, allowed: Collection[str] = ()
) -> list[str]:
    """List the differences, one line per setting: `ppo.clip_range: 0.2 in the run, 0.1 now`.

    Args:
        saved: The run's settings, as nested mappings; not necessarily configuration fields, e.g. the parts of a
            checkpoint's fingerprint.
        current: The settings to resume with.
        allowed: Dotted names of settings or whole sections that may differ.
    """
    differing = differences(saved, current, allowed=allowed)
    return [f"{name}: {before} in the run, {now} now" for name, before, now in differing]


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, allowed: Collection[str] = ()
) -> list[tuple[str, str, str]]:
    """Each setting that differs, with its value before and now; arguments as in `changed_settings`."""
    before, now = _flat(saved), _flat(current)
    names = [name for name in {**before, **now} if not any(_is_part(name, free) for free in (*FREE, *allowed))]
    return [
        (name, _shown(before, name), _shown(now, name))
        for name in names
        if name not in before or name not in now or before[name] != now[name]
    ]


def effective_settings(*configs: Config) -> list[dict[str, Any]]:
    """Return all settings of configurations to compare, as nested JSON types.

    If one has `auto` and another does not, `auto` is replaced by its value if that depends on other fields. If all have
    `auto`, it is kept: the fields that its value depends on are compared themselves.
    """
    every = [config.model_dump(mode="json") for config in configs]
    same = [name for name, value in every[0]["ppo"].items() if all(each["ppo"][name] == value for each in every)]
    for config, settings in zip(configs, every, strict=True):
        exact = config.rollout.engine.name == "builtin" and not config.rollout.max_staleness
        values = {
            "critic": config.ppo.resolved_critic if config.ppo.critic == "auto" else settings["ppo"]["critic"],
            "whiten_advantages": config.ppo.whitens_advantages,
            "old_logprobs": {"trainer": None}
            if exact and config.ppo.importance_cap == "auto"
            else settings["ppo"]["old_logprobs"],
        }
        settings["rollout"]["engine"] = config.rollout.engine.name
        settings["ppo"] |= {name: value for name, value in values.items() if name not in same}
    return every


def changed_values(config: Config) -> dict[str, Any]:
    """The values that differ from the defaults and from the presets, by dotted name, as JSON types."""
    base, own = (flat_settings(each.model_dump(mode="json")) for each in (resolve([{"preset": config.preset}]), config))
    return {name: value for name, value in own.items() if (name == "preset" and value) or value != base.get(name)}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Values by dotted name; an empty mapping or list counts as a value."""
    if isinstance(value, Mapping) and value:
        settings = cast("Mapping[str, Any]", value)
        inner = {f"{name}.{key}" if name else key: entry for key, entry in settings.items()}
    elif isinstance(value, list) and value:
        inner = {f"{name}[{index}]": entry for index, entry in enumerate(cast("list[Any]", value))}
    else:
        return {name: value}
    return {dotted: leaf for key, entry in inner.items() for dotted, leaf in _flat(entry, key).items()}


def _is_part(name: str, whole: str) -> bool:
    return name == whole or name.startswith((f"{whole}.", f"{whole}["))


def _shown(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "not set"
    value = settings[name]
    # Show all digits, so that two different numbers never look the same.
    return repr(value) if isinstance(value, float) else written(value)
