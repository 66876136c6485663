"""Evaluates a formula for a case, and checks its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppo_conformance.oracle.formulas import Formulas
from ppo_conformance.protocol import CHOICES, METHODS

DIFFERENCE = 1e-6
"""Step of the central differences that check a gradient."""


def expect(method: str, case: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the formula for a case; return the outputs by name."""
    described = METHODS[method]
    settings = {**{name: CHOICES[name].values[0] for name in described.choices}, **settings}
    first, *others = map(np.array, case["inputs"].values())
    found = Formulas().call(method, [first, *others], settings)
    expected = dict(zip(described.outputs, found if isinstance(found, tuple) else (found,), strict=True))
    if case.get("kink"):
        expected["gradient"] = None
    elif "gradient" in expected:

        def total(place: tuple[int, ...], step: float) -> float:
            moved = first.copy()
            moved[place] += step
            return np.sum(getattr(Formulas(), method)(moved, *others, {**settings, "held": first}))

        for place, slope in np.ndenumerate(expected["gradient"]):
            measured = (total(place, DIFFERENCE) - total(place, -DIFFERENCE)) / (2 * DIFFERENCE)
            error = abs(measured - slope)
            assert error < 1e-5 * (1 + abs(measured)), f"{case['name']}: {measured} is measured, not {slope}"
    return {name: np.array(x).tolist() for name, x in expected.items()}
