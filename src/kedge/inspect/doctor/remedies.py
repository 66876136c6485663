"""Remedies: which field to change, from which value to which."""

from __future__ import annotations

import math
from typing import Any

from kedge.inspect.doctor.finding import Direction, Remedy
from kedge.inspect.record import RunRecord

__all__ = ["adjust", "scale", "set_to"]

VERBS: dict[Direction, str] = {"too_high": "lower", "too_low": "raise", "switch": "change"}


def scale(run: RunRecord, field: str, factor: float) -> Remedy:
    """Multiply a field by a factor.

    Args:
        run: The run whose value is scaled.
        field: Its dotted name.
        factor: Below 1 if the field is too high.
    """
    direction: Direction = "too_high" if factor < 1 else "too_low"
    present = run.setting(field)
    if not _is_number(present) or present == 0:
        return adjust(run, field, direction)
    return set_to(run, field, _scaled(present, factor), direction)


def set_to(run: RunRecord, field: str, value: Any, direction: Direction = "switch", why: str = "") -> Remedy:
    """Set a field to a value.

    Args:
        run: The run, for its present value.
        field: Its dotted name.
        value: The new value.
        direction: Whether the present value is too high or too low; `switch` if it is a choice rather than a size.
        why: The purpose, if the configuration does not explain it: `to skip such steps`.
    """
    present = run.setting(field)
    if direction != "switch" and _is_number(present) and (value < present) == (direction == "too_high"):
        change = f"{VERBS[direction]} {field} from {_written(present)} to {_written(value)}"
    else:
        change = f"set {field}={_written(value)}"
    return Remedy(field, direction, f"{change} {why}".rstrip(), value)


def adjust(run: RunRecord, field: str, direction: Direction) -> Remedy:
    """Lower or raise a field for which no value can be suggested."""
    present = run.setting(field)
    now = "" if present is None else f" (now {_written(present)})"
    return Remedy(field, direction, f"{VERBS[direction]} {field}{now}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scaled(present: float, factor: float) -> float:
    """Rounded to two digits, or to a whole number if the field is one."""
    if isinstance(present, int):
        return max(1, math.floor(present * factor) if factor < 1 else math.ceil(present * factor))
    return float(f"{present * factor:.2g}")


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
