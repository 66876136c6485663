"""Differences between the configuration of a run and the one it is resumed with."""

from collections.abc import Collection, Mapping
from typing import Any, cast

from kedge.config.explain.describe import written
from kedge.config.loading.load import flat_settings, resolve
from kedge.config.schema.root import Config

__all__ = ["changed_settings", "changed_values", "effective_settings"]

FREE = (
    "out",
    "preset",
    "runtime.report",
    "runtime.loggers",
    "runtime.project",
    "runtime.num_samples",
    "runtime.strict",
    "rollout.vllm",
    "runtime.parallel",
    "checkpoint",
    "push",
)
"""Settings that cannot change a result: folder, preset name, logs, warnings, checkpoints, where servers run.

`runtime.num_threads`, `runtime.device` and the micro-batch sizes are not in the list: they change the order of sums,
and with it the last bits of a result.
"""


def changed_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, allowed: Collection[str] = ()
) -> list[str]:
    """The differences, one line per setting: `ppo.clip_range: 0.2 in the run, 0.1 now`.

    Args:
        saved: The run's settings, as nested mappings; not necessarily configuration fields, e.g. the parts of a
            checkpoint's fingerprint.
        current: The settings to resume with.
        allowed: Dotted names of settings or whole sections that may differ.
    """
    before, now = _flat(saved), _flat(current)
    names = [name for name in {**before, **now} if not any(_is_part(name, free) for free in (*FREE, *allowed))]
    return [
        f"{name}: {_shown(before, name)} in the run, {_shown(now, name)} now"
        for name in names
        if name not in before or name not in now or before[name] != now[name]
    ]


def effective_settings(config: Config) -> dict[str, Any]:
    """All settings as nested JSON types, with `auto` replaced by what it stands for where that depends on other fields.

    A run of a version that had no `auto` there is resumed under its default.
    """
    settings = config.model_dump(mode="json")
    settings["ppo"] |= {
        "critic": config.ppo.resolved_critic,
        "whiten_advantages": config.ppo.whitens_advantages,
    }
    exact = config.rollout.engine == "builtin" and not config.rollout.max_staleness
    if exact and settings["ppo"]["importance_cap"] == "auto":
        settings["ppo"]["importance_cap"] = None
    return settings


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
    # All digits, so that two different numbers never look the same.
    return repr(value) if isinstance(value, float) else written(value)
