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


def expect(method: str, case: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What the formula gives for a case, by the names of the outputs."""
    formula, (first, *others) = getattr(formulas, method), case["inputs"].values()
    outputs = METHODS[method].outputs

    def evaluate(x: Any) -> Any:
        return formula(x, *others, *([first] if method in HELD else []), **settings)

    def total(x: Any) -> Any:
        return sum(number for number, _ in leaves(evaluate(x)))

    found = evaluate(first)
    if "gradient" not in outputs:
        return dict(zip(outputs, found if len(outputs) > 1 else [found], strict=True))
    if case.get("kink"):
        return {next(iter(outputs)): found, "gradient": None}
    gradient = copy.deepcopy(first)
    for x, place in list(leaves(first)):
        slope = complex(total(replaced(first, place, x + STEP * 1j))).imag / STEP
        ahead, behind = (total(replaced(first, place, x + step)) for step in (DIFFERENCE, -DIFFERENCE))
        measured = (ahead - behind) / (2 * DIFFERENCE)
        assert abs(measured - slope) < 1e-5 * (1 + abs(slope)), f"{case['name']}: {measured} is measured, not {slope}"
        put(gradient, place, slope + 0.0)
    return {next(iter(outputs)): found, "gradient": gradient}


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
