"""The end of a stage: writes the report and prints the doctor's findings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kedge.config import Config, field_advice
from kedge.inspect.diagnosis import examine_run
from kedge.inspect.doctor import merge, one_line
from kedge.inspect.report import leave_report, runs_in
from kedge.logs.progress import say

__all__ = ["chain_report", "leave_stage_report", "say_findings"]


def leave_stage_report(config: Config, folder: Path, *, interrupted: bool) -> None:
    """Write the report of a stage that is about to end, unless `runtime.report` is off."""
    if config.runtime.report:
        leave_report(folder, ending="stopped" if interrupted else "finished", advice=field_advice)


@contextmanager
def chain_report(config: Config, folder: Path) -> Iterator[None]:
    """Write one report of all stages that ran in the block, even if it fails; none if no stage was started."""
    try:
        yield
    finally:
        if config.runtime.report and runs_in(folder) != [folder]:
            leave_report(folder, advice=field_advice)


def say_findings(folder: Path) -> None:
    """Print one line per warning or serious finding, and the verdict with what could not be judged."""
    examination = merge(examine_run(folder, advice=field_advice).values())
    found = [finding for finding in examination.findings if finding.severity != "note"]
    for finding in found:
        say(one_line(finding))
    say(f"doctor: {examination.verdict}")
    if found:
        say(f"Run `kedge doctor {folder}` for explanations and remedies")
