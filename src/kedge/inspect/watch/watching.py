"""A run watched from outside, on a terminal or in a browser: looked at again and again, and never touched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from kedge.errors import DataError
from kedge.inspect.doctor import Advice, diagnose, no_advice
from kedge.inspect.page import render_page
from kedge.inspect.record import QUIET_SECONDS, SUMMARY_FILE
from kedge.inspect.report import collect_page
from kedge.inspect.watch import Follower, LivePage, PageServer, Sight, draw_frame
from kedge.logs.details import DETAILS_FILE
from kedge.logs.metrics import METRICS_FILE
from kedge.logs.samples import SAMPLES_FILE
from kedge.output import CONFIG_FILE, FINISHED_FILE, INCIDENTS_FILE, is_run
from kedge.texts import printable

__all__ = ["serve_run", "watch_run"]

EVERY = 1.0
"""Seconds between two looks."""

REDRAWN_EVERY = 5.0
"""Seconds between two frames of a run that writes nothing."""

PATIENCE = 5.0
"""Seconds that a file may be damaged: it may be on its way to the disk."""

READ = (CONFIG_FILE, METRICS_FILE, DETAILS_FILE, SAMPLES_FILE, INCIDENTS_FILE, SUMMARY_FILE, FINISHED_FILE)


def watch_run(folder: Path, console: Console, *, once: bool = False, advice: Advice = no_advice) -> None:
    """Show a run on a terminal until it comes to its end, or until Ctrl-C; a folder without a run is waited for.

    Of a folder that holds the runs of several stages the one that is at work is shown.

    Args:
        folder: The run's.
        console: Where to show it; what is no terminal gets one frame.
        once: Show one frame.
        advice: What a field's documentation says about a value that is too high or too low.

    Raises:
        DataError: There is no such folder, a file in it is damaged, or there is no run where one frame is to be shown.
    """
    if not folder.is_dir():
        raise DataError(f"{str(folder)!r} does not exist; expected a run's folder")
    if once or not console.is_terminal:
        console.print(draw_frame(Follower(_at_work(folder), partial(diagnose, advice=advice)).look(), console))
        return
    sight = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        last: tuple[object, ...] = ()
        for sight in _sights(folder, advice):
            # Drawing takes time from the run: it is done where there is something new, and now and then for the clock.
            seen = (console.size, sight and sight.record.state, int(time.monotonic() / REDRAWN_EVERY))
            if seen != last or (sight is not None and sight.is_new):
                live.update(_shown(sight, folder, console), refresh=True)
                last = seen
    if sight is not None:
        console.print(draw_frame(sight, console))


def serve_run(folder: Path, *, port: int = 0, advice: Advice = no_advice) -> PageServer:
    """A server of the run's page, which shows in a browser of this machine what the run has done until now.

    Args:
        folder: The run's, or one that holds the runs of several stages.
        port: On which port; 0 takes one that is free.
        advice: What a field's documentation says about a value that is too high or too low.

    Raises:
        DataError: It is no run's folder, or a file in it is damaged.
        ConfigError: The port cannot be used.
    """
    collect_page([folder])
    page = LivePage(
        version=lambda: _version(folder),
        data=lambda: collect_page([folder], advice=advice),
        render=lambda data, live: render_page(data, live=live),
    )
    return PageServer(page, port=port)


def _shown(sight: Sight | None, folder: Path, console: Console) -> RenderableType:
    if sight is None:
        return Text(f"{printable(str(folder))} holds no run yet: waiting for one to begin")
    return draw_frame(sight, console, height=console.height)


def _sights(folder: Path, advice: Advice) -> Iterator[Sight | None]:
    """A sight of the run every second until it has come to its end; None while there is no run."""
    follower, seen_at, has_begun = Follower(_at_work(folder), partial(diagnose, advice=advice)), time.monotonic(), False
    while True:
        if (place := _at_work(folder)) != follower.folder:
            follower = Follower(place, partial(diagnose, advice=advice))
        has_begun = has_begun or is_run(place)
        try:
            sight = follower.look() if has_begun else None
        except DataError:
            if time.monotonic() - seen_at > PATIENCE:
                raise
        else:
            seen_at = time.monotonic()
            yield sight
            if sight is not None and _is_over(sight, folder):
                return
        time.sleep(EVERY)


def _is_over(sight: Sight, folder: Path) -> bool:
    """Whether nothing more is to come: a stage's end is not that of its chain."""
    chain = sight.record.folder != folder and not any(
        (folder / name).is_file() for name in (FINISHED_FILE, SUMMARY_FILE)
    )
    return sight.record.state == "finished" and not chain


def _at_work(folder: Path) -> Path:
    """The stage that wrote last, where the folder holds several; the folder itself else."""
    stages = [path for path in folder.glob("*") if is_run(path)]
    return max(stages, key=lambda path: (_written(path), path.name), default=folder)


def _written(folder: Path) -> float:
    return max(path.stat().st_mtime for name in (CONFIG_FILE, METRICS_FILE) if (path := folder / name).is_file())


def _version(folder: Path) -> str:
    """Changes when a file that the page shows does, and once when the run has fallen silent."""
    paths = [path for place in (folder, *folder.glob("*/")) for name in READ if (path := place / name).is_file()]
    states = [path.stat() for path in paths]
    newest = max((state.st_mtime for state in states), default=0.0)
    size = sum(state.st_size for state in states)
    return f"{newest:.6f}-{size}-{'quiet' if time.time() - newest > QUIET_SECONDS else 'at-work'}"
