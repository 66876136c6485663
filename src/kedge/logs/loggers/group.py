"""Combines all third-party loggers of a run: equal content, no duplicate updates, dropped on failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from kedge.logs.json_lines import Sample, plain_json
from kedge.logs.loggers.logger import LoggedRun, Logger, LoggerState
from kedge_base.errors import ConfigError, install_line
from kedge_base.run_folder.record_format import METRICS_FILE, SAMPLES_FILE, read_rows
from kedge_base.stage import imported
from kedge_base.texts import printable, typed_error_text


class LoggerGroup:
    """The loggers of a run, used as a context; each is opened when its first row arrives.

    A run that is resumed after a kill repeats its last updates with the same results; updates that a logger already has
    are skipped, and lost ones are repeated from the run's files. A logger that raises is dropped with one
    warning, and the run continues.

    Args:
        names: Names of the loggers, or each with its project; see `open_logger`.
        state: The last update of each logger.
        run: The run to log.
        warn: Prints one line for the user.
    """

    def __init__(
        self,
        names: Sequence[str] | Mapping[str, str],
        state: LoggerState,
        run: LoggedRun,
        *,
        warn: Callable[[str], None],
    ) -> None:
        self._state = state
        projects = names if isinstance(names, Mapping) else dict.fromkeys(names, run.project)
        self._loggers = [
            _GuardedLogger(name, replace(run, project=project), state, warn) for name, project in projects.items()
        ]

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of one update; values that are null or text in `metrics.jsonl` are left out."""
        if not self._loggers:
            return
        numbers = _numbers(metrics)
        done = [each.name for each in self._loggers if each.call(update, lambda logger: logger.write(update, numbers))]
        self._state.record(update, done)

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Log responses of one update."""
        for each in self._loggers:
            each.call(update, lambda logger: logger.write_samples(update, samples))

    def close(self) -> None:
        """Close all loggers."""
        for each in self._loggers:
            if each.close():
                self._state.record_closed(each.name)

    def __enter__(self) -> LoggerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _GuardedLogger:
    """One logger: not opened yet, open, or dropped after a failure."""

    def __init__(self, name: str, run: LoggedRun, state: LoggerState, warn: Callable[[str], None]) -> None:
        self.name = name
        self._run = run
        self._warn = warn
        self._last_update = state.last_update(name)
        self._closed_update = state.closed_update(name)
        self._logger: Logger | None = None
        self._is_dropped = False

    def call(self, update: int, action: Callable[[Logger], None]) -> bool:
        """Run an action on the logger unless it already has this update; return whether it succeeded."""
        if self._is_dropped or (self._logger is None and not self._try(lambda: self._open(update))):
            return False
        logger = self._logger
        return logger is not None and update > self._last_update and self._try(lambda: action(logger))

    def _open(self, update: int) -> None:
        """Open the logger and repeat the earlier updates that it lost when a previous process ended."""
        self._logger = logger = open_logger(self.name, replace(self._run, last_update=self._last_update))
        if logger.last_update is None:
            return
        self._last_update = max(logger.last_update, self._closed_update)
        if update <= self._last_update + 1:
            return
        samples: dict[tuple[int, bool], list[Sample]] = {}
        samples_rows, metrics_rows = (
            read_rows(self._run.folder / name, numbered=True, on_skipped=self._warn)
            for name in (SAMPLES_FILE, METRICS_FILE)
        )
        for row in samples_rows:
            sample = Sample(**{name: value for name, value in row.items() if name != "update"})
            samples.setdefault((row["update"], sample.fixed is None), []).append(sample)
        for row in metrics_rows:
            if self._last_update < row["update"] < update:
                logger.write(row["update"], _numbers(row))
                for kind in (True, False):
                    if found := samples.get((row["update"], kind)):
                        logger.write_samples(row["update"], found)

    def close(self) -> bool:
        """Close the logger if it is open; return whether it was, and succeeded."""
        logger = self._logger
        return logger is not None and not self._is_dropped and self._try(logger.close)

    def _try(self, attempt: Callable[[], None]) -> bool:
        try:
            attempt()
        except Exception as error:  # a third-party package may raise anything; a log must not end a run
            self._is_dropped = True
            self._warn(f"{self.name} failed and is disabled; the run continues: {printable(typed_error_text(error))}")
        return not self._is_dropped


def _numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    plain = {name: plain_json(value) for name, value in metrics.items() if name != "update"}
    return {name: value for name, value in plain.items() if isinstance(value, (int, float))}


def check_loggers(names: Iterable[str]) -> None:
    """Check that the packages are installed, without importing them.

    Raises:
        ConfigError: One is missing.
    """
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError as error:
            raise ConfigError(f"runtime.loggers: {name} is not installed; {install_line(name)}") from error


def open_logger(name: str, run: LoggedRun) -> Logger:
    """Start a run's log in one of the packages, or continue it; only that package is imported."""
    return imported(f"{__package__}.{name}:open_log")(run)
