"""The base of every configuration section."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeGuard, TypeVar, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from kedge.config.schema.field import Choice, note_places, plain
from kedge_base.texts import unwritable

MAX_DEPTH = 50
"""Maximum nesting of lists and mappings in a value."""


S = TypeVar("S", bound="Section")


def rewrite(change: Any) -> Any:
    """Decorate a class method that rewrites a section's settings before they are validated."""

    def rewritten(kind: type["Section"], settings: Any) -> Any:
        is_given = isinstance(settings, Mapping)
        return change.__func__(kind, dict(cast("Mapping[str, Any]", settings))) if is_given else settings

    return model_validator(mode="before")(cast(Any, classmethod(rewritten)))


class Section(BaseModel):
    """Base of every section: frozen; unknown keys, NaN and infinity are rejected."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        note_places(cls)

    @rewrite
    @classmethod
    def _set_parameters(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Put parameters that are set by their own names, such as `eval_every.num_prompts`, into their values.

        A value that is one of several words is then the first of those with parameters, if it is not set.
        """
        for dotted in [name for name in settings if "." in str(name)]:
            name, _, part = str(dotted).partition(".")
            field = cls.model_fields.get(name)
            if field and parameters_of(field.annotation):
                settings[name] = _merged(settings.get(name, {}), {part: settings.pop(dotted)}, field.annotation)
        return settings

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bools(cls, value: object, info: ValidationInfo) -> object:
        """Reject true and false for a number, also inside a list or mapping: Python treats them as 1 and 0."""
        if _has_bool(value) and not _takes_bools(cls.model_fields[info.field_name or ""].annotation):
            raise PydanticCustomError("unexpected_bool", "true and false are not numbers")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_extremes(cls, value: object) -> object:
        """Reject values that cannot be written to a file or do not fit into a machine word."""
        if _exceeds_a_word(value):
            raise ValueError("whole numbers must be below 2⁶³")
        if not isinstance(value, (int, float)) and (fault := unwritable(value, deepest=MAX_DEPTH)):
            raise ValueError(f"the value {fault}")
        return value


def _merged(present: Any, given: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A value of a type with these parameters, and the others that it has."""
    value: Any = plain(present)
    if get_origin(kind) is Choice:
        _, with_parameters, inner = get_args(kind)
        word = {str(value or get_args(with_parameters)[0]): dict[str, Any]()}
        words = cast("dict[str, Any]", value if value and isinstance(value, dict) else word)
        return {word: _merged(parameter, given, inner) for word, parameter in words.items()}
    return {**(value if isinstance(value, dict) else {next(iter(parameters_of(kind))): value}), **given}


class Parameters(Section):
    """The parameters of a value, such as `{updates: 20, num_prompts: 100}`; the first alone is written as `20`.

    A single one can be set by its name, such as `ppo.eval_every.num_prompts`, and leaves the others as they are.
    """

    @model_validator(mode="before")
    @classmethod
    def _read(cls, written: Any) -> Any:
        return cast(Any, written) if isinstance(written, (dict, cls)) else {next(iter(cls.model_fields)): written}

    @model_serializer(mode="wrap")
    def _write(self, whole: Callable[[Any], dict[str, Any]]) -> Any:
        (first, _), *others = type(self).model_fields.items()
        found = whole(self)
        return found if any(getattr(self, name) != field.default for name, field in others) else found[first]


def is_parameters(kind: Any) -> TypeGuard[type[Parameters]]:
    """True for a type of values that are parameters, the first of which may be written alone."""
    return isinstance(kind, type) and issubclass(kind, Parameters)


def parameters_of(kind: Any) -> dict[str, FieldInfo]:
    """The parameters that a value of a type can have, by name."""
    if is_parameters(kind):
        return dict(kind.model_fields)
    return {name: field for part in get_args(kind) for name, field in parameters_of(part).items()}


def check(refuse: Callable[[S], None]) -> Any:
    """Decorate a check across a section's fields, which raises `ValueError` and changes no field."""

    def checked(section: S) -> S:
        refuse(section)
        return section

    return model_validator(mode="after")(checked)


def _takes_bools(annotation: Any) -> bool:
    """True if a type allows true and false, or contains a section, which checks its own fields."""
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return is_section or annotation in (bool, Any) or any(map(_takes_bools, get_args(annotation)))


def _has_bool(value: Any, depth: int = 3) -> bool:
    """True for true and false, and for a value that contains one, as deep as the fields nest."""
    if not depth or not isinstance(value, (list, tuple, Mapping)):
        return isinstance(value, bool)
    entries: list[object] = [*value, *value.values()] if isinstance(value, Mapping) else [*value]
    return any(_has_bool(entry, depth - 1) for entry in entries)


def _exceeds_a_word(value: Any) -> bool:
    """True if a value, or an entry of a list, is an integer of more than 64 bits."""
    entries: list[object] = [*value] if isinstance(value, list) else [value]
    return any(isinstance(entry, int) and abs(entry) >= 2**63 for entry in entries)


def flat_names(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten `{demonstrations: {prompt: dialogue}}` to `{demonstrations.prompt: dialogue}`."""
    flat: dict[str, Any] = {}
    for key, entry in values.items():
        name = f"{prefix}{key}"
        flat |= (
            flat_names(cast("Mapping[str, Any]", entry), f"{name}.") if isinstance(entry, Mapping) else {name: entry}
        )
    return flat


def as_list(value: Any) -> Any:
    """Wrap a single string in a list."""
    return [value] if isinstance(value, str) else value


StringList = Annotated[list[str], BeforeValidator(as_list)]
"""A list of strings; a single string becomes a list of one."""

OwnFunction = Annotated[str, StringConstraints(pattern=r":[A-Za-z_][\w.]*$")]
"""The name of a user's function, `file.py:name` or `module:name`."""
