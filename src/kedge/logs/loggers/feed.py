"""All loggers of a run as one: told the same, told nothing twice, and dropped when they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kedge.logs.json_lines import plain_json
from kedge.logs.loggers.logbook import Logbook
from kedge.logs.loggers.logger import LoggedRun, Logger
from kedge.logs.loggers.opening import open_logger
from kedge.logs.samples import Sample

__all__ = ["Loggers"]


class Loggers:
    """The loggers that a run was given, to be used as a context; each begins with the first row that it is told.

    A run that is resumed after a kill takes its last steps again and gets the same figures; what a logger has of them
    already it is not told again. A logger that raises is dropped with one warning: the run goes on.

    Args:
        names: Which ones; see `open_logger`.
        logbook: How far they are.
        run: What they log.
        warn: Tells a user a line.
    """

    def __init__(self, names: Sequence[str], logbook: Logbook, run: LoggedRun, *, warn: Callable[[str], None]) -> None:
        self._logbook = logbook
        self._all = [_Listener(name, run, logbook.told(name), warn) for name in dict.fromkeys(names)]

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Tell all of them the figures of one update; what is null or text in `metrics.jsonl` is left out."""
        if not self._all:
            return
        plain = {name: plain_json(value) for name, value in metrics.items()}
        figures = {name: value for name, value in plain.items() if isinstance(value, (int, float))}
        told = [each.name for each in self._all if each.tell(update, lambda logger: logger.write(update, figures))]
        self._logbook.note(update, told)

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Tell all of them responses of one update."""
        for each in self._all:
            each.tell(update, lambda logger: logger.write_samples(update, samples))

    def close(self) -> None:
        """End all of them."""
        for each in self._all:
            each.close()

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listener:
    """One logger: not begun, at work, or dropped."""

    def __init__(self, name: str, run: LoggedRun, told: int, warn: Callable[[str], None]) -> None:
        self.name, self._run, self._told, self._warn = name, run, told, warn
        self._logger: Logger | None = None
        self._is_dropped = False

    def tell(self, update: int, message: Callable[[Logger], None]) -> bool:
        """Whether it took the message."""
        if self._is_dropped or update <= self._told:
            return False
        return self._try(lambda: message(self._begun()))

    def close(self) -> None:
        if (logger := self._logger) is not None and not self._is_dropped:
            self._try(logger.close)

    def _begun(self) -> Logger:
        self._logger = self._logger or open_logger(self.name, self._run)
        return self._logger

    def _try(self, attempt: Callable[[], None]) -> bool:
        try:
            attempt()
        except Exception as error:  # a stranger's package raises what it likes; a log must not end a run
            self._is_dropped = True
            self._warn(f"{self.name} failed and logs no more; the run goes on: {type(error).__name__}: {error}")
        return not self._is_dropped
