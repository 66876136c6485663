"""Values and gradients against the vectors of the oracle, by the conventions that the profile claims."""

from __future__ import annotations

from functools import partial
from typing import Any

from ppo_conformance import vectors
from ppo_conformance.calls import alternatives, call, compare, require, table, tolerance_of
from ppo_conformance.checks import Check
from ppo_conformance.protocol import METHODS, Deviation, NotOffered


def checks() -> list[Check]:
    """One check per file, with its cases."""
    return [
        Check(f"vector/{topic}", case["name"], case["purpose"], partial(run, topic, case))
        for topic in vectors.topics()
        for case in vectors.read(topic)["cases"]
    ]


def run(method: str, case: dict[str, Any], adapter) -> float:
    """Compare every alternative of a case that the profile claims; return the largest relative error."""
    errors, lack = [], "the profile claims none of the conventions"
    for expected, settings in alternatives(adapter, case):
        try:
            got = call(adapter, method, case["inputs"], settings)
        except NotOffered as refusal:
            lack = str(refusal)
        except Exception as failure:
            if isinstance(failure, Deviation) or not case.get("may_refuse"):
                raise
            errors.append(0.0)
        else:
            named = ", ".join(f"{name}={value}" for name, value in expected["choices"].items())
            numbers = {name: table(expected[name]) for name in METHODS[method].outputs}
            tolerance = tolerance_of(adapter, vectors.read(method))
            errors.append(compare(numbers, got, tolerance, f"with {named}" if named else "not the oracle's number"))
    if not errors:
        require(adapter, {**case["settings"], **case.get("needs", {})})
        raise NotOffered(lack)
    return max(errors)
