"""Runs each case in its own process and diagnoses the folder it leaves."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.faults.base import Base, make_base
from bench.faults.case import Case, run_case
from bench.processes import BenchError
from kedge_base.errors import KedgeError
from kedge_base.run_folder.output import is_run
from kedge_inspect.doctor import Finding, diagnose
from kedge_inspect.record import read_run

MOST_REPETITIONS = 3
"""Number of times that a user follows the advice before giving up."""

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Found:
    """The parts of a finding that the matrix needs."""

    rule: str
    severity: str
    seen: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, finding: Finding) -> Found:
        """Take them from a finding."""
        return cls(finding.rule, finding.severity, finding.seen, finding.changes)


@dataclass(frozen=True)
class Outcome:
    """The diagnosis of one run.

    Attributes:
        case: The case's name.
        rule: The rule that should find the fault; empty for a healthy run.
        seed: Seed of base and run.
        seconds: Duration of the run, including its start.
        findings: Most severe first.
        followed: The fate of the fault when the advice was followed; empty if it was not tried.
    """

    case: str
    rule: str
    seed: int
    seconds: float
    findings: tuple[Found, ...]
    followed: str = ""

    @property
    def advice(self) -> Mapping[str, Any]:
        """The values that the first serious finding or warning advises; that of the fault if there are only notes."""
        told = [found for found in self.findings if found.severity != "note" or found.rule == self.rule]
        return told[0].changes if told else {}

    @property
    def place(self) -> int:
        """Rank of the rule among the findings, from 1; 0 if it is missing."""
        return next((place for place, found in enumerate(self.findings, 1) if found.rule == self.rule), 0)

    @property
    def alarms(self) -> tuple[Found, ...]:
        """The serious findings."""
        return tuple(found for found in self.findings if found.severity == "serious")

    @property
    def good(self) -> bool:
        """True if the fault ranks first or second; for a healthy run, if nothing is serious."""
        return self.place in (1, 2) if self.rule else not self.alarms


def run_case_apart(case: Case, seed: int, work: Path) -> None:
    """Run a case in its own process, after training its base if that does not exist.

    Args:
        case: The case.
        seed: Seed of base and run.
        work: The folder of bases and runs.

    Raises:
        BenchError: It failed for a reason other than its fault.
    """
    base = work / f"base-{seed}"
    folder = run_folder(case, seed, work)
    if not base.is_dir():
        run_apart(make_base, work, seed, out=base)
    run_apart(_run, case, make_base(work, seed), folder, out=folder)


def run_apart(work: Callable[..., object], *arguments: object, out: Path) -> None:
    """Call a function in a forked process, which has all modules loaded; the parent computes nothing itself.

    Args:
        work: The function.
        arguments: Its arguments.
        out: The folder that it creates; an existing one is removed. Its output and duration are written next to it.

    Raises:
        BenchError: The process failed.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    started = time.perf_counter()
    child = FORK.Process(target=_logged, args=(log, work, *arguments))
    child.start()
    child.join()
    if child.exitcode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"{log}: exit code {child.exitcode}, {' '.join(last) or 'no output'}")
    out.with_suffix(".seconds").write_text(f"{time.perf_counter() - started:.1f}", encoding="utf-8")


def examine_case(case: Case, seed: int, work: Path) -> Outcome:
    """Diagnose a case that has been run."""
    folder = run_folder(case, seed, work)
    return examine_run(case.name, case.rule, seed, folder, folder)


def examine_run(name: str, rule: str, seed: int, run: Path, out: Path) -> Outcome:
    """Diagnose a run.

    Args:
        name: Name of the case.
        rule: The rule that should find the fault; empty for a healthy run.
        seed: Its seed.
        run: The run's folder.
        out: The folder that `run_apart` created: the run's or its parent.

    Raises:
        BenchError: It has not been run.
    """
    seconds = out.with_suffix(".seconds")
    if not seconds.is_file():
        raise BenchError(f"{name} [{seed}] has not been run; run it without --diagnose first")
    findings = tuple(map(Found.of, diagnose(read_run(run))))
    return Outcome(name, rule, seed, float(seconds.read_text(encoding="utf-8")), findings)


def follow_advice(case: Case, outcome: Outcome, work: Path, *, rerun: bool) -> Outcome:
    """Repeat a run with what the doctor advises first, as a user would, until the fault is gone or nothing is advised.

    Args:
        case: The case.
        outcome: Its diagnosis.
        work: The folder of bases and runs.
        rerun: Run the repetitions; otherwise the existing ones are diagnosed.

    Returns:
        The diagnosis, with the outcome in `followed`.
    """
    last = outcome
    settings = dict(case.settings)
    for repetition in range(1, MOST_REPETITIONS + 1):
        if not last.advice:
            break
        settings.update(last.advice)
        repeated = replace(case, name=f"{case.name}, advice {repetition}", settings=dict(settings))
        if rerun:
            try:
                run_case_apart(repeated, outcome.seed, work)
            except BenchError as error:
                reason = str(error).rpartition("Error: ")[2]
                return replace(outcome, followed=f"the advice ends in an error: {reason}")
        elif not run_folder(repeated, outcome.seed, work).is_dir():
            return outcome
        last = examine_case(repeated, outcome.seed, work)
        if not last.place and not last.alarms:
            changed = [f"{name}={value}" for name, value in settings.items() if case.settings.get(name) != value]
            return replace(outcome, followed=f"cured by {', '.join(changed)}")
    left = ", ".join(dict.fromkeys(found.rule for found in last.findings if found.severity != "note")) or case.rule
    return replace(outcome, followed=f"left: {left}" if last.advice or last is not outcome else "no setting is named")


def _logged(log: Path, work: Callable[..., object], *arguments: object) -> None:
    output = log.open("w", encoding="utf-8", buffering=1)  # stays open, so that a fatal error is logged as well
    sys.stdout = sys.stderr = output
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    work(*arguments)


def _run(case: Case, base: Base, folder: Path) -> None:
    """Run a case in this process. If its fault stops it, the doctor reads what it has written so far."""
    try:
        run_case(case, base, folder)
    except KedgeError as error:
        if not is_run(folder):
            raise
        print(f"{case.name}: {error}")


def run_folder(case: Case, seed: int, work: Path) -> Path:
    """The folder of a case's run."""
    return work / "runs" / f"{case.folder}-{seed}"


def save_outcomes(outcomes: list[Outcome], path: Path) -> None:
    """Write the outcomes as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(outcome) for outcome in outcomes]
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
