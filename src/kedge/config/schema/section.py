"""The base of every configuration section."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kedge_base.texts import unwritable

MAX_DEPTH = 50
"""Maximum nesting of lists and mappings in a value."""


S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Base of every section: frozen; unknown keys, NaN and infinity are rejected."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bools(cls, value: object, info: ValidationInfo) -> object:
        """Reject true and false for a number: Python treats them as 1 and 0."""
        if isinstance(value, bool) and not _takes_bools(cls.model_fields[info.field_name or ""].annotation):
            raise PydanticCustomError("unexpected_bool", "true and false are not numbers")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_extremes(cls, value: object) -> object:
        """Reject values that cannot be written to a file or do not fit into a machine word."""
        if _exceeds_a_word(value):
            raise ValueError("whole numbers must be below 2⁶³")
        if (fault := unwritable(value, deepest=MAX_DEPTH)) is not None:
            raise ValueError(f"the value {fault}")
        return value


def check(refuse: Callable[[S], None]) -> Any:
    """Decorate a check across a section's fields, which raises `ValueError` and changes no field."""

    def checked(section: S) -> S:
        refuse(section)
        return section

    return model_validator(mode="after")(checked)


def _takes_bools(annotation: Any) -> bool:
    return annotation is bool or bool in get_args(annotation)


def _exceeds_a_word(value: Any) -> bool:
    """True if a value, or an entry of a list, is an integer of more than 64 bits."""
    entries: list[object] = [*value] if isinstance(value, list) else [value]
    return any(isinstance(entry, int) and abs(entry) >= 2**63 for entry in entries)


def as_list(value: Any) -> Any:
    """Wrap a single string in a list."""
    return [value] if isinstance(value, str) else value


StringList = Annotated[list[str], BeforeValidator(as_list)]
"""A list of strings; a single string becomes a list of one."""

OwnFunction = Annotated[str, StringConstraints(pattern=r":[A-Za-z_][\w.]*$")]
"""The name of a user's function, `file.py:name` or `module:name`."""
