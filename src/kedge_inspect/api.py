"""The functions of `kedge` that inspect runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

from kedge_base.registry import service
from kedge_base.run_folder.output import RECEIPT_FILE, Result, folder_of
from kedge_inspect.abroad.runs import Origin
from kedge_inspect.commands import field_advice
from kedge_inspect.diagnosis import diagnose_run
from kedge_inspect.doctor import Finding
from kedge_inspect.report import runs_in
from kedge_inspect.report import write_report as make_report
from kedge_inspect.verify import Verification, verify_run

StrPath: TypeAlias = "str | os.PathLike[str]"


def doctor(run: StrPath | Result, *, library: str = "", settings: StrPath | None = None) -> list[Finding]:
    """List problems of a run, most serious first; see `kedge_inspect.diagnosis.diagnose_run`.

    Args:
        run: The run's folder or result, or a folder with the runs of several stages; or a log of another library.
        library: The library that wrote the log, if its content does not say: `trl-grpo`, `verl`, ….
        settings: A YAML or JSON file with the settings of that library's run.

    Raises:
        DataError: The folder contains no run, or a file in it is damaged.
    """
    origin = Origin(library, None if settings is None else folder_of(settings, "settings"))
    return diagnose_run(folder_of(run), advice=field_advice(), origin=origin)


def verify(run: StrPath | Result, *, update: int | None = None, **objects: Any) -> dict[Path, Verification]:
    """Compare a run's folder with its receipt, and make one of its updates again; the folder is not changed.

    Args:
        run: The run's folder or result, or a folder with the runs of several stages.
        update: Make this update again, from the last checkpoint before it or the start, if the folder is as its receipt
            says.
        objects: Functions, models and rows that the run was given, such as `reward`.

    Returns:
        The differences of each run, none if it is as its receipt says, and what was compared.

    Raises:
        DataError: A run has no receipt, or the update cannot be made again.
    """
    folder = folder_of(run)
    folders = [folder] if (folder / RECEIPT_FILE).is_file() else runs_in(folder)
    found = {each: verify_run(each) for each in folders}
    if update is None or any(each.differences for each in found.values()):
        return found
    return {each: service("again")(each, update, **objects) for each in found}


def write_report(*runs: StrPath | Result, out: StrPath | None = None) -> Path:
    """Write one HTML page about one or more runs; see `kedge_inspect.report.write_report`.

    Args:
        runs: Folders or results of runs, or folders with the runs of several stages; runs in progress are allowed.
        out: Path of the page; by default `report.html`, in the run's folder for one run, else in the current folder.

    Raises:
        KedgeError: A folder contains no run or is damaged, or `out` exists and is not a kedge report.
    """
    page = None if out is None else folder_of(out, "out")
    return make_report([folder_of(run) for run in runs], page, advice=field_advice())
