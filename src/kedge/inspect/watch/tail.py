"""The rows of a JSON-lines file as it grows, each of them read once."""

from __future__ import annotations

import io
import json
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.errors import DataError

__all__ = ["Tail"]


class Tail:
    """Follows a log: `read` takes in what was added since, `rows` are those that there are.

    A line counts once its end is written. A log that was replaced, such as one that a resumed run has cut back, is read
    anew. While there is no file there are no rows.

    Args:
        path: The log.
        keep: How many of the newest rows are kept; None keeps all.
        last_bytes: How much of the file's end is read at first; None reads all.
    """

    def __init__(self, path: Path, *, keep: int | None = None, last_bytes: int | None = None) -> None:
        self._path, self._last_bytes = path, last_bytes
        self._rows: deque[dict[str, Any]] = deque(maxlen=keep)
        self._file: tuple[int, int] | None = None
        self._offset, self._is_within_line = 0, False

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """The rows so far; those that have no number of an update are left out."""
        return list(self._rows)

    def read(self) -> bool:
        """Take in what is new; whether anything is.

        Raises:
            DataError: A line that is whole is not JSON.
        """
        try:
            with self._path.open("rb", buffering=0) as file:
                return self._read(file)
        except FileNotFoundError:
            return self._begin(None, 0)

    def _read(self, file: io.FileIO) -> bool:
        status = os.fstat(file.fileno())
        identity, is_changed = (status.st_dev, status.st_ino), False
        if identity != self._file or status.st_size < self._offset:
            is_changed = self._begin(identity, max(0, status.st_size - (self._last_bytes or status.st_size)))
        file.seek(self._offset)
        whole, end, _ = file.readall().rpartition(b"\n")
        if not end:
            return is_changed
        self._offset += len(whole) + len(end)
        lines = whole.split(b"\n")[1 if self._is_within_line else 0 :]
        self._is_within_line = False
        self._rows.extend(row for line in lines if (row := self._row(line)) is not None)
        return True

    def _begin(self, identity: tuple[int, int] | None, offset: int) -> bool:
        """Forget the rows so far; whether there was a file, or is one now."""
        is_changed = not (identity is None and self._file is None)
        self._file, self._offset, self._is_within_line = identity, offset, offset > 0
        self._rows.clear()
        return is_changed

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise DataError(f"{str(self._path)!r} is damaged: a line is not JSON ({error})") from error
        return row if isinstance(row, dict) and isinstance(row.get("update"), int) else None
