"""Checked access to the fields of a row: any JSON value either passes or raises one clear reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

from kedge.data.rejections import RowError
from kedge.texts import unwritable

__all__ = ["Fields", "Messages", "check_fields", "entries_of", "field_of", "messages_of", "number_of", "text_of"]

Fields: TypeAlias = "Mapping[str, Any]"
Messages: TypeAlias = "list[dict[str, str]]"

_DEEPEST = 100
_SHAREGPT_ROLES = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"chatgpt": "assistant", "model": "assistant", "tool": "tool", "observation": "tool"},
}
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def check_fields(value: object) -> Fields:
    """The row as named fields, all of which can be written as UTF-8 JSON.

    Raises:
        RowError: The value is not a mapping, a name is not text, a text holds a lone surrogate, or a field nests too
            deeply to be sent to a reward function or written to a file.
    """
    if not isinstance(value, Mapping):
        raise RowError(f"the row is {_kind(value)}, expected an object with named fields")
    for name, entry in value.items():
        if not isinstance(name, str):
            raise RowError(f"a field's name is {_kind(name)}, expected text")
        if (fault := unwritable((name, entry), deepest=_DEEPEST)) is not None:
            raise RowError(f"field {name[:40]!r} {fault}")
    return value


def field_of(fields: Fields, name: str) -> Any:
    """A required field.

    Raises:
        RowError: The field is missing or null.
    """
    if name not in fields:
        present = ", ".join(repr(key[:20]) for key in list(fields)[:6])
        raise RowError(f"field {name!r} is missing (the row has {present or 'no fields'})")
    if fields[name] is None:
        raise RowError(f"field {name!r} is null")
    return fields[name]


def text_of(value: object, name: str) -> str:
    """A non-blank text.

    Raises:
        RowError: The value is not text, or is blank.
    """
    if not isinstance(value, str):
        raise RowError(f"field {name!r} is {_kind(value)}, expected text")
    if not value.strip():
        raise RowError(f"field {name!r} is empty")
    return value


def number_of(value: object, name: str) -> float:
    """A finite number.

    Raises:
        RowError: The value is not a number, not finite, or beyond a float's range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RowError(f"field {name!r} is {_kind(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RowError(f"field {name!r} is not a finite number")
    return number


def entries_of(value: object, name: str) -> Sequence[Any]:
    """A list.

    Raises:
        RowError: The value is not a list.
    """
    if not isinstance(value, (list, tuple)):
        raise RowError(f"field {name!r} is {_kind(value)}, expected a list")
    return value


def messages_of(value: object, name: str) -> Messages:
    """A conversation: at least one message, each with `role` and `content`; other keys are ignored.

    A single message stands for a conversation of one. ShareGPT's `from` and `value` are read as well.

    Raises:
        RowError: The value is not such a list.
    """
    entries = [value] if isinstance(value, Mapping) else entries_of(value, name)
    if not entries:
        raise RowError(f"field {name!r} is empty")
    return [_message(entry, f"{name}[{index}]") for index, entry in enumerate(entries)]


def _message(entry: object, name: str) -> dict[str, str]:
    if not isinstance(entry, Mapping):
        raise RowError(f"field {name!r} is {_kind(entry)}, expected a message with 'role' and 'content'")
    if "from" in entry and "role" not in entry:
        role = text_of(entry["from"], f"{name}.from")
        if role not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise RowError(f"field {name + '.from'!r} is {role[:40]!r}, expected one of {known}")
        return {"role": _SHAREGPT_ROLES[role], "content": text_of(field_of(entry, "value"), f"{name}.value")}
    return {key: text_of(field_of(entry, key), f"{name}.{key}") for key in ("role", "content")}


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")
