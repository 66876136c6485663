"""Values and gradients against the vectors of the oracle, by the conventions that the profile claims."""

from __future__ import annotations

from functools import partial
from typing import Any

from ppo_conformance import vectors
from ppo_conformance.calls import call, compare, require, table, tolerance_of
from ppo_conformance.checks import Check
from ppo_conformance.protocol import METHODS, Deviation, NotOffered


def checks() -> list[Check]:
    """One check per file, with its cases."""
    return [
        Check(f"vector/{topic}", case["name"], case["purpose"], partial(run, found, case))
        for topic in vectors.topics()
        for found in [vectors.read(topic)]
        for case in found["cases"]
    ]


def run(topic: dict[str, Any], case: dict[str, Any], adapter: Any) -> float:
    """Compare every alternative of a case that the profile claims; return the largest relative error."""
    require(adapter, {**case["settings"], **case.get("needs", {})})
    worst, tried, refusal = 0.0, False, NotOffered("the profile claims none of the conventions")
    for alternative in case["expected"]:
        settings = {**case["settings"], **alternative["choices"]}
        try:
            require(adapter, settings)
            got = call(adapter, topic["method"], case["inputs"], settings)
        except NotOffered as lack:
            refusal = lack
            continue
        except Deviation:
            raise
        except Exception:
            if not case.get("may_refuse"):
                raise
            tried = True
            continue
        tried = True
        named = ", ".join(f"{name}={value}" for name, value in alternative["choices"].items())
        expected = {name: table(alternative[name]) for name in METHODS[topic["method"]].outputs}
        worst = max(worst, compare(expected, got, tolerance_of(adapter, topic), named and f"with {named}"))
    if not tried:
        raise refusal
    return worst
