"""A file with a JSON object on each line, that is added to while others read it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kedge.errors import DataError
from kedge.output import replace_file

__all__ = ["JsonLines", "plain_json", "read_json_lines", "truncate_rows"]

LONGEST_INT = 8192
"""Bits of a whole number that is written in decimal; Python refuses to at 4,300 digits."""


class JsonLines:
    """A JSON-lines file: rows are added to what it holds and flushed one by one.

    The same rows give the same bytes. What JSON has no word for (NaN, ±∞) is null.

    Args:
        path: The file; made if it does not exist, never written over.
    """

    def __init__(self, path: Path) -> None:
        # UTF-8 has no form for half of a surrogate pair; what backslashreplace writes is JSON's own escape for it.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row, its keys in the order given."""
        self._file.write(json.dumps(plain_json(row), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Have the disk take all rows now, so that a power cut leaves none of them out."""
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; the disk has all rows then."""
        self.sync()
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, also while it is written.

    Raises:
        DataError: There is no such file, or a line before the last is broken.
    """
    if not path.is_file():
        raise DataError(f"{str(path)!r} does not exist; expected a run's folder")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            # The last line of a run that is being written or was killed may be cut short; no other one may.
            if number < len(lines):
                raise DataError(f"{str(path)!r}, line {number}: not JSON ({error.msg})") from error
    return rows


def truncate_rows(path: Path, last_update: int) -> int:
    """Take the rows of later updates out of a log, and a last line that was cut short; return how many rows stay.

    A run that is resumed after `last_update` makes those rows again. The rows that stay keep their bytes, and the file
    is replaced as a whole: a log that is open goes on writing to the old one. Where there is no file there are no rows.

    Args:
        path: A log whose rows have an `update`.
        last_update: The last update whose rows stay.

    Raises:
        DataError: A line before the last is no row of a log.
        OutputError: The file cannot be written.
    """
    whole = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # what follows the last break is no whole row
    kept = [line + b"\n" for number, line in enumerate(whole, 1) if _update_of(line, path, number) <= last_update]
    if path.is_file():
        replace_file(path, kept)
    return len(kept)


def _update_of(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{str(path)!r}, line {number}: not a row with its update") from error


def plain_json(value: Any) -> Any:
    """A value in JSON's own types. A log must not end a run, so what it does not know becomes text."""
    if type(value) is float:  # nearly all there is, and told eight times as fast
        return value if math.isfinite(value) else None
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and value.bit_length() > LONGEST_INT:
        return hex(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(entry) for entry in value]
    return repr(value)
