"""Incremental reading of a growing JSON-lines file: each row is read once."""

from __future__ import annotations

import io
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kedge.logs.json_lines import parse_row

__all__ = ["Tail"]


class Tail:
    """Follows a log: `read` reads what was added since the last call, `rows` holds all rows so far.

    A line counts once its newline is written. A log that was replaced, as by a resumed run that truncates it, is read
    again from the start. A missing file has no rows.

    Args:
        path: The log.
        keep: Number of newest rows to keep; None keeps all.
        last_bytes: Number of bytes to read from the end of the file at first; None reads all.
        convert: Applied to each row.
        numbered: Whether rows have an update number; rows without one are then left out.

    Attributes:
        skipped: Lines that were no rows.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: int | None = None,
        last_bytes: int | None = None,
        convert: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        numbered: bool = True,
    ) -> None:
        self._path, self._last_bytes, self._convert, self._numbered = path, last_bytes, convert, numbered
        self._rows: deque[dict[str, Any]] = deque(maxlen=keep)
        self._file: tuple[int, int] | None = None
        self._offset, self._is_within_line = 0, False
        self.skipped = 0

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """The rows so far."""
        return list(self._rows)

    def read(self) -> bool:
        """Read what is new; return whether anything is."""
        try:
            if not stat.S_ISREG(self._path.stat().st_mode):  # a pipe would be waited for
                return self._restart(None, 0)
            with self._path.open("rb", buffering=0) as file:
                return self._read(file)
        except FileNotFoundError:
            return self._restart(None, 0)

    def _read(self, file: io.FileIO) -> bool:
        status = os.fstat(file.fileno())
        identity, is_changed = (status.st_dev, status.st_ino), False
        if identity != self._file or status.st_size < self._offset:
            is_changed = self._restart(identity, max(0, status.st_size - (self._last_bytes or status.st_size)))
        file.seek(self._offset)
        whole, end, _ = file.readall().rpartition(b"\n")
        if not end:
            return is_changed
        self._offset += len(whole) + len(end)
        lines = whole.split(b"\n")[1 if self._is_within_line else 0 :]
        self._is_within_line = False
        self._rows.extend(row for line in lines if (row := self._row(line)) is not None)
        return True

    def _restart(self, identity: tuple[int, int] | None, offset: int) -> bool:
        """Drop the rows so far; return whether the file existed before or exists now."""
        is_changed = not (identity is None and self._file is None)
        self._file, self._offset, self._is_within_line = identity, offset, offset > 0
        self._rows.clear()
        self.skipped = 0
        return is_changed

    def _row(self, line: bytes) -> dict[str, Any] | None:
        row = parse_row(line, numbered=self._numbered)
        if row is None and line.strip():
            self.skipped += 1
        return None if row is None else self._convert(row)
