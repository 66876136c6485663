"""Decodes rows of files and lists, without interpreting them.

A row that cannot be decoded is still yielded, with its fault, so that one bad line never loses the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

from kedge.data.tables import plain_value
from kedge.errors import DataError

__all__ = ["Row", "check_row_count", "listed_rows", "parquet_rows"]

_PARQUET_BATCH = 256

# Equal rows take almost no space in a columnar file; a row count beyond this is implausible.
_MOST_ROWS_PER_BYTE, _ANY_FILES_ROWS = 100, 1_000_000
# A text that all rows share is stored once. Compression makes real texts five to ten times shorter.
_MOST_BYTES_PER_BYTE, _ANY_FILES_BYTES = 1000, 2**28

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
        yield Row(source, number, plain_value(value))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
