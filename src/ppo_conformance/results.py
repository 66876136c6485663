"""Runs the checks on an adapter and records the results."""

from __future__ import annotations

import importlib
import json
import runpy
import shlex
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

from ppo_conformance.checks import Check, all_checks
from ppo_conformance.protocol import Adapter, Deviation, NotOffered, UserError, check_profile

STATUSES = ("passed", "deviates", "error", "not offered")


@dataclass(frozen=True)
class Result:
    """The result of one check on one case.

    Attributes:
        check: id of the check.
        case: its case.
        status: one of `STATUSES`; an error is an exception of the library or the adapter.
        message: what differs or is missing; empty if it passed.
        error: the largest relative error that was seen, if numbers were compared.
        reproduce: the command that repeats it.
    """

    check: str
    case: str
    status: str
    message: str
    error: float | None
    reproduce: str


@dataclass
class Report:
    """The results of a library.

    Attributes:
        adapter: name of the library.
        version: of the library.
        profile: its choices.
        seconds: of the run.
        results: in the order of the checks.
        suite: version of the suite, if it is installed.
    """

    adapter: str
    version: str
    profile: dict[str, str]
    seconds: float = 0.0
    results: list[Result] = field(default_factory=list)
    suite: str = ""

    def count(self, status: str) -> int:
        """Number of results with a status."""
        return sum(result.status == status for result in self.results)

    @property
    def conforms(self) -> bool:
        """True if nothing deviates or fails."""
        return not (self.count("deviates") or self.count("error"))

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", "utf-8")


def select(patterns: Iterable[str]) -> list[Check]:
    """Return the checks whose id or name matches one of the patterns; all without a pattern.

    Raises:
        UserError: a pattern matches nothing.
    """
    every, patterns = all_checks(), list(patterns)
    for pattern in patterns:
        if not any(matches(check, pattern) for check in every):
            raise UserError(f"no check matches {pattern!r}; `ppo-conformance list` names them")
    return [check for check in every if not patterns or any(matches(check, pattern) for pattern in patterns)]


def matches(check: Check, pattern: str) -> bool:
    """True for a pattern such as `vector/*`, of an id or of a name with its case."""
    return fnmatchcase(check.id, pattern) or fnmatchcase(check.name, pattern)


def adapter_names() -> list[str]:
    """Names of the adapters that the suite has."""
    folder = Path(__file__).parent / "adapters"
    return [path.stem for path in sorted(folder.glob("*.py")) if "class Adapter(" in path.read_text("utf-8")]


def load_adapter(place: str) -> Adapter:
    """Make the adapter of a name, or of a Python file with a class `Adapter`.

    Raises:
        UserError: there is no such adapter, its library is missing, or its profile is wrong.
    """
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise UserError(f"there is no file {place}")
    if not is_file and place not in adapter_names():
        raise UserError(f"no adapter is named {place!r}; there are {', '.join(adapter_names())}, or give a file.py")
    try:
        names = runpy.run_path(place) if is_file else vars(importlib.import_module(f"ppo_conformance.adapters.{place}"))
        kind = names.get("Adapter")
        if not (isinstance(kind, type) and issubclass(kind, Adapter)) or kind is Adapter:
            raise UserError(f"{place} has no class Adapter(ppo_conformance.Adapter); see ppo_conformance.protocol")
        adapter = kind()
        adapter.version()  # finds out here whether the library is installed
    except ImportError as missing:
        raise UserError(f"adapter {place}: {missing}") from missing
    check_profile(adapter)
    return adapter


def run_check(check: Check, adapter, place: str) -> Result:
    """Run a check; an exception becomes its result."""
    message, error = "", None
    try:
        error = check.run(adapter)
        status = "passed"
    except NotOffered as lack:
        status, message = "not offered", str(lack)
    except Deviation as deviation:
        status, message, error = "deviates", str(deviation), deviation.error
    except Exception as failure:
        last = traceback.extract_tb(failure.__traceback__)[-1]
        status, message = "error", f"{type(failure).__name__}: {failure} ({Path(last.filename).name}:{last.lineno})"
    reproduce = f"ppo-conformance run --adapter {shlex.quote(place)} --only {check.name}"
    return Result(check.id, check.case, status, message, error, reproduce)


def run(adapter: Adapter, place: str, checks: Iterable[Check]) -> Report:
    """Run checks on an adapter, which `place` names in the lines that reproduce a result."""
    started = time.perf_counter()
    report = Report(adapter.name, adapter.version(), dict(adapter.profile))
    with suppress(PackageNotFoundError):
        report.suite = version("ppo-conformance")
    report.results = [run_check(check, adapter, place) for check in checks]
    report.seconds = round(time.perf_counter() - started, 2)
    return report


def as_table(report: Report) -> str:
    """A line per check with its counts, then every result that deviates or fails with the line that repeats it."""
    width = max(len(result.check) for result in report.results)
    lines = [f"{'check':<{width}}" + "".join(f"  {status:>11}" for status in STATUSES) + "  largest error"]
    for name, group in groupby(report.results, lambda result: result.check):
        statuses, errors = zip(*((result.status, result.error) for result in group), strict=True)
        known = [error for error in errors if error is not None]
        counts = "".join(f"  {statuses.count(status) or '.':>11}" for status in STATUSES)
        lines.append(f"{name:<{width}}{counts}" + (f"  {max(known):>13.1e}" if known else ""))
    for result in report.results:
        if result.status in ("deviates", "error"):
            lines += ["", f"{result.check}:{result.case} {result.status}: {result.message}", f"  {result.reproduce}"]
    totals = ", ".join(f"{report.count(status)} {status}" for status in STATUSES)
    return "\n".join([*lines, "", f"{report.adapter} {report.version}: {totals}; {report.seconds:.1f} s"])
