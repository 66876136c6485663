"""In tests, the shapes and types of the algorithm are checked at every call; `unchecked` switches that off.

A user runs without those checks, so the tests of kedge's own messages must too; and they would slow a training down.
"""

import functools
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import jaxtyping
import pytest
import typer.main
from hypothesis import settings
from torch import Tensor

from kedge_base.machine import invocation

# beartype draws which entry of a list it checks; from `random`'s generator, that would change a test's own draws.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import BeartypeConf, beartype

# An int is a float, as PEP 484 has it and every caller expects.
beartyped = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check each combination of types and shapes that a function is called with once: runs repeat them many times."""
    checked, passed = beartyped(function), set[Hashable]()

    @functools.wraps(function)
    def once(*args: object, **kwargs: object) -> None:
        kinds = (len(args), *map(_kind, args), *kwargs, *map(_kind, kwargs.values()))
        if kinds not in passed:
            checked(*args, **kwargs)
            if None not in kinds:
                passed.add(kinds)

    return once


def _kind(value: object) -> Hashable:
    """What a check depends on; None where that is more than a type and a shape."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype
    if isinstance(value, str):
        return value
    return type(value) if value is None or isinstance(value, int | float) or is_dataclass(value) else None


typechecker = ModuleType("kedge_typechecker")
typechecker.check = check
sys.modules[typechecker.__name__] = typechecker
jaxtyping.install_import_hook("kedge.algorithm", "kedge_typechecker.check")

# Typer builds all commands and options at each call of the command line. A user's process makes one call, these tests
# make hundreds.
typer.main.get_command = functools.cache(typer.main.get_command)

GENERATED = "generated cases"

# A shell that starts the suite in the background has it ignore interrupts, which some tests raise.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Runs wait for the disk half of their time. No test survives a power cut: those about one look at the calls.
os.fsync = lambda descriptor: None

# What is imported and collected stays until the end. Looking through it for cycles took a third
# of the collection's time.
gc.disable()

settings.register_profile("kedge", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("kedge")


def pytest_collection_finish() -> None:
    """From here on, look for cycles among the tests' own objects."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many cases the fuzz tests have generated."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    counts = [int(str(count)) for report in reports for name, count in report.user_properties if name == GENERATED]
    if counts:
        terminalreporter.write_line(f"{sum(counts):,} generated cases in {len(counts)} tests")


@pytest.fixture(autouse=True)
def from_python() -> None:
    """A test that runs the `kedge` command in this process does not make the next ones part of it."""
    invocation._running = False


@pytest.fixture
def unchecked() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
