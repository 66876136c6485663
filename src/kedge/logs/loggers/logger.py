"""The protocol of third-party loggers, the run that they log, and the state for continuing after a resume."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

from kedge.logs.json_lines import Sample
from kedge_base.machine.durable import replace_contents
from kedge_base.run_folder.output import writing

PROJECT = "kedge"
"""The project of a run, unless a setting names another."""


class Logger(Protocol):
    """A destination of metrics and samples. It may raise any exception of its package."""

    @property
    def last_update(self) -> int | None:
        """The last update in the log when it was opened; −1 for an empty log.

        None if rows are stored as soon as they are written, so that kedge's own record is right even after a kill.
        """
        ...

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of one update, named as in `metrics.jsonl`; updates are in ascending order."""
        ...

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Log responses of one update as text: at least one, all of one kind; see `samples_name`."""
        ...

    def close(self) -> None:
        """Flush and close the log."""
        ...


@dataclass(frozen=True)
class LoggedRun:
    """A run as its loggers see it.

    Attributes:
        folder: The run's folder.
        stage: `sft`, `reward` or `ppo`.
        project: The run's project, unless a logger has its own.
        id: Eight characters that stay the same when the run is resumed.
        settings: Its configuration, in JSON types.
        last_update: The last update that the logger has by kedge's own record; −1 for none.
    """

    folder: Path
    stage: str
    project: str
    id: str
    settings: Mapping[str, Any]
    last_update: int = -1

    @property
    def name(self) -> str:
        """Display name: the folder's name and the id, since many runs' folders have the same name."""
        return f"{self.folder.name}-{self.id}"


def samples_name(samples: Sequence[Sample]) -> str:
    """Name of the samples in a log; responses to fixed prompts have a separate one."""
    return "samples" if samples[0].fixed is None else "fixed_samples"


@dataclass(eq=False)
class TableLogger:
    """Logs rows by step and responses as a table, with a package that has this interface.

    Args:
        log: Logs a row: `(row, step=update)`.
        table: The package's class of tables.
        columns: The columns of a table: `update`, or attributes of a sample.
        close: Finishes the run.
        last_update: See `Logger.last_update`.
    """

    log: Callable[..., Any]
    table: Callable[..., Any]
    columns: Sequence[str]
    _: KW_ONLY
    close: Callable[[], Any]
    last_update: int | None = None

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Log metrics as the row of a step."""
        self.log(dict(metrics), step=update)

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Log responses as a table."""
        rows = [{"update": update, **vars(sample)} for sample in samples]
        table = self.table(columns=[*self.columns], data=[[row[name] for name in self.columns] for row in rows])
        self.log({samples_name(samples): table}, step=update)


LOGGERS_FILE = "loggers.json"


class LoggerState:
    """The run's id in its loggers, and the last update that each of them has.

    The first `record` creates the file. A damaged file counts as missing: the run gets a new id.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOGGERS_FILE
        try:
            found = json.loads(self._path.read_bytes())
            self.id = str(found["id"])
            self._last_updates = dict[str, int](found["told"])
            self._closed = dict[str, int](found.get("closed", {}))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            self.id = secrets.token_hex(4)
            self._last_updates = {}
            self._closed = {}

    def last_update(self, logger: str) -> int:
        """Return the last update that a logger has; −1 if none, since samples can belong to update 0."""
        return self._last_updates.get(logger, -1)

    def record(self, update: int, loggers: Iterable[str]) -> None:
        """Record that these loggers have this update.

        Raises:
            OutputError: The file cannot be written.
        """
        self._last_updates |= dict.fromkeys(loggers, update)
        self._save()

    def closed_update(self, logger: str) -> int:
        """The last update when a logger was last closed, which is certain to be stored; −1 if none."""
        return self._closed.get(logger, -1)

    def record_closed(self, logger: str) -> None:
        """Record that a logger was closed after storing all its updates; errors as in `record`."""
        self._closed[logger] = self.last_update(logger)
        self._save()

    def _save(self) -> None:
        text = json.dumps({"id": self.id, "told": self._last_updates, "closed": self._closed})
        with writing(self._path):  # not forced to disk after every update: a damaged file counts as missing
            replace_contents(self._path, [f"{text}\n".encode()], forced=False)
