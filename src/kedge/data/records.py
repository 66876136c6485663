"""Records that stages train on, raw rows of files and lists, and unusable rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import Repr
from typing import Any, Generic, TypeVar

from kedge_base.errors import DataError
from kedge_base.run_folder.output import writing
from kedge_base.texts import error_text


@dataclass(frozen=True)
class Demonstration:
    """An answer to imitate.

    Attributes:
        prompt: the text before the answer; empty for plain text, where the whole text is the completion.
        completion: the text that the loss covers, without the end-of-sequence token that follows it.
        read: ranges of `completion`, in characters, that the loss does not cover: other messages between the answers.
    """

    prompt: str
    completion: str
    read: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt, one of them preferred.

    Attributes:
        prompt: the text before both answers.
        chosen: the better answer.
        rejected: the worse answer.
        margin: how far the chosen answer's score should exceed the other, in units of the score; None for no margin.
    """

    prompt: str
    chosen: str
    rejected: str
    margin: float | None = None


@dataclass(frozen=True)
class Ranking:
    """K answers to one prompt, ranked.

    Attributes:
        prompt: the text before all answers.
        responses: the answers, at least two.
        ranks: one per answer; a smaller rank is better, equal ranks are ties.
    """

    prompt: str
    responses: tuple[str, ...]
    ranks: tuple[float, ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt to sample responses to.

    Attributes:
        text: the text that the policy continues.
        columns: the row's other fields, passed to reward functions.
        absent: names of columns that only other rows have, and that are None in this one.
        place: its file and line, or its row.
    """

    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    absent: Collection[str] = ()
    place: str = field(default="a prompt", compare=False)

    @property
    def row(self) -> dict[str, Any]:
        """The row as it was read, except that `prompt` is what the policy reads."""
        read = {name: value for name, value in self.columns.items() if name not in self.absent}
        return {**read, "prompt": self.text}


_DEEPEST = 16
"""Depth to which a value is searched for arrays; in the contents of messages, they are four levels deep."""


def table_rows(data: Any, name: str) -> Iterable[Any]:
    """Return the rows of a table passed from Python; any other iterable is returned unchanged.

    Args:
        data: a list of rows, a `Dataset`, an `IterableDataset`, a `DatasetDict` (its split `train`, or its only one) or
            a DataFrame or Arrow table; of a pandas DataFrame, missing values are left out of their rows.
        name: its name in errors.

    Raises:
        DataError: The data is not a table, or has several splits but no `train`.
    """
    if isinstance(data, Mapping) and type(data).__name__ in ("DatasetDict", "IterableDatasetDict"):
        splits = list(data)
        if "train" in data or len(splits) == 1:
            return data["train" if "train" in data else splits[0]]
        raise DataError(f"{name} has several splits ({', '.join(map(str, splits))}); pass one of them")
    if not isinstance(data, Mapping) and hasattr(data, "columns"):
        if type(data).__module__.partition(".")[0] == "pandas":
            rows: list[dict[str, Any]] = data.to_dict("records")
            return [{key: value for key, value in row.items() if not is_missing(value)} for row in rows]
        for method in ("to_dicts", "to_pylist"):  # polars, Arrow
            if hasattr(data, method):
                return getattr(data, method)()
    if isinstance(data, (Mapping, str)) or not isinstance(data, Iterable):
        raise DataError(
            f"{name} must be a file, a hub id, a list of rows, a Dataset or a DataFrame, not {type(data).__name__}"
        )
    return data


def plain_value(value: Any, deepest: int = _DEEPEST) -> Any:
    """Convert arrays and tensors in a value to lists, and their scalars to numbers.

    DataFrames read from Parquet, and formatted data sets, store lists as arrays.
    """
    if not deepest:
        return value
    if hasattr(value, "tolist"):
        return plain_value(value.tolist(), deepest - 1)
    if isinstance(value, dict):
        return {key: plain_value(entry, deepest - 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (str, int, float)):
        return [plain_value(entry, deepest - 1) for entry in value]
    return value


def is_missing(value: object) -> bool:
    """True for a missing value: null, or a table's substitute for it (NaN, NaT, NA)."""
    return (
        value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    )


_PARQUET_BATCH = 256

# Equal rows need almost no space in a columnar file, but more rows per byte than this are implausible.
_MOST_ROWS_PER_BYTE = 100
_ANY_FILES_ROWS = 1_000_000
# A text that all rows share is stored once. Compression makes real texts five to ten times shorter.
_MOST_BYTES_PER_BYTE = 1000
_ANY_FILES_BYTES = 2**28

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


@contextmanager
def one_line_errors(fault: Callable[[], str]) -> Iterator[None]:
    """Turn every error of a library into one line: damaged files raise even SystemError.

    Args:
        fault: The action that failed.

    Raises:
        DataError: Anything else was raised, other than a lack of memory.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{fault()}: {error_text(error)}") from error


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file.

    Raises:
        DataError: The file cannot be read as Parquet, or its row count or the size of its rows is implausible.
    """
    return listed_rows(_parquet_values(path), str(path), " as Parquet")


def _parquet_values(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile  # slow to import, and rarely needed

    num_rows = 0
    read = 0
    size = path.stat().st_size
    with ParquetFile(path) as table:
        check_row_count(str(path), num_rows=table.metadata.num_rows, num_bytes=size)
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH):
            num_rows += len(batch)
            read += sum(map(_decoded_size, batch.columns))
            if read > max(_ANY_FILES_BYTES, _MOST_BYTES_PER_BYTE * size):
                raise DataError(
                    f"{path} has {size:,} bytes, and its first {num_rows:,} rows {read:,}, which is implausible"
                )
            yield from batch.to_pylist()


def _decoded_size(column: Any) -> int:
    """Bytes of a column's values, counting repeated values each time."""
    return (column.dictionary_decode() if hasattr(column, "dictionary_decode") else column).nbytes


def check_row_count(name: str, *, num_rows: int, num_bytes: int) -> None:
    """Reject a file with an implausible row count: a few bytes can encode "the same row, a billion times".

    Raises:
        DataError: The row count is implausible.
    """
    if num_rows > max(_ANY_FILES_ROWS, _MOST_ROWS_PER_BYTE * num_bytes):
        raise DataError(f"{name} claims to hold {num_rows:,} rows in {num_bytes:,} bytes, which is implausible")


def listed_rows(values: Iterable[Any], source: str = "list", kind: str = "") -> Iterator[Row]:
    """Yield the entries of a list or any other iterable as rows.

    Args:
        values: the entries.
        source: their file, data set or list, as the user named it.
        kind: how it is read, for error messages.

    Raises:
        DataError: An entry cannot be read.
    """
    number = 0
    with one_line_errors(lambda: f"{source} cannot be read{kind} after row {number}"):
        for number, value in enumerate(values, start=1):
            yield Row(source, number, plain_value(value))


RecordT = TypeVar("RecordT")


class RowError(ValueError):
    """The reason why a row cannot be used; the reader turns it into a `Rejection`.

    Args:
        reason: The fault of this row.
        kind: The reason without details of the row; rows are counted by it. By default, the part of `reason` before the
            first detail, without numbers.
    """

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind or _kind_of(reason)


@dataclass(frozen=True)
class Rejection:
    """An unusable row.

    Attributes:
        source: the file, data set or list that contains it.
        line: its line or row number, counted from 1.
        reason: its fault.
        preview: its first characters, safe to print.
        kind: the reason without parts that differ between rows; rows are counted by it.
    """

    source: str
    line: int
    reason: str
    preview: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Table(Generic[RecordT]):
    """The content of a source.

    Attributes:
        records: the usable rows, in order.
        rejected: the unusable rows.
        num_cut: usable rows with a part that was cut to fit.
        origins: index of each usable row's source among the names in `Sources`; 0 for any other source.
        notes: further facts for the line about the data.
        labels: index of each usable row that people labeled, and what its column `label` says of the answer.
    """

    records: list[RecordT]
    rejected: list[Rejection]
    num_cut: int = 0
    origins: list[int] = field(default_factory=list)
    notes: Sequence[str] = ()
    labels: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of rows, usable or not."""
        return len(self.records) + len(self.rejected)

    @property
    def rejected_share(self) -> float:
        """Share of the rows that are unusable."""
        return len(self.rejected) / self.num_rows

    def limit_exceeded(self, share: float) -> str:
        """Say which share of the rows may be unusable if more are; empty otherwise."""
        return f"data.max_rejected_fraction={share:g} allows {share:.1%}" if self.rejected_share > share else ""

    def dropped(self) -> dict[str, int]:
        """Number of unusable rows by reason, most frequent first."""
        return dict(Counter(rejection.kind or rejection.reason for rejection in self.rejected).most_common())


def write_rejections(path: Path, rejections: Sequence[Rejection]) -> None:
    """Append rejections to a JSON-lines file: `file`, `line`, `reason`, `preview`. An empty list writes nothing.

    Raises:
        OutputError: The file or its folder cannot be written.
    """
    if not rejections:
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            for entry in rejections:
                row = {"file": entry.source, "line": entry.line, "reason": entry.reason, "preview": entry.preview}
                stream.write(json.dumps(row) + "\n")


def hint_of(kind: str) -> str:
    """Suggest a setting that may make rows rejected for this reason usable."""
    if missing := re.fullmatch(r"field '(?!role'|content'|from'|value')(\w+)' is missing", kind):
        return f"; data.columns.{missing[1]}=… names a column that holds it"
    if limit := re.search(r"(.*) longer than (?:data\.)?(max_\w+)=\d+$", kind):
        cut = {"answer alone": "; data.truncate cuts answers of comparisons", "text": ""}.get(
            limit[1], "; data.truncate cuts prompts"
        )
        return f"; the limit is data.{limit[2]}, or the model's context{cut}"
    if kind.startswith("all entries of 'ranks' are equal"):
        return "; reward_model.ties=davidson learns from ties"
    return ""


def _kind_of(reason: str) -> str:
    """`field 'x' is missing (the row has 'y')` → `field 'x' is missing`; `3 responses …` → `N responses …`."""
    return re.sub(r"\d[\d,]*", "N", re.split(r": | \(|, expected ", reason, maxsplit=1)[0])
