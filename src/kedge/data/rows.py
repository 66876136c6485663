"""Decodes rows of files and lists, without interpreting them.

A row that cannot be decoded is still yielded, with its fault, so that one bad line never loses the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any, BinaryIO

from kedge.errors import DataError

__all__ = ["Row", "check_row_count", "json_rows", "listed_rows", "parquet_rows"]

# A file without line breaks, or an endless one, must not exhaust memory.
_LONGEST_LINE = 2**27
_LONGEST_ARRAY = 2**31
_PARQUET_BATCH = 256

# Equal rows take almost no space in a columnar file; a row count beyond this is implausible.
_MOST_ROWS_PER_BYTE, _ANY_FILES_ROWS = 100, 1_000_000
# A text that all rows share is stored once. Compression makes real texts five to ten times shorter.
_MOST_BYTES_PER_BYTE, _ANY_FILES_BYTES = 1000, 2**28

_BOM = b"\xef\xbb\xbf"
_PREVIEW_CHARACTERS = 120
_SHORT = Repr()  # unlike repr, it handles any nesting depth
_SHORT.maxstring = _PREVIEW_CHARACTERS


@dataclass(frozen=True)
class Row:
    """One row and its location.

    Attributes:
        source: the file, data set or list, as the user named it.
        line: counted from 1; in a text file the line, elsewhere the row.
        value: the decoded value; None if `fault` is set.
        fault: why the row could not be decoded; None for a good row.
        raw: the bytes it was decoded from, if any.
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
        """The row's first characters, always short and printable."""
        if self.raw is not None:
            return self.raw[: 4 * _PREVIEW_CHARACTERS].decode("utf-8", "backslashreplace")[:_PREVIEW_CHARACTERS]
        return _SHORT.repr(self.value)[:_PREVIEW_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def json_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON-lines file without blank lines, or of a `.json` file that holds one array.

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
                # Some editors write a byte-order mark at the start of a file.
                raw = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if raw:
                    yield _decoded(raw, str(path), number)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file.

    Raises:
        DataError: The file cannot be read as Parquet, or its row count or the size of its rows is implausible.
    """
    from pyarrow.parquet import ParquetFile  # slow to import, and rarely needed

    number, read, size = 0, 0, path.stat().st_size
    try:
        with ParquetFile(path) as table:
            check_row_count(str(path), num_rows=table.metadata.num_rows, num_bytes=size)
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH):
                read += sum(map(_decoded_size, batch.columns))
                if read > max(_ANY_FILES_BYTES, _MOST_BYTES_PER_BYTE * size):
                    raise DataError(
                        f"{path} has {size:,} bytes, and its first {number + len(batch):,} rows {read:,}, which is "
                        "implausible"
                    )
                for value in batch.to_pylist():
                    number += 1
                    yield Row(str(path), number, value)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # damaged files raise many kinds of errors
        raise DataError(f"{path} cannot be read as Parquet after row {number}: {_one_line(error)}") from error


def _decoded_size(column: Any) -> int:
    """Bytes of a column's values, each counted as often as it occurs."""
    return (column.dictionary_decode() if hasattr(column, "dictionary_decode") else column).nbytes


def check_row_count(name: str, *, num_rows: int, num_bytes: int) -> None:
    """Reject a file with an implausible row count: a few bytes can encode "the same row, a billion times".

    Args:
        name: The file, as the user named it.
        num_rows: Row count in its metadata.
        num_bytes: Its size on disk.

    Raises:
        DataError: The row count is implausible.
    """
    if num_rows > max(_ANY_FILES_ROWS, _MOST_ROWS_PER_BYTE * num_bytes):
        raise DataError(f"{name} claims to hold {num_rows:,} rows in {num_bytes:,} bytes, which is implausible")


def listed_rows(values: Iterable[Any], source: str = "list") -> Iterator[Row]:
    """The entries of a list or any other iterable as rows."""
    for number, value in enumerate(values, start=1):
        yield Row(source, number, value)


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines; of an oversized line only the start."""
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
        return Row(source, number, None, "JSON that cannot be read: a number is too long, or the nesting too deep", raw)
    # JSON lines hold objects; bare strings are accepted in Python lists only.
    fault = None if isinstance(value, dict) else "not a JSON object"
    return Row(source, number, value, fault, raw)


def _array_rows(content: bytes, source: str) -> Iterator[Row]:
    if len(content) > _LONGEST_ARRAY:
        raise DataError(
            f"{source} is a JSON array of over {_LONGEST_ARRAY:,} bytes; write its rows as JSON lines instead"
        )
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} starts like a JSON array but cannot be parsed as one: {_one_line(error)}") from error
    return listed_rows(values, source)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
