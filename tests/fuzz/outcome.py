"""Checks that bad input leads to success or one clear line, never to a traceback, a hang or leftover files."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from kedge.cli import main
from kedge_base.errors import KedgeError
from kedge_base.run_folder.output import DIAGNOSTIC_FILES

T = TypeVar("T")

LONGEST_LINE = 2500

DEADLINE = 120.0
"""Seconds after which a case hangs: more than a busy machine needs to start a process."""


def case_counts(short: int, whole: int) -> pytest.MarkDecorator:
    """Parametrize a test with few generated cases, and with many for `make test-all`."""
    return pytest.mark.parametrize("num_cases", [short, pytest.param(whole, marks=pytest.mark.slow)])


class Hang(BaseException):
    """A case exceeded the deadline. A BaseException, so that no `except Exception` swallows it."""


@contextlib.contextmanager
def within_the_deadline() -> Iterator[None]:
    """Raise `Hang` after the deadline."""

    def end(*_: object) -> None:
        raise Hang(f"over {DEADLINE:g} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def fuzz(
    num_cases: int, strategy: SearchStrategy[T], check: Callable[[T], object], record: Callable[[str, object], None]
) -> None:
    """Check the same seeded cases in every run, and record their number."""
    count = 0

    @settings(max_examples=num_cases, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(strategy)
    def cases(case: T) -> None:
        nonlocal count
        count += 1
        check(case)

    cases()
    record("generated cases", count)


def line_or_result(call: Callable[..., T], *arguments: Any, **named: Any) -> T | str:
    """The result of a call, or the line of its KedgeError; any other exception propagates."""
    try:
        with within_the_deadline():
            return call(*arguments, **named)
    except KedgeError as error:
        check_line(str(error))
        return str(error)


def kedge(*arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its exit code and standard error."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["kedge", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), within_the_deadline():
            main()
    except SystemExit as ending:
        code = int(ending.code or 0)
    finally:
        sys.argv = before
    assert "\x1b" not in out.getvalue() + err.getvalue(), "an escape sequence of the data reaches the terminal"
    assert code in (0, 2), err.getvalue()
    if code == 2:
        *_, line = err.getvalue().splitlines()
        assert line.startswith("error: "), err.getvalue()
        check_line(line)
    return code, err.getvalue()


def check_line(line: str) -> None:
    """Assert that an error is one printable line of reasonable length."""
    assert line.strip()
    assert line.isprintable()
    assert len(line) <= LONGEST_LINE
    line.encode("utf-8")


def lines_of(path: Path) -> list[str]:
    """The lines of a text file; empty if it does not exist."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def debris(folder: Path) -> list[str]:
    """Unexpected files in the folder of a failed run."""
    return sorted(path.name for path in folder.glob("*") if path.name not in DIAGNOSTIC_FILES)
