"""`loggers.json`: lets a resumed run continue in the same logs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from kedge.system.durable import replace_contents
from kedge.system.output import writing

__all__ = ["LOGGERS_FILE", "LoggerState"]

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
            self.id, self._last_updates = str(found["id"]), dict[str, int](found["told"])
            self._closed = dict[str, int](found.get("closed", {}))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            self.id, self._last_updates, self._closed = secrets.token_hex(4), {}, {}

    def last_update(self, logger: str) -> int:
        """The last update that a logger has; −1 if none, because samples may belong to update 0."""
        return self._last_updates.get(logger, -1)

    def record(self, update: int, loggers: Iterable[str]) -> None:
        """Save that these loggers have this update.

        Raises:
            OutputError: The file cannot be written.
        """
        self._last_updates |= dict.fromkeys(loggers, update)
        self._save()

    def closed_update(self, logger: str) -> int:
        """The last update that a logger had when it was last closed, which is stored for certain; −1 if none."""
        return self._closed.get(logger, -1)

    def record_closed(self, logger: str) -> None:
        """Save that a logger was closed with all its updates; errors as in `record`."""
        self._closed[logger] = self.last_update(logger)
        self._save()

    def _save(self) -> None:
        text = json.dumps({"id": self.id, "told": self._last_updates, "closed": self._closed})
        with writing(self._path):  # not forced to disk after every update: a damaged file counts as missing
            replace_contents(self._path, [f"{text}\n".encode()], forced=False)
