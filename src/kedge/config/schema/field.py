"""The documentation of fields, and the type of a name with a parameter."""

import ast
import linecache
import re
import sys
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Generic, TypeVar, cast, get_args

from annotated_types import Len
from pydantic import BaseModel, Field, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

Name = TypeVar("Name", bound=str)
WithParameter = TypeVar("WithParameter", bound=str)
Parameter = TypeVar("Parameter")


@dataclass(frozen=True)
class FieldDoc:
    """A field's documentation: the docstring below it.

    Attributes:
        meaning: One line, with the unit.
        source: The paper or project that the default comes from, or the reason for it.
        too_high: The effect of a value that is too high.
        too_low: The effect of a value that is too low.
        text: The meaning of a text, such as `a folder`.
    """

    meaning: str
    source: str = ""
    too_high: str = ""
    too_low: str = ""
    text: str = "text"

    @classmethod
    def read(cls, docstring: str) -> "FieldDoc":
        """Read a docstring whose lines `Source: …`, `Too high: …`, `Too low: …` and `Text: …` may be wrapped."""
        meaning, *parts = (" ".join(text.split()) for text in _PART.split(docstring))
        names = (name.lower().replace(" ", "_") for name in parts[::2])
        return cls(meaning, **dict(zip(names, parts[1::2], strict=True)))


_PART = re.compile(r"\n *(Source|Too high|Too low|Text): ")


def field(default: Any, **bounds: Any) -> Any:
    """A pydantic field with a default in any form that it reads, and with bounds: `gt`, `ge`, `lt`, `le`."""
    return Field(default, **bounds)


def same(section: type[BaseModel], name: str) -> Any:
    """A field as another section has it, with its documentation."""
    return copy(section.model_fields[name])


def field_doc(info: FieldInfo) -> FieldDoc:
    """The documentation of a section's field."""
    docs = (_docs_in(each.module).get((each.section, each.name)) for each in info.metadata if isinstance(each, _Place))
    return next(filter(None, docs), FieldDoc(info.description or ""))


@dataclass(frozen=True)
class _Place:
    """The place of a field's docstring, among the field's metadata, which pydantic ignores."""

    module: str
    section: str
    name: str


def note_places(section: type[BaseModel]) -> None:
    """Note in the fields of a section where their docstrings are: in its source, or in that of a base.

    The source is read now, because its file may change while kedge runs, and parsed when a docstring is needed.
    """
    _source(section.__module__)
    for name, info in section.model_fields.items():
        if not any(isinstance(each, _Place) for each in info.metadata):
            info.metadata.append(_Place(section.__module__, section.__name__, name))


@cache
def _source(module: str) -> str:
    """The source of an imported module; empty without one."""
    return "".join(linecache.getlines(getattr(sys.modules[module], "__file__", None) or ""))


@cache
def _docs_in(module: str) -> dict[tuple[str, str], FieldDoc]:
    """The docstrings below the fields of the classes in a module's source, by class and field."""
    return {
        (section.name, ast.unparse(field.target)): FieldDoc.read(ast.literal_eval(below.value))
        for section in ast.parse(_source(module)).body
        if isinstance(section, ast.ClassDef)
        for field, below in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


class Choice(Generic[Name, WithParameter, Parameter]):
    """One of several names, some of which take a parameter.

    `Choice[Literal["fixed", "ziegler"], Literal["ziegler"], int]` reads `fixed`, `ziegler` and `{ziegler: 10000}`, and
    is written in the same form. Not a dataclass: pydantic would read its fields instead.

    Args:
        name: The name.
        parameter: Its parameter; None if it is left out.
    """

    def __init__(self, name: Name, parameter: Parameter | None = None) -> None:
        self.name: Name = name
        self.parameter = parameter

    def __eq__(self, other: object) -> bool:
        """Compare with another choice, or with the written form of one, since defaults are in written form."""
        return bool(plain(self) == plain(other))

    def __hash__(self) -> int:
        return hash(self.name if self.parameter is None else (self.name, self.parameter))

    def __repr__(self) -> str:
        return f"Choice({self.name!r}, {self.parameter!r})"

    def __str__(self) -> str:
        return self.name

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.union_schema([handler.generate_schema(form) for form in forms(source)])
        return core_schema.no_info_after_validator_function(
            _read,
            core_schema.no_info_before_validator_function(plain, written),
            serialization=core_schema.plain_serializer_function_ser_schema(plain),
        )


def forms(annotation: Any) -> tuple[Any, Any]:
    """The two forms of a setting of a type `Choice[…]`: a name, and a mapping with one entry."""
    names, with_parameter, parameter = get_args(annotation)
    return names, Annotated[dict[with_parameter, parameter], Len(1, 1)]


def _read(written: Any) -> Choice[Any, Any, Any]:
    if not isinstance(written, dict):
        return Choice(written)
    [(name, parameter)] = cast("dict[str, Any]", written).items()
    is_default = isinstance(parameter, BaseModel) and parameter == type(parameter)()
    return Choice(name, None if is_default else parameter)


def choice_name(value: Any) -> str:
    """Return the name of a choice, as a `Choice` or as written; for any other value, its text."""
    written = plain(value)
    return "".join(map(str, cast("dict[str, Any]", written) if isinstance(written, dict) else [written]))


def plain(value: Any) -> Any:
    """Return the written form of a choice; other values, which pydantic has yet to validate, are unchanged."""
    if not isinstance(value, Choice):
        return value
    choice = cast("Choice[Any, Any, Any]", value)
    parameter = choice.parameter.model_dump() if isinstance(choice.parameter, BaseModel) else choice.parameter
    return choice.name if choice.parameter is None else {choice.name: parameter}
