"""Reads text files: JSON lines, JSON as a whole, and tables as CSV, each also compressed."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from kedge.data.fields import is_conversation
from kedge.data.records import Row, listed_rows
from kedge_base.errors import DataError
from kedge_base.texts import error_text

# A file without line breaks, or an endless one, must not exhaust memory.
_LONGEST_LINE = 2**27
_LONGEST_FILE = 2**31

_OF_A_ROW = {"prompt", "messages", "conversations", "text", "instruction", "question", "chosen"}


def _open_zstandard(path: Path, mode: str) -> Any:
    from pyarrow import input_stream  # slow to import, and rarely needed

    return io.BufferedReader(input_stream(str(path), compression="zstd"))


COMPRESSIONS: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
"""Functions that open compressed files, by suffix."""


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON-lines file, skipping blank lines, or of a file that is JSON as a whole.

    The latter contains one or several values, with line breaks anywhere: lists of rows, rows, or an object that
    contains the rows; see `_held_rows`.

    Raises:
        DataError: The file cannot be opened or read, or is damaged JSON as a whole.
    """
    with _reading(path) as stream:
        first = [raw for _, raw in islice(_full_lines(stream), 2)]
    if _is_whole(first):
        kind = "array" if first[0][:1] == b"[" else "object"
        try:
            values = _values(path)
        except DataError:
            raise
        except (ValueError, RecursionError) as error:
            if kind == "array" or not isinstance(_decoded(first[-1], "", 0).value, dict):
                reason = f"starts like a JSON {kind} but cannot be parsed as one: {error_text(error)}"
                raise DataError(f"{path} {reason}") from error
        else:
            yield from listed_rows(values, str(path))
            return
    with _reading(path) as stream:
        for number, raw in _full_lines(stream):
            yield _decoded(raw, str(path), number)


def _is_whole(lines: list[bytes]) -> bool:
    """True if a file's first two lines show that it is JSON as a whole rather than line by line."""
    if not lines or lines[0][:1] not in (b"[", b"{"):
        return False
    if len(lines) == 1:
        return True
    try:
        json.loads(lines[0].decode("utf-8"))
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc)  # the line is valid but incomplete
    except (ValueError, RecursionError):
        pass
    return False


def _values(path: Path) -> list[Any]:
    """Read the rows of a file that is parsed as JSON rather than line by line.

    Raises `ValueError` or `RecursionError` if that fails.
    """
    with _reading(path) as stream:
        content = stream.read(_LONGEST_FILE + 1)
    if len(content) > _LONGEST_FILE:
        raise DataError(f"{path} is JSON of over {_LONGEST_FILE:,} bytes; write its rows as JSON lines instead")
    text = content.decode("utf-8-sig").strip()
    values = list[Any]()
    position = 0
    while position < len(text):
        value, end = json.JSONDecoder().raw_decode(text, position)
        values.append(value)
        position = next((index for index in range(end, len(text)) if not text[index].isspace()), end)
    only = values[0] if len(values) == 1 else None
    if isinstance(only, dict):
        return _held_rows(only, str(path))
    return only if isinstance(only, list) and not is_conversation(only) else values


def _held_rows(value: dict[str, Any], source: str) -> list[Any]:
    """Find the rows in an object: a list in it, its values, its columns combined, or the object itself.

    Raises:
        DataError: It contains several lists of rows.
    """
    has_text = any(isinstance(value.get(name), str) for name in _OF_A_ROW)
    if has_text or any(map(is_conversation, value.values())) or _is_list_of(int, value.get("input_ids")):
        return [value]
    is_around = not value.keys() & _OF_A_ROW
    if value and is_around and all(isinstance(row, dict) and row.keys() & _OF_A_ROW for row in value.values()):
        return list(value.values())  # by id, as pandas writes with orient="index"
    tables = {name: rows for name, rows in value.items() if _is_list_of(dict, rows)}
    if tables and is_around:
        if len(tables) > 1 and "train" not in tables:
            names = ", ".join(tables)
            raise DataError(f"{source} holds several lists of rows ({names}); write the one to read as JSON lines")
        return tables.get("train") or next(iter(tables.values()))
    columns = [list(column.values()) if isinstance(column, dict) else column for column in value.values()]
    if value and all(isinstance(column, list) and len(column) == len(columns[0]) > 0 for column in columns):
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    return [value]


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, kind) for entry in value)


def csv_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file, whose first line names the columns.

    Empty cells are dropped, all others are text; lines with only empty cells are skipped.

    Raises:
        DataError: The file cannot be read, its column names are not distinct, or a quotation is not closed properly,
            so that rows might be lost in it.
    """
    csv.field_size_limit(_LONGEST_LINE)  # the standard limit, 131,072, is shorter than many conversations
    with _reading(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        start, header = next(((number, line) for number, line in enumerate(text, start=1) if line.strip()), (1, ""))
        separator = "\t" if ".tsv" in path.name.lower() else max(",;\t", key=header.count)
        reader = csv.reader(chain([header], text), delimiter=separator, strict=True)
        names = [name.strip() for name in next(reader, [])]
        if len(set(names)) < len(names):
            raise DataError(f"{path}: two columns have the same name, in the first line")
        number = start + reader.line_num
        for cells in reader:
            if not any(map(str.strip, cells)):
                pass
            elif len(cells) == len(names):
                filled = {name: cell for name, cell in zip(names, cells, strict=True) if name and cell}
                yield Row(str(path), number, filled)
            else:
                fault = f"the row has {len(cells)} cells, the first line {len(names)}"
                yield Row(str(path), number, None, fault, separator.join(cells).encode())
            number = start + reader.line_num


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed if necessary.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb") as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8; save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(
            f"{path} cannot be read as a table: {error_text(error)}; a text with quotation marks, separators "
            "or line breaks must stand in quotation marks, and those in it be doubled"
        ) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error_text(error)}") from error


def _full_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers; of an oversized line, only the start."""
    number = 0
    while line := stream.readline(_LONGEST_LINE + 1):
        number += 1
        # Some editors write a byte-order mark at the start of a file.
        raw = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
        if raw:
            yield number, raw
        while len(line) > _LONGEST_LINE and not line.endswith(b"\n"):
            line = stream.readline(_LONGEST_LINE + 1)


def _decoded(raw: bytes, source: str, number: int) -> Row:
    value = None
    fault = None
    try:
        if len(raw) > _LONGEST_LINE:
            fault = f"the line is longer than {_LONGEST_LINE:,} bytes"
        else:
            value = json.loads(raw.decode("utf-8"))
            # JSON lines contain objects or conversations; bare strings are only accepted in Python lists.
            fault = None if isinstance(value, dict) or is_conversation(value) else "not a JSON object"
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        fault = f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    except (ValueError, RecursionError):
        fault = "JSON that cannot be read: a number is too long, or the nesting too deep"
    return Row(source, number, value, fault, raw)
