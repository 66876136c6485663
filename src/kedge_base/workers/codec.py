"""Messages between kedge and a worker: one JSON object per line. Received data is never executed."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from decimal import Decimal
from typing import Any

_TAG = "kedge:type"

# Types in Parquet files and YAML that JSON lacks. A datetime is also a date, so the order matters.
_TYPES: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
}

_UNCHANGING = frozenset({str, int, float, bool, type(None)})


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as a line of JSON.

    Dates, times, decimals and bytes keep their type; tuples become lists, and numeric keys become texts.

    Raises:
        TypeError: It contains a value of another type.
        ValueError: A list or mapping contains itself.
        RecursionError: It is nested too deeply.
    """
    return json.dumps(message, default=_tagged).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message on a line.

    Raises:
        ValueError: The line is not a message.
    """
    message = json.loads(line, object_hook=_untagged)
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {line[:60]!r}")
    return message


def own_copy(value: Any) -> Any:
    """Copy a value for user code in this process, which may change it, as if it were sent to another process.

    Lists, tuples, sets, dictionaries and arrays are copied, with what they contain. Other objects are not copied: they
    may be shared on purpose, or not support copying.
    """
    try:
        return _copied(value)
    except RecursionError:  # hundreds of levels, or a list that contains itself
        return value


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    if kind in (list, tuple, set):
        return kind([entry if type(entry) in _UNCHANGING else _copied(entry) for entry in value])
    if hasattr(value, "tolist"):
        with suppress(TypeError, RuntimeError):  # a memoryview, a tensor with a graph
            return deepcopy(value)
    return value


def _tagged(value: object) -> dict[str, str]:
    for name, (kind, write, _) in _TYPES.items():
        if isinstance(value, kind):
            return {_TAG: name, "value": write(value)}
    raise TypeError(f"of type {type(value).__name__}")


def _untagged(value: dict[str, Any]) -> Any:
    written = value.get("value")
    kind = value.get(_TAG)
    if len(value) == 2 and isinstance(kind, str) and kind in _TYPES and isinstance(written, str):
        with suppress(ValueError, ArithmeticError):  # a row of the data that happens to have this form
            return _TYPES[kind][2](written)
    return value
