"""Data sources: a file, a folder, a hub data set, a list of rows, or several of these."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kedge.data.memory_limit import within_free_memory
from kedge.data.rows import Row, check_row_count, json_rows, listed_rows, parquet_rows
from kedge.data.tables import table_rows
from kedge.errors import DataError
from kedge.texts import pointer_fault

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Source", "Sources", "numbered_rows", "rows_of"]

_READERS = {".jsonl": json_rows, ".ndjson": json_rows, ".json": json_rows, ".parquet": parquet_rows}
# Without .json: in a folder of data files, .json files hold metadata.
_FOLDER_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
_SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")

# name, name:split or name:config:split; a split may be a slice, `train[:1000]`.
_NAME = re.compile(r"(?P<name>[^:]+)(?::(?:(?P<config>[^:\[\]]+):)?(?P<split>[^:\[\]]+(?:\[.*\])?))?")
_HUB_ID = re.compile(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*(:\S+)?")


@dataclass(frozen=True)
class Sources:
    """Names of files, folders or hub data sets, read in order; marks strings as names rather than texts."""

    names: tuple[str, ...]


Source: TypeAlias = "str | os.PathLike[str] | Sources | Iterable[Any]"


def rows_of(source: Source) -> Iterator[Row]:
    """The rows of a source, in order.

    Args:
        source: one of

            - a `.jsonl`, `.json` or `.parquet` file;
            - a folder that `datasets` saved, or that holds such files; `folder:split` takes those of one split;
            - a Hugging Face id: `org/name`, `org/name:split` (default `train`), `org/name:config:split`;
            - rows: a list (or any iterable) of mappings or texts, a `DatasetDict` or a DataFrame;
            - a list of the first three. A list of strings counts as names if each string is an existing file or looks
              like a file or like `org/name`; `Sources` makes it explicit.

    Raises:
        DataError: The source does not exist or cannot be read.
    """
    if isinstance(source, (str, os.PathLike)):
        return _named_rows(os.fspath(source))
    if isinstance(source, Sources):
        return chain.from_iterable(_named_rows(name) for name in source.names)
    if isinstance(source, (list, tuple)) and source and all(_is_source_name(entry) for entry in source):
        return chain.from_iterable(_named_rows(os.fspath(entry)) for entry in source)
    return listed_rows(table_rows(source, "the data"))


def numbered_rows(source: Source) -> Iterator[tuple[int, Row]]:
    """The rows of a source, each with the index of its name among several `Sources`; arguments as in `rows_of`."""
    parts = [Sources((name,)) for name in source.names] if isinstance(source, Sources) else [source]
    return ((index, row) for index, part in enumerate(parts) for row in rows_of(part))


def _is_source_name(entry: object) -> bool:
    if isinstance(entry, os.PathLike):
        return True
    if not isinstance(entry, str) or any(character.isspace() for character in entry):
        return False
    return Path(entry).suffix in _READERS or os.path.exists(entry) or _HUB_ID.fullmatch(entry) is not None


def _named_rows(name: str) -> Iterator[Row]:
    # Opened lazily, with the first row, so that the memory limit covers opening as well.
    return within_free_memory(chain.from_iterable(map(_open_rows, (name,))), name)


def _open_rows(name: str) -> Iterator[Row]:
    if os.path.isfile(name):
        return _file_rows(Path(name))
    if os.path.isdir(name):
        return _folder_rows(Path(name), None)
    if os.path.exists(name):
        raise DataError(f"{name} is neither a file nor a folder")
    match = _NAME.fullmatch(name)
    if match is None:
        raise DataError(f"{name!r} is not a data source: no such file, and not of the form org/name:split")
    folder, config, split = match["name"], match["config"], match["split"]
    if os.path.isdir(folder) and config is None:
        return _folder_rows(Path(folder), split)
    if _looks_like_path(folder):
        raise DataError(f"{name}: no such file or folder")
    return _hub_rows(name, folder, config, split or "train")


def _looks_like_path(name: str) -> bool:
    return Path(name).suffix in _READERS or name.startswith((".", "~", os.sep)) or name.count("/") > 1


def _file_rows(path: Path) -> Iterator[Row]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path} has an unsupported file type; supported: {', '.join(_READERS)}")
    if (fault := pointer_fault(path)) is not None:
        raise DataError(fault)
    return reader(path)


def _folder_rows(folder: Path, split: str | None) -> Iterator[Row]:
    if any(os.path.exists(folder / file) for file in _SAVED_DATASET_FILES):
        return _saved_rows(folder, split)
    files = sorted(path for path in folder.rglob("*") if path.suffix in _FOLDER_SUFFIXES and os.path.isfile(path))
    chosen = [path for path in files if _belongs(path, split or "train")]
    if split is None and not chosen:
        chosen = files
    if not chosen:
        wanted = f"for the split {split!r} " if split else ""
        raise DataError(f"{folder} holds no {', '.join(_FOLDER_SUFFIXES)} file {wanted}and no saved data set")
    return chain.from_iterable(_file_rows(path) for path in chosen)


def _belongs(path: Path, split: str) -> bool:
    """Whether a file is `train.jsonl`, or a shard like `train-00000-of-00002.parquet`."""
    return re.fullmatch(rf"{re.escape(split)}([-_.].*)?", path.stem) is not None


def _saved_rows(folder: Path, split: str | None) -> Iterator[Row]:
    import datasets  # slow to import, and only these sources need it

    try:
        saved = datasets.load_from_disk(str(folder))
    except MemoryError:
        raise
    except Exception as error:  # damaged files raise errors of several libraries
        raise DataError(f"{folder} cannot be read as a saved data set: {' '.join(str(error).split())[:300]}") from error
    if isinstance(saved, datasets.Dataset):
        if split is not None:
            raise DataError(f"{folder} is a data set without splits: remove :{split}")
        return _dataset_rows(saved, folder, str(folder))
    splits = list(map(str, saved))
    chosen = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if chosen not in splits:
        choice = f"; name one, e.g. {folder}:{splits[0]}" if splits else ""
        raise DataError(f"{folder} has no split {chosen!r}; it has {', '.join(splits) or 'none'}{choice}")
    return _dataset_rows(saved[chosen], folder, f"{folder}:{chosen}")


def _dataset_rows(dataset: Dataset, folder: Path, name: str) -> Iterator[Row]:
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*.arrow"))
    check_row_count(name, num_rows=len(dataset), num_bytes=num_bytes)
    return _iterate_rows(dataset, name)


def _iterate_rows(dataset: Iterable[Any], name: str) -> Iterator[Row]:
    """Rows read from disk one by one, each of which may be damaged."""
    try:
        yield from listed_rows(dataset, name)
    except MemoryError:
        raise
    except Exception as error:  # damaged Arrow files raise even SystemError
        raise DataError(f"{name} cannot be read completely: {' '.join(str(error).split())[:300]}") from error


def _hub_rows(name: str, repository: str, config: str | None, split: str) -> Iterator[Row]:
    from kedge.hub import hub_fault  # slow to import, like datasets

    if (fault := hub_fault(repository, "dataset")) is not None:
        raise DataError(f"{name!r}: no such file or folder; {fault}")
    import datasets

    try:
        dataset = datasets.load_dataset(repository, config, split=split)
    except Exception as error:  # as for saved data sets, and network errors
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{name!r} is not a local file and cannot be read from the Hugging Face Hub: {reason}"
        ) from error
    return _iterate_rows(dataset, name)
