"""Fills in what the cases of `vectors/` and `vectors/update/` expect, or with `--check` says where it differs."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppo_conformance import vectors
from ppo_conformance.checks import update
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
    outputs = found if isinstance(found, tuple) else (found,)
    expected: dict[str, Any] = dict(zip(described.outputs, outputs, strict=True))
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


def filled(topic: str) -> dict[str, Any]:
    """Return a topic with new expectations."""
    found = vectors.read(topic)

    def with_expected(case: dict[str, Any]) -> dict[str, Any]:
        varied = case.get("vary", {})
        every = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
        expected = [{"choices": each, **expect(found["method"], case, {**case["settings"], **each})} for each in every]
        return {**case, "expected": expected}

    return {**found, "cases": list(map(with_expected, found["cases"]))}


def same(one, other) -> bool:
    """True for equal data, up to the rounding in which machines differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return same([*one], [*other]) and same([*one.values()], [*other.values()])
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-10, abs_tol=1e-14)
    return one == other


def text_of(value) -> str:
    """JSON with one line per row of a table."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)


def rewrite(made: Mapping[Path, Any], *, check: bool) -> int:
    """Write the files that differ from what they should hold; with `check` name them instead, and return 1."""
    outdated = [path for path, new in made.items() if not same(new, json.loads(path.read_text("utf-8")))]
    for path in () if check else outdated:
        path.write_text(text_of(made[path]) + "\n", "utf-8")
    print(f"{'differ' if check else 'written'}: {', '.join(path.stem for path in outdated) or 'none'}")
    return int(check and bool(outdated))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file differs")
    check = parser.parse_args().check
    files = {vectors.FOLDER / f"{topic}.json": filled(topic) for topic in vectors.topics()}
    files |= {update.FOLDER / f"{name}.json": update.filled(name) for name in update.CASES}
    sys.exit(rewrite(files, check=check))
