"""The pytest plugin: `pytest --pyargs ppo_conformance --adapter NAME` has a test per check and case."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_conformance.protocol import UserError
from ppo_conformance.results import load_adapter, select

ADAPTER = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--adapter`."""
    parser.addoption("--adapter", help="ppo-conformance: an adapter's name, or a Python file with a class Adapter")


def pytest_configure(config: pytest.Config) -> None:
    """Make the adapter, so that a mistake in its name is one line instead of an error per test."""
    if place := config.getoption("--adapter"):
        try:
            config.stash[ADAPTER] = load_adapter(place)
        except UserError as mistake:
            raise pytest.UsageError(str(mistake)) from mistake


@pytest.fixture(scope="session")
def conformance_adapter(request: pytest.FixtureRequest) -> Any:
    """The adapter that `--adapter` names."""
    if ADAPTER not in request.config.stash:
        pytest.skip("ppo-conformance needs --adapter")
    return request.config.stash[ADAPTER]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test with an argument `conformance_check` every check."""
    if "conformance_check" in metafunc.fixturenames:
        checks = select([])
        metafunc.parametrize("conformance_check", checks, ids=[check.name for check in checks])
