"""One-line messages for pydantic's errors: the place, the field, the expected value and the given one."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kedge.config.explain.describe import accepts, all_fields, find_field, section_type, unknown, written
from kedge.config.schedules import check_schedules
from kedge.config.schema.rewards import RewardTermConfig
from kedge.config.schema.root import Config
from kedge.errors import ConfigError

__all__ = ["validated"]

MAX_NAMES = 10


def validated(values: Mapping[str, Any], places: Mapping[str, str]) -> Config:
    """Validate nested values.

    Args:
        values: Top-level fields and section dicts.
        places: The place of each dotted name, for the message (`run.yaml:12`).

    Raises:
        ConfigError: One line with the first mistake, and the names of the other fields with one.
    """
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_one_line(error.errors(include_url=False), places)) from None
    check_schedules(config)
    return config


def _one_line(errors: list[ErrorDetails], places: Mapping[str, str]) -> str:
    first = errors[0]
    name = _dotted(first)
    others = list(dict.fromkeys(written(_dotted(error)) for error in errors))[1:]
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
        return ".".join([*parts, *(str(field) for field in list(inside)[:1])])  # a better hint at what was meant
    return ".".join(parts[:depth])


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
    if find_field(name) is None and section_type(name) is None:
        sections = [] if "." in name else [part for part in Config.model_fields if section_type(part)]
        known = [*dict(all_fields()), *sections]
        return unknown(name, known)
    field = find_field(name)
    expected = accepts(field) if field else "a section of fields"
    return f"{name} must be {expected}; it is {written(error['input'])}"


def _reward_message(error: ErrorDetails) -> str:
    part = str(error["loc"][-1])
    field = RewardTermConfig.model_fields.get(part)
    if field and error["type"] != "missing":
        return f"reward: the {part} must be {accepts(field)}; it is {written(error['input'])}"
    return (
        "reward must be a source, a list of sources, a mapping source: weight, or a list of {source, weight}; "
        f"it has {written(error['input'])}"
    )
