"""The suite as tests, for `pytest --pyargs ppo_conformance --adapter NAME`; see `plugin`."""

from __future__ import annotations

import pytest

from ppo_conformance.checks import Check
from ppo_conformance.results import run_check


def test_conforms(conformance_check: Check, conformance_adapter, request: pytest.FixtureRequest) -> None:
    """Run one check on one case: fail with what deviates and the line that repeats it; skip what is not offered."""
    result = run_check(conformance_check, conformance_adapter, str(request.config.getoption("--adapter")))
    if result.status == "not offered":
        pytest.skip(result.message or "not offered")
    if result.status != "passed":
        pytest.fail(f"{result.message}\n{result.reproduce}", pytrace=False)
