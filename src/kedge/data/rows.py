"""Rows of files and lists, before anybody asks what they mean.

A row that cannot be decoded is still a row: it carries its fault, so that one bad line never loses the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any, BinaryIO

from kedge.errors import DataError

__all__ = ["Row", "check_claim", "json_rows", "listed_rows", "parquet_rows"]

# A file without line breaks, or an endless one, must not fill the memory.
_LONGEST_LINE = 2**27
_LONGEST_ARRAY = 2**31
_PARQUET_BATCH = 1024

# Equal rows take next to no room in a columnar file; a claim beyond this is none that anybody could read.
_MOST_ROWS_PER_BYTE, _ANY_FILES_ROWS = 100, 1_000_000

_BOM = b"\xef\xbb\xbf"
_PREVIEW_CHARACTERS = 120
_SHORT = Repr()  # unlike repr, it survives any depth
_SHORT.maxstring = _PREVIEW_CHARACTERS


@dataclass(frozen=True)
class Row:
    """One row and where it stands.

    Attributes:
        source: the file, data set or list, as the user named it.
        line: counted from 1; in a text file the line, elsewhere the row.
        value: what was decoded; None where `fault` says why nothing could be.
        fault: why the row could not be decoded; None for a sound one.
        raw: the bytes it was decoded from, where there were any.
    """

    source: str
    line: int
    value: Any
    fault: str | None = None
    raw: bytes | None = None

    @property
    def place(self) -> str:
        """`file:line`, as editors open it."""
        return f"{self.source}:{self.line}"

    @property
    def preview(self) -> str:
        """The row's beginning, short and printable whatever it holds."""
        if self.raw is not None:
            return self.raw[: 4 * _PREVIEW_CHARACTERS].decode("utf-8", "backslashreplace")[:_PREVIEW_CHARACTERS]
        return _SHORT.repr(self.value)[:_PREVIEW_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def json_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON-lines file, blank lines skipped; also of a `.json` file that is one array.

    Raises:
        DataError: The file cannot be opened or read.
    """
    try:
        with path.open("rb") as stream:
            if path.suffix == ".json" and stream.read(64).removeprefix(_BOM).lstrip().startswith(b"["):
                stream.seek(0)
                yield from _array_rows(stream.read(_LONGEST_ARRAY + 1), str(path))
                return
            stream.seek(0)
            for number, line in enumerate(_lines(stream), start=1):
                # Only the first line can hold the byte-order mark that some editors put in front of a file.
                raw = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if raw:
                    yield _decoded(raw, str(path), number)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file.

    Raises:
        DataError: The file cannot be read as Parquet, or claims to hold more than it can.
    """
    from pyarrow.parquet import ParquetFile  # slow to import, and most users have no such file

    number = 0
    try:
        with ParquetFile(path) as table:
            check_claim(str(path), num_rows=table.metadata.num_rows, num_bytes=path.stat().st_size)
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(str(path), number, value)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # damaged files raise whatever their numbers lead to
        raise DataError(f"{path} cannot be read as Parquet after row {number}: {_one_line(error)}") from error


def check_claim(name: str, *, num_rows: int, num_bytes: int) -> None:
    """Refuse a file whose rows would have no end: a few bytes can say "the same, a billion times".

    Args:
        name: The file, as the user named it.
        num_rows: What it says that it holds.
        num_bytes: What it takes on the disk.

    Raises:
        DataError: It says more than can be.
    """
    if num_rows > max(_ANY_FILES_ROWS, _MOST_ROWS_PER_BYTE * num_bytes):
        raise DataError(f"{name} claims to hold {num_rows:,} rows in {num_bytes:,} bytes")


def listed_rows(values: Iterable[Any], source: str = "list") -> Iterator[Row]:
    """The entries of a list, or of anything else that yields rows."""
    for number, value in enumerate(values, start=1):
        yield Row(source, number, value)


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines, of a giant its beginning alone."""
    while line := stream.readline(_LONGEST_LINE + 1):
        yield line
        while len(line) > _LONGEST_LINE and not line.endswith(b"\n"):
            line = stream.readline(_LONGEST_LINE + 1)


def _decoded(raw: bytes, source: str, number: int) -> Row:
    if len(raw) > _LONGEST_LINE:
        return Row(source, number, None, f"the line is longer than {_LONGEST_LINE:,} bytes", raw)
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(source, number, None, f"not UTF-8 at byte {error.start + 1}", raw)
    except json.JSONDecodeError as error:
        return Row(source, number, None, f"not JSON: {error.msg} at column {error.colno}", raw)
    except (ValueError, RecursionError):
        return Row(source, number, None, "not JSON that can be read: too long a number, or nested too deeply", raw)
    # JSON lines hold objects; bare strings are for Python lists, where nobody can mistake the file.
    fault = None if isinstance(value, dict) else "not a JSON object"
    return Row(source, number, value, fault, raw)


def _array_rows(content: bytes, source: str) -> Iterator[Row]:
    if len(content) > _LONGEST_ARRAY:
        raise DataError(f"{source} is a JSON array of over {_LONGEST_ARRAY:,} bytes; write its rows as JSON lines")
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} begins as a JSON array and cannot be read as one: {_one_line(error)}") from error
    return listed_rows(values, source)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
