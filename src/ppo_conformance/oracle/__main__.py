"""Fills in what the cases of `vectors/` expect, or checks it."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from ppo_conformance import vectors
from ppo_conformance.oracle import formulas
from ppo_conformance.protocol import CHOICES, METHODS

STEP = 1e-30
"""Imaginary step of a derivative: any size that does not underflow, since nothing is subtracted."""

DIFFERENCE = 1e-6
"""Step of the central differences that check it."""

HELD = ("kl", "kl_loss", "policy_loss")
"""Formulas that hold a copy of the first input fixed."""


def fill(topic: str) -> str:
    """Return the text of a topic's file with new expectations."""
    found = vectors.read(topic)
    for case in found["cases"]:
        names = list(case.get("vary", {}))
        case["expected"] = []
        for values in itertools.product(*case.get("vary", {}).values()):
            choices = dict(zip(names, values, strict=True))
            assert all(value in CHOICES[name].values for name, value in choices.items()), choices
            expected = expect(found["method"], case, {**case["settings"], **choices})
            case["expected"].append({"choices": choices, **expected})
    return text_of(found) + "\n"


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


def text_of(value: Any, indent: str = "") -> str:
    """JSON with one line per row of a table."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(name)}: {text_of(entry, inner)}" for name, entry in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(entry, (list, dict)) for entry in value):
        return "[\n" + ",\n".join(inner + text_of(entry, inner) for entry in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Write the vectors, or with `--check` return 1 and name the files that differ."""
    parser = argparse.ArgumentParser(prog="python -m ppo_conformance.oracle", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file differs")
    check, behind = parser.parse_args().check, []
    for topic in vectors.topics():
        path, text = vectors.FOLDER / f"{topic}.json", fill(topic)
        if path.read_text("utf-8") != text:
            behind.append(path.name)
            if not check:
                path.write_text(text, "utf-8")
    print(f"{'differ' if check else 'written'}: {', '.join(behind) or 'none'}")
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())
