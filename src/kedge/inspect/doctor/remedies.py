"""What to turn, with the value that follows from the present one."""

from __future__ import annotations

import math
from typing import Any

from kedge.inspect.doctor.finding import Direction, Remedy
from kedge.inspect.record import RunRecord

__all__ = ["change", "scale"]


def scale(run: RunRecord, knob: str, factor: float) -> Remedy:
    """Make a setting larger or smaller by a factor.

    Args:
        run: Whose setting.
        knob: Its dotted name.
        factor: Below 1 where it is too high now.
    """
    direction: Direction = "too_high" if factor < 1 else "too_low"
    present = run.setting(knob)
    if isinstance(present, bool) or not isinstance(present, (int, float)) or present == 0:
        return Remedy(knob, direction, f"{'lower' if factor < 1 else 'raise'} {knob}")
    return Remedy(knob, direction, f"{knob}={_scaled(present, factor)} instead of {present:g}")


def change(knob: str, value: Any, why: str = "") -> Remedy:
    """Set it to another value, which is no matter of more or less.

    Args:
        knob: Its dotted name.
        value: What to set it to.
        why: What that does, where it does not go without saying.
    """
    return Remedy(knob, "switch", f"{knob}={value}{f', {why}' if why else ''}")


def _scaled(present: float, factor: float) -> str:
    """A round figure: two digits, and a whole one where the present one is."""
    if isinstance(present, int):
        wanted = present * factor
        return str(max(1, math.floor(wanted) if factor < 1 else math.ceil(wanted)))
    return f"{present * factor:.2g}"
