"""Watching a run from another process, on a terminal or in a browser. The folder is only read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from kedge.errors import DataError
from kedge.inspect.doctor import Advice, examine, no_advice
from kedge.inspect.page import render_page
from kedge.inspect.record import QUIET_SECONDS, RESULTS, last_written, readable
from kedge.inspect.report import collect_page, runs_in
from kedge.inspect.watch import Follower, LivePage, Snapshot, draw_frame, page_server
from kedge.inspect.watch.sweep import SweepFollower, draw_sweep
from kedge.logs.details import DETAILS_FILE
from kedge.logs.metrics import METRICS_FILE
from kedge.logs.samples import SAMPLES_FILE
from kedge.system.local_server import LocalServer
from kedge.system.output import (
    CONFIG_FILE,
    FINISHED_FILE,
    INCIDENTS_FILE,
    PROGRESS_FILE,
    SUMMARY_FILE,
    SWEEP_FILE,
    is_run,
    is_sweep,
)
from kedge.system.texts import printable

__all__ = ["serve_run", "watch_run"]

INTERVAL = 1.0
"""Seconds between two reads of the folder."""

REDRAW_INTERVAL = 5.0
"""Seconds between two frames of a run that writes nothing."""

PATIENCE = 5.0
"""Seconds a file may be unreadable before it counts as damaged: it may be in the middle of a write."""

WATCHED_FILES = (CONFIG_FILE, METRICS_FILE, DETAILS_FILE, SAMPLES_FILE, INCIDENTS_FILE, PROGRESS_FILE,
                 *RESULTS.values(), SUMMARY_FILE, FINISHED_FILE, SWEEP_FILE)  # fmt: skip


def watch_run(folder: Path, console: Console, *, once: bool = False, advice: Advice = no_advice) -> None:
    """Show a run on a terminal until it finishes, or until Ctrl-C; waits for a run to start in an empty folder.

    In a folder of several stages, the stage that wrote last is shown; in that of a sweep, a line for each run.

    Args:
        folder: The run's folder.
        console: The console; one that is not a terminal gets a single frame.
        once: Show a single frame.
        advice: Looks up what a field's documentation says about values that are too high or too low.

    Raises:
        DataError: The folder does not exist, a file in it is damaged, or it has no run to draw a single frame of.
    """
    if not folder.is_dir():
        raise DataError(f"{str(folder)!r} does not exist; expected a run's folder")
    if is_sweep(folder):
        _watch_sweep(folder, console, once=once)
        return
    if once or not console.is_terminal:
        with readable(folder):
            console.print(draw_frame(Follower(_active_run(folder), partial(examine, advice=advice)).look(), console))
        return
    snapshot = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        last: tuple[object, ...] = ()
        for snapshot in _snapshots(folder, advice):
            # Drawing takes time away from the run: only for new rows, and now and then for the clock.
            drawn = (console.size, snapshot and snapshot.record.state, int(time.monotonic() / REDRAW_INTERVAL))
            if drawn != last or (snapshot is not None and snapshot.is_new):
                live.update(_frame(snapshot, folder, console), refresh=True)
                last = drawn
    if snapshot is not None:
        console.print(draw_frame(snapshot, console))


def _watch_sweep(folder: Path, console: Console, *, once: bool) -> None:
    """Show a sweep until it is over, or until Ctrl-C."""
    follower = SweepFollower(folder)
    snapshot = follower.look()
    if not once and console.is_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            read_at = time.monotonic()
            while not snapshot.sweep.is_over:
                live.update(draw_sweep(snapshot, console, height=console.height), refresh=True)
                time.sleep(INTERVAL)
                try:
                    snapshot, read_at = follower.look(), time.monotonic()
                except DataError:
                    if time.monotonic() - read_at > PATIENCE:
                        raise
    console.print(draw_sweep(snapshot, console))


def serve_run(folder: Path, *, port: int = 0, advice: Advice = no_advice) -> LocalServer:
    """A server of the run's report, kept up to date for browsers on this machine.

    Args:
        folder: The run's folder, a folder of several stages, or that of a sweep.
        port: The port; 0 picks a free one.
        advice: Looks up what a field's documentation says about values that are too high or too low.

    Raises:
        DataError: The folder is not a run's, or a file in it is damaged.
        ConfigError: The port cannot be used.
    """
    collect_page([folder])
    page = LivePage(
        version=lambda: _version(folder),
        data=lambda: collect_page([folder], advice=advice, on_skipped=lambda line: None),
        render=lambda data, live: render_page(data, live=live),
    )
    return page_server(page, port=port)


def _frame(snapshot: Snapshot | None, folder: Path, console: Console) -> RenderableType:
    if snapshot is None:
        return Text(f"{printable(str(folder))} has no run yet: waiting for one to start")
    with readable(folder):
        return draw_frame(snapshot, console, height=console.height)


def _snapshots(folder: Path, advice: Advice) -> Iterator[Snapshot | None]:
    """A snapshot of the run every second until it has finished; None while there is no run."""
    follower, read_at, has_started = None, time.monotonic(), False
    while True:
        if follower is None or _active_run(folder) != follower.folder:
            follower = Follower(_active_run(folder), partial(examine, advice=advice))
        has_started = has_started or is_run(follower.folder)
        try:
            snapshot = follower.look() if has_started else None
        except DataError:
            if time.monotonic() - read_at > PATIENCE:
                raise
        else:
            read_at = time.monotonic()
            yield snapshot
            if snapshot is not None and _is_over(snapshot, folder):
                return
        time.sleep(INTERVAL)


def _is_over(snapshot: Snapshot, folder: Path) -> bool:
    """Whether the run and the chain of stages it belongs to, if any, have finished."""
    if snapshot.record.state != "finished":
        return False
    is_stage = snapshot.record.folder != folder
    return not is_stage or any((folder / name).is_file() for name in (FINISHED_FILE, SUMMARY_FILE))


def _active_run(folder: Path) -> Path:
    """The stage that wrote last, in a folder of several stages; else the folder itself."""
    first, *others = runs_in(folder)
    return max(first, *others, key=lambda path: (_newest_write(path), path.name)) if others else first


def _newest_write(folder: Path) -> float:
    """When a run last wrote metrics, or rewrote its configuration on resuming."""
    return max(last_written(folder), (folder / CONFIG_FILE).stat().st_mtime)


def _version(folder: Path) -> str:
    """A text that changes with every file the page shows, and once more when the run counts as stopped."""
    paths = [
        path for place in (folder, *folder.glob("*/")) for name in WATCHED_FILES if (path := place / name).is_file()
    ]
    states = [path.stat() for path in paths]
    newest = max((state.st_mtime for state in states), default=0.0)
    size = sum(state.st_size for state in states)
    return f"{newest:.6f}-{size}-{'quiet' if time.time() - newest > QUIET_SECONDS else 'running'}"
