"""pydantic's findings as one line: where, which field, what would be right, what is there."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kedge.config.explain.describe import accepts, all_fields, find_field, section_type, suggestion, written
from kedge.config.schema.root import Config, RewardTerm
from kedge.errors import ConfigError

__all__ = ["validated"]

MOST_NAMED = 10


def validated(values: Mapping[str, Any], places: Mapping[str, str]) -> Config:
    """The configuration that nested values make.

    Args:
        values: top-level fields and section dicts.
        places: where each dotted name was set, for the message (`run.yaml:12`).

    Raises:
        ConfigError: one line with the first thing wrong, and the names of the others.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_one_line(error.errors(include_url=False), places)) from None


def _one_line(findings: list[ErrorDetails], places: Mapping[str, str]) -> str:
    first = findings[0]
    name = _dotted(first)
    others = list(dict.fromkeys(written(_dotted(finding)) for finding in findings))[1:]
    unnamed = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    more = f" (also wrong: {', '.join(others[:MOST_NAMED])}{unnamed})" if others else ""
    combination = first["type"] == "value_error" and find_field(name) is None
    place = f"{places[name]}: " if name in places and not combination else ""
    return f"{place}{_complaint(first, name)}{more}"


def _dotted(finding: ErrorDetails) -> str:
    """The field's dotted name, without the list index or the union's branch that pydantic appends."""
    parts = [str(part) for part in finding["loc"]]
    depth = 2 if parts and section_type(parts[0]) else 1
    if finding["type"] == "extra_forbidden" and depth == 1 and isinstance(finding["input"], dict):
        inside = cast("dict[object, object]", finding["input"])
        return ".".join([*parts, *(str(field) for field in list(inside)[:1])])  # tells better what was meant
    return ".".join(parts[:depth])


def _complaint(finding: ErrorDetails, name: str) -> str:
    if finding["type"] == "value_error":
        reason = str(finding.get("ctx", {}).get("error"))
        return f"{name}={written(finding['input'])}: {reason}" if find_field(name) else reason
    if name == "reward":
        return _reward_complaint(finding)
    if find_field(name) is None and section_type(name) is None:
        sections = [] if "." in name else [part for part in Config.model_fields if section_type(part)]
        known = [*dict(all_fields()), *sections]
        return f"{written(name)} is not a field{suggestion(name, known)}"
    field = find_field(name)
    expected = accepts(field) if field else "a section of fields"
    return f"{name} must be {expected}; it is {written(finding['input'])}"


def _reward_complaint(finding: ErrorDetails) -> str:
    part = str(finding["loc"][-1])
    field = RewardTerm.model_fields.get(part)
    if field and finding["type"] != "missing":
        return f"reward: the {part} must be {accepts(field)}; it is {written(finding['input'])}"
    return (
        "reward must be a source, a list of sources, a mapping source: weight, or a list of {source, weight}; "
        f"it has {written(finding['input'])}"
    )
