"""Serves a run's live report, updated from its files, to browsers on this machine; changes no file."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kedge_base.errors import DataError, KedgeError
from kedge_base.machine.local_server import PAGE_POLICY, Answer, LocalServer, Request
from kedge_base.run_folder.output import (
    CONFIG_FILE,
    DATA_FILE,
    FINISHED_FILE,
    INCIDENTS_FILE,
    ROLES_FILE,
    SUMMARY_FILE,
    SWEEP_FILE,
    WAITING_FILE,
    is_run,
    is_sweep,
)
from kedge_base.run_folder.record_format import CRITIC_CHECKS_FILE, DETAILS_FILE, EVALUATIONS_FILE, SAMPLES_FILE
from kedge_inspect.abroad.runs import HERE, Origin
from kedge_inspect.abroad.sources import log_files
from kedge_inspect.doctor import Advice, no_advice
from kedge_inspect.page.document import render_page
from kedge_inspect.record import PROGRESS_FILES, readable
from kedge_inspect.report import collect_page, runs_in

REBUILD_SHARE = 10
"""Rebuilding the data takes at most 1/`REBUILD_SHARE` of the time, so as not to slow down the run."""

LIVE_DATA = "data.json"

WATCHED_FILES = (CONFIG_FILE, ROLES_FILE, DATA_FILE, *PROGRESS_FILES, DETAILS_FILE, SAMPLES_FILE, INCIDENTS_FILE,
                 EVALUATIONS_FILE, CRITIC_CHECKS_FILE, SUMMARY_FILE, FINISHED_FILE, SWEEP_FILE,
                 WAITING_FILE)  # fmt: skip


def has_run(folder: Path) -> bool:
    """True if a run has started in a folder, alone or as a stage of a chain or a run of a sweep, or another library
    has written a log.

    Raises:
        DataError: The folder does not exist, or is a link to itself; or it holds logs of several runs, or a model.
    """
    with readable(folder):
        if not folder.is_dir() and not folder.is_file():
            raise DataError(f"{str(folder)!r} does not exist or is not a folder; expected a run's folder")
        if is_sweep(folder) or any(map(is_run, runs_in(folder))) or log_files(folder):
            return True
        if (folder / "config.json").is_file():
            raise DataError(f"{str(folder)!r} is the folder of a model, not of a run")
        return False


def serve_run(folder: Path, *, port: int = 0, advice: Advice = no_advice, origin: Origin = HERE) -> LocalServer:
    """Serve the run's report, kept up to date; use it as a context.

    Args:
        folder: The run's folder, a folder of several stages, or that of a sweep; or the log of another library.
        port: The local port; 0 picks a free one.
        advice: Looks up a field's documentation of values that are too high or too low.
        origin: What is known about another library's log.

    Raises:
        DataError: The folder is not that of a run, or a file in it is damaged.
        ConfigError: The port cannot be used.
    """
    collect = partial(collect_page, [folder], advice=advice, origin=origin, on_skipped=lambda line: None)
    collect()
    return LocalServer(_LiveReport(folder, collect).answer, port=port)


class _LiveReport:
    """Answers requests for the report and its newest data."""

    def __init__(self, folder: Path, collect: Callable[[], dict[str, Any]]) -> None:
        self._folder = folder
        self._collect = collect
        self._lock = threading.Lock()
        self._next_build = 0.0
        self._files = ""
        self._stops_at = math.inf  # when a run that the page shows as running counts as stopped
        self._built: tuple[str, Mapping[str, Any]] = ("", {})

    def answer(self, request: Request) -> Answer:
        """Return the page, or its data if the browser has an older version."""
        if request.path not in ("", LIVE_DATA):
            return Answer(HTTPStatus.NOT_FOUND, b"Not found.\n")
        try:
            with readable(self._folder):
                return self._newest_answer(request)
        except KedgeError as error:  # the run's folder was moved or is damaged
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode("utf-8", "backslashreplace"))

    def _newest_answer(self, request: Request) -> Answer:
        version, data = self._newest()
        if request.path == "":
            page = render_page(data, live=request.root + LIVE_DATA)
            return Answer(HTTPStatus.OK, page, "text/html; charset=utf-8", policy=PAGE_POLICY)
        if request.known == version:
            return Answer(HTTPStatus.NOT_MODIFIED, version=version)
        text = json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
        return Answer(HTTPStatus.OK, text, "application/json", version=version)

    def _newest(self) -> tuple[str, Mapping[str, Any]]:
        """Return version and data, rebuilt if there is something new, but not too often."""
        with self._lock:
            files = _stamp(self._folder)
            is_new = files != self._files or time.time() >= self._stops_at
            if is_new and time.monotonic() >= self._next_build:
                started = time.monotonic()
                data = self._collect()
                version = f'"{files}-{"".join(run["state"][0] for run in data["runs"])}"'
                self._files = files
                self._stops_at = min((run["stops_at"] for run in data["runs"] if run["stops_at"]), default=math.inf)
                self._built = (version, {**data, "version": version})
                self._next_build = started + REBUILD_SHARE * (time.monotonic() - started)
            return self._built


def _stamp(folder: Path) -> str:
    """Return a text that changes with any file that the page shows."""
    paths = [
        path for place in (folder, *folder.glob("*/")) for name in WATCHED_FILES if (path := place / name).is_file()
    ]
    states = [path.stat() for path in paths or log_files(folder)]
    newest = max((state.st_mtime for state in states), default=0.0)
    return f"{newest:.6f}-{sum(state.st_size for state in states)}"
