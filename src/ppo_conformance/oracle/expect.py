"""Evaluates a formula for a case, with its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppo_conformance.oracle import formulas
from ppo_conformance.protocol import METHODS

STEP = 1e-30
"""Imaginary step of a derivative: any size that does not underflow, since nothing is subtracted."""

DIFFERENCE = 1e-6
"""Step of the central differences that check it."""

HELD = ("kl", "kl_loss", "policy_loss")
"""Formulas that hold a copy of the first input fixed."""


def values_of(method: str, case: dict[str, Any], settings: dict[str, Any], first: Any = None) -> dict[str, Any]:
    """Evaluate the formula for a case; return the outputs by name, without the gradient.

    With `first` instead of the first input, that one is still what a stop-gradient holds fixed.
    """
    held, *others = case["inputs"].values()
    inputs = [held if first is None else first, *others, *([held] if method in HELD else [])]
    found = getattr(formulas, method)(*inputs, **settings)
    names = [name for name in METHODS[method].outputs if name != "gradient"]
    return dict(zip(names, found if len(names) > 1 else [found], strict=True))


def expect(method: str, case: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the formula for a case, with the gradient of the sum with respect to the first input."""
    expected = values_of(method, case, settings)
    if "gradient" not in METHODS[method].outputs:
        return expected
    if case.get("kink"):
        return {**expected, "gradient": None}
    first = np.array(next(iter(case["inputs"].values())), complex)
    gradient = np.zeros(first.shape)

    def total(place: tuple[int, ...], step: complex) -> complex:
        moved = first.copy()
        moved[place] += step
        return complex(np.sum(next(iter(values_of(method, case, settings, moved.tolist()).values()))))

    for place in np.ndindex(first.shape):
        gradient[place] = total(place, STEP * 1j).imag / STEP
        measured = (total(place, DIFFERENCE) - total(place, -DIFFERENCE)).real / (2 * DIFFERENCE)
        error = abs(measured - gradient[place])
        assert error < 1e-5 * (1 + abs(measured)), f"{case['name']}: {measured} is measured, not {gradient[place]}"
    return {**expected, "gradient": (gradient + 0.0).tolist()}
