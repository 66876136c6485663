"""One field of the configuration, with everything that `kedge config explain` says about it."""

from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from kedge.texts import unwritable

__all__ = ["Knob", "Section", "StringList", "as_list", "knob", "knob_of"]

DEEPEST = 50
"""Levels of lists and mappings in a setting."""


@dataclass(frozen=True)
class Knob:
    """What is known about a field beside its type and its default."""

    meaning: str
    source: str
    too_high: str | None
    too_low: str | None


def knob(
    default: Any,
    *,
    meaning: str,
    source: str,
    too_high: str | None = None,
    too_low: str | None = None,
    **bounds: Any,
) -> Any:
    """A pydantic field that carries its explanation in its JSON schema.

    Args:
        default: the value when nothing else is given.
        meaning: one line, with the unit.
        source: the paper or project that the default comes from, or the reason for it.
        too_high: what happens when the value is larger than it should be.
        too_low: what happens when it is smaller.
        bounds: pydantic's `gt`, `ge`, `lt`, `le`.
    """
    told = {"source": source, "too_high": too_high, "too_low": too_low}
    extra = {name: text for name, text in told.items() if text is not None}
    return Field(default, description=meaning, json_schema_extra=cast(Any, extra), **bounds)


def knob_of(field: FieldInfo) -> Knob:
    """The explanation that `knob` put into a pydantic field."""
    extra = cast("dict[str, str]", field.json_schema_extra or {})
    return Knob(field.description or "", extra.get("source", ""), extra.get("too_high"), extra.get("too_low"))


class Section(BaseModel):
    """A frozen group of fields: unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bools(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false where a number is meant: Python would take them for 1 and 0."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise PydanticCustomError("unexpected_bool", "true and false are no numbers")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_extremes(cls, value: object) -> object:
        """Refuse what no file or machine word can hold."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("whole numbers must be below 2⁶³")
        if (fault := unwritable(value, deepest=DEEPEST)) is not None:
            raise ValueError(f"a value that {fault}")
        return value


def as_list(value: Any) -> Any:
    """A single string as a list of one."""
    return [value] if isinstance(value, str) else value


StringList = Annotated[list[str], BeforeValidator(as_list)]
"""A list of strings; a single string is a list of one."""
