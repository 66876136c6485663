"""Evaluates a formula for a case, with its gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ppo_conformance.oracle import formulas
from ppo_conformance.protocol import METHODS

STEP = 1e-30
"""Imaginary step of a derivative: any size that does not underflow, since nothing is subtracted."""

DIFFERENCE = 1e-6
"""Step of the central differences that check it."""

HELD = ("kl", "kl_loss", "policy_loss")
"""Formulas that hold a copy of the first input fixed."""


def values_of(method: str, inputs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What the formula gives, by the names of the outputs, without the gradient."""
    found = _evaluate(method, list(inputs.values()), next(iter(inputs.values())), settings)
    names = [name for name in METHODS[method].outputs if name != "gradient"]
    return dict(zip(names, found if len(names) > 1 else [found], strict=True))


def expect(method: str, case: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What the formula gives for a case, with the gradient of the sum with respect to the first input."""
    expected = values_of(method, case["inputs"], settings)
    if "gradient" not in METHODS[method].outputs:
        return expected
    if case.get("kink"):
        return {**expected, "gradient": None}
    first, *others = case["inputs"].values()

    def total(place: tuple[int, ...], x: Any) -> Any:
        found = _evaluate(method, [replaced(first, place, x), *others], first, settings)
        return sum(number for number, _ in leaves(found))

    gradient = copy.deepcopy(first)
    for x, place in list(leaves(first)):
        slope = complex(total(place, x + STEP * 1j)).imag / STEP
        measured = (total(place, x + DIFFERENCE) - total(place, x - DIFFERENCE)) / (2 * DIFFERENCE)
        assert abs(measured - slope) < 1e-5 * (1 + abs(slope)), f"{case['name']}: {measured} is measured, not {slope}"
        put(gradient, place, slope + 0.0)
    return {**expected, "gradient": gradient}


def _evaluate(method: str, inputs: list[Any], held: Any, settings: dict[str, Any]) -> Any:
    """The formula, with the copy of the first input that it holds fixed, if it does."""
    return getattr(formulas, method)(*inputs, *([held] if method in HELD else []), **settings)


def leaves(table: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The numbers of nested lists with their places."""
    if not isinstance(table, (list, tuple)):
        yield table, place
        return
    for i, part in enumerate(table):
        yield from leaves(part, (*place, i))


def replaced(table: Any, place: tuple[int, ...], number: Any) -> Any:
    """A copy with another number at a place."""
    found = copy.deepcopy(table)
    put(found, place, number)
    return found


def put(table: Any, place: tuple[int, ...], number: Any) -> None:
    """Set the number at a place of nested lists."""
    for i in place[:-1]:
        table = table[i]
    table[place[-1]] = number
