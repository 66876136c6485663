"""The base of every configuration section, and of the groups that a large section is composed of."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from kedge.system.texts import unwritable

__all__ = ["Group", "Section", "StringList", "as_list"]

MAX_DEPTH = 50
"""Levels of lists and mappings in a value."""


class Section(BaseModel):
    """Base of every section: frozen; unknown keys, NaN and infinity are refused.

    A section may have groups (see `Group`). They structure the code only: what a user types, what is dumped and what
    errors name stays flat. `ppo.kl_coef` in a file is `config.ppo.kl.kl_coef` in the code. The fields of a group with a
    prefix are named after it: `rollout.vllm.python`, which a file may also have as `rollout: {vllm: {python: …}}`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True
    )

    @classmethod
    def groups(cls) -> dict[str, type["Group"]]:
        """The section's groups, by attribute."""
        types = {name: info.annotation for name, info in cls.model_fields.items()}
        return {name: kind for name, kind in types.items() if isinstance(kind, type) and issubclass(kind, Group)}

    @classmethod
    def flat_fields(cls) -> dict[str, FieldInfo]:
        """All fields as users name them, those of the groups included."""
        groups = cls.groups()
        return {
            key: field
            for name, info in cls.model_fields.items()
            for key, field in (groups[name].named_fields() if name in groups else {name: info}).items()
        }

    @model_validator(mode="before")
    @classmethod
    def _distribute(cls, values: Any) -> Any:
        """Move each flat key into its group. A group's own name moves there too, and is refused as an unknown field."""
        groups = cls.groups()
        if not groups or not isinstance(values, Mapping):
            return values
        owners = {key: name for name, group in groups.items() for key in (name, *group.named_fields())}
        nested: dict[Any, Any] = {name: {} for name in groups}
        for key, value in cast("Mapping[Any, Any]", values).items():
            name = owners.get(key)
            if name is None:
                nested[key] = value
            elif key == name and groups[name].prefix and isinstance(value, Mapping):
                nested[name] |= value
            else:
                nested[name][key.removeprefix(groups[name].prefix)] = value
        return nested

    @model_serializer(mode="wrap")
    def _flatten(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields of the groups as the section's own."""
        groups = self.groups()
        return {
            f"{groups[name].prefix}{key}" if name in groups else key: entry
            for name, value in dump(self).items()
            for key, entry in (value if name in groups else {name: value}).items()
        }

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bools(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false for a number: Python would take them for 1 and 0."""
        if isinstance(value, bool) and not _takes_bools(cls.model_fields[info.field_name or ""].annotation):
            raise PydanticCustomError("unexpected_bool", "true and false are not numbers")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_extremes(cls, value: object) -> object:
        """Refuse values that cannot be written to a file or held in a machine word."""
        if _exceeds_a_word(value):
            raise ValueError("whole numbers must be below 2⁶³")
        if (fault := unwritable(value, deepest=MAX_DEPTH)) is not None:
            raise ValueError(f"the value {fault}")
        return value


def _takes_bools(annotation: Any) -> bool:
    return annotation is bool or bool in get_args(annotation)


def _exceeds_a_word(value: Any) -> bool:
    """Whether a value, or an entry of a list, is a whole number of more than 64 bits."""
    entries: list[object] = [*value] if isinstance(value, list) else [value]
    return any(isinstance(entry, int) and abs(entry) >= 2**63 for entry in entries)


class Group(Section):
    """Fields of a section that belong together. Its attribute in the section must not be the name of a field.

    Attributes:
        prefix: What the names of its fields begin with in the section: nothing, or the attribute and a dot.
    """

    prefix: ClassVar[str] = ""

    @classmethod
    def named_fields(cls) -> dict[str, FieldInfo]:
        """Its fields by their names in the section."""
        return {f"{cls.prefix}{name}": field for name, field in cls.model_fields.items()}


def as_list(value: Any) -> Any:
    """A single string as a list of one."""
    return [value] if isinstance(value, str) else value


StringList = Annotated[list[str], BeforeValidator(as_list)]
"""A list of strings; a single string is a list of one."""
