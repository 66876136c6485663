"""The suite as tests, for `pytest --pyargs ppo_conformance --adapter NAME`; see `plugin`."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_conformance.checks import Check
from ppo_conformance.plugin import assert_conforms


def test_conforms(conformance_check: Check, conformance_adapter: Any, request: pytest.FixtureRequest) -> None:
    """One check on one case."""
    assert_conforms(conformance_check, conformance_adapter, str(request.config.getoption("--adapter")))
