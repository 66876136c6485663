"""What kedge and a worker tell each other: one JSON object per line. Nothing that arrives is ever executed."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

__all__ = ["decode", "encode"]

_TAG = "kedge:type"

# What Parquet files and YAML hold beside JSON's own types. A datetime is a date, too: the order matters.
_TYPES: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
}


def encode(message: dict[str, Any]) -> bytes:
    """A message as one line.

    Dates, times, decimals and bytes arrive as what they are; tuples arrive as lists and numbers that are keys as texts.

    Raises:
        TypeError: Something else than those and JSON's own types is inside.
        ValueError: A list or mapping holds itself.
        RecursionError: It is nested too deeply.
    """
    return json.dumps(message, default=_tagged).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message on a line.

    Raises:
        ValueError: It is none.
    """
    message = json.loads(line, object_hook=_untagged)
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {line[:60]!r}")
    return message


def _tagged(value: object) -> dict[str, str]:
    for name, (kind, write, _) in _TYPES.items():
        if isinstance(value, kind):
            return {_TAG: name, "value": write(value)}
    raise TypeError(f"a {type(value).__name__}")


def _untagged(value: dict[str, Any]) -> Any:
    written = value.get("value")
    kind = value.get(_TAG)
    if len(value) == 2 and isinstance(kind, str) and kind in _TYPES and isinstance(written, str):
        with suppress(ValueError, ArithmeticError):  # a row of the data that only looks like one of ours
            return _TYPES[kind][2](written)
    return value
