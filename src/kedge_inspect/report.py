"""Reports of one run, several runs, a sweep, or a chain of stages, as one HTML page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

from kedge_base.errors import DataError, OutputError
from kedge_base.machine.invocation import as_argument
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import (
    REPORT_FILE,
    SUMMARY_FILE,
    is_run,
    is_sweep,
    replace_file,
    waiting_for,
    writing,
)
from kedge_base.run_folder.record_format import read_json_object
from kedge_base.texts import typed_error_text
from kedge_inspect.abroad.runs import HERE, Origin, read_any_run
from kedge_inspect.doctor import Advice, examine, no_advice
from kedge_inspect.page.data import ReportedRun, demo_frontier, demo_headlines, page_data
from kedge_inspect.page.document import is_page, plain_verdict, render_page
from kedge_inspect.page.looks import LOOKS
from kedge_inspect.page.verdict import describe_run
from kedge_inspect.record import PROGRESS_FILES, RunRecord, is_own, read_run, readable
from kedge_inspect.sweeps import read_sweep

MARKED_WITHIN = 4096
"""Bytes at the start of a file that are searched for the marker of a report."""

WAITING = "waiting for labels"
"""State of a run that ended until people have labeled."""

Ending = Literal["finished", "stopped"]


def write_report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    ending: Ending | None = None,
    advice: Advice = no_advice,
    origin: Origin = HERE,
) -> Path:
    """Write one page about runs, whether running, finished or stopped; return its path.

    The folder of a chain, such as that of `kedge rlhf` or `kedge demo`, is replaced by the runs of its stages. A page
    about a single sweep overlays its settings: the mean over seeds of each, with an interval.

    Args:
        folders: Folders of the runs, or logs of other libraries. Runs of the same stage are overlaid.
        out: The page; by default `report.html` in the folder of a single run, or in the current folder for several.
        ending: The state of unfinished runs, if the caller is about to end them.
        advice: Looks up a field's documentation of values that are too high or too low.
        origin: What is known about another library's log.

    Raises:
        DataError: No folder is given, a folder is not a run's, or a file in it is damaged.
        OutputError: The page cannot be written, or the file there is not a kedge report.
    """
    if not folders:
        raise DataError("no run folder given")
    with readable(*folders):
        place = folders[0].parent if folders[0].is_file() else folders[0]
    path = out or (place / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE))
    check_replaceable(path)
    replace_file(path, [render_page(collect_page(folders, ending=ending, advice=advice, origin=origin))])
    return path


def leave_report(folder: Path, *, ending: Ending | None = None, advice: Advice = no_advice) -> None:
    """Write the report at the end of a run.

    Errors are printed rather than raised, so that a failing report cannot cost the run its result.
    """
    try:
        write_report([folder], ending=ending, advice=advice)
    except Exception as error:  # a bug in the page must not cost hours of training
        say(f"{folder / REPORT_FILE} could not be written: {typed_error_text(error)}")


def collect_page(
    folders: Sequence[Path],
    *,
    ending: Ending | None = None,
    advice: Advice = no_advice,
    origin: Origin = HERE,
    on_skipped: Callable[[str], None] = say,
) -> dict[str, Any]:
    """The data of the page about these runs; see `page_data`, and `read_run` for `on_skipped`.

    Raises:
        DataError: As `write_report`.
    """
    only = folders[0] if len(folders) == 1 else None
    with readable(*folders):
        sweep = read_sweep(only) if only and is_sweep(only) else None
        if sweep is None:
            named = _named([path for folder in folders for path in runs_in(folder)])
        else:
            named = {run.name: run.folder for run in sweep.runs if is_run(run.folder)}
        read = partial(read_any_run, origin=origin, on_skipped=on_skipped)
        runs = [_reported(name, path, ending, advice, read) for name, path in named.items()]
        trained = {_real(run.record.folder) for run in runs}
        return page_data(
            [replace(run, reward_models=_reward_models(run.record, exclude=trained)) for run in runs],
            title=", ".join(map(_title, folders)),
            headlines=demo_headlines(_summary(only)) if only else [],
            written=time.strftime("Written %d %B %Y, %H:%M"),
            sweep=sweep,
        )


def report_as_text(folder: Path) -> str:
    """The first sentence about the last run in a folder, for a prompt; an error line if the folder is damaged."""
    try:
        with readable(folder):
            described = describe_run(read_any_run(runs_in(folder)[-1], on_skipped=lambda line: None))[0]
            return f"{WAITING}; {described}" if waiting_for(folder) else described
    except DataError as error:
        return str(error)


def report_as_html(folder: Path) -> str:
    """The key figures of a folder's report for a notebook, without scripts; an error line if the folder is damaged."""
    try:
        data = collect_page([folder], on_skipped=lambda line: None)
    except DataError as error:
        return f"<p>{escape(str(error))}</p>"
    return plain_verdict(data, note=f"Charts and responses: {folder / REPORT_FILE}")


def runs_in(folder: Path) -> list[Path]:
    """The runs of a chain's stages in order; the run itself, even if another one is in its folder."""
    is_single = any((folder / name).is_file() for name in PROGRESS_FILES)
    stages = () if is_single else (path for path in folder.glob("*") if is_own(path))
    return sorted(stages, key=lambda path: (_place(path.name), len(path.name), path.name)) or [folder]


def _title(folder: Path) -> str:
    name = _real(folder).name
    return f"{name}: {WAITING}" if waiting_for(folder) else name


def _real(path: Path) -> Path:
    """Resolve symbolic links, without the error that `Path.resolve` raises for a link to itself."""
    return Path(os.path.realpath(path))


def _place(name: str) -> int:
    return next((place for place, stage in enumerate(LOOKS) if name.startswith(stage)), len(LOOKS))


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """A unique name for each run: its folder's name, with as many parent folders as needed."""
    found = {path: path.name for path in map(_real, paths)}
    for depth in range(2, 1 + max((len(path.parts) for path in found), default=0)):
        names = list(found.values())
        found = {p: "/".join(p.parts[-depth:]) if names.count(name) > 1 else name for p, name in found.items()}
    return {name: path for path, name in found.items()}


def _reported(
    name: str, path: Path, ending: Ending | None, advice: Advice, read: Callable[[Path], RunRecord]
) -> ReportedRun:
    record = read(path)
    if ending is not None and record.state == "running":
        record = replace(record, state=ending, stops_at=None)
    examined = examine(record, advice=advice)
    verdict = examined.verdict if examined.num_checks or examined.unjudged else ""
    curves = demo_frontier(_summary(path.parent), path.name) if record.trainer is None else []
    return ReportedRun(name, record, examined.findings, verdict, examined.is_clean, curves)


def _summary(folder: Path) -> Mapping[str, Any]:
    """The summary of a chain; empty before it is written, or if the folder is a single run."""
    return {} if is_run(folder) else read_json_object(folder / SUMMARY_FILE)


def _reward_models(record: RunRecord, *, exclude: set[Path]) -> dict[str, RunRecord]:
    """The runs that trained the reward models of this one, if their folders still exist."""
    terms = [term for term in record.config.get("reward") or [] if isinstance(term, Mapping)]
    folders = {_real(Path(str(term["source"]))).parent for term in terms if term.get("source")}
    found = {}
    for folder in sorted(folder for folder in folders - exclude if is_run(folder)):
        try:
            trained = read_run(folder, on_skipped=lambda line: None)
        except DataError:  # a damaged folder of another run is not this report's business
            continue
        if trained.stage == "reward":
            found[folder.name] = trained
    return found


def check_replaceable(path: Path) -> None:
    """Reject overwriting a file that is not a kedge report."""
    with writing(path):
        if not os.path.lexists(path):
            return
        if path.is_file():  # reading a pipe would block
            with path.open("rb") as file:
                if is_page(file.read(MARKED_WITHIN)):
                    return
    raise OutputError(f"{path} exists and is not a kedge report; choose another file with {as_argument('--out')}")
