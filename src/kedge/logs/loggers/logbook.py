"""`loggers.json`: what makes a resumed run go on in the same logs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from kedge.output import writing

__all__ = ["LOGBOOK_FILE", "Logbook"]

LOGBOOK_FILE = "loggers.json"


class Logbook:
    """The run's id in its loggers, and the newest update that each was told of.

    The file appears with the first note. One that a power cut has emptied is as none: the run gets a new id.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOGBOOK_FILE
        try:
            found = json.loads(self._path.read_bytes())
            self.id, self._told = str(found["id"]), dict[str, int](found["told"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            self.id, self._told = secrets.token_hex(4), {}

    def told(self, logger: str) -> int:
        """The newest update that a logger was told of; −1 where there is none, since samples may be of update 0."""
        return self._told.get(logger, -1)

    def note(self, update: int, loggers: Iterable[str]) -> None:
        """These loggers have been told of this update.

        Raises:
            OutputError: The file cannot be written.
        """
        self._told |= dict.fromkeys(loggers, update)
        part = self._path.with_suffix(".part")
        with writing(self._path):
            part.write_text(json.dumps({"id": self.id, "told": self._told}) + "\n", encoding="utf-8")
            part.replace(self._path)
