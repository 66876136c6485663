"""Finds the rows of files, folders, hub data sets and Python tables."""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from kedge.data.records import Row, check_row_count, listed_rows, one_line_errors, parquet_rows, table_rows
from kedge.data.text_files import COMPRESSIONS, csv_rows, json_rows
from kedge_base.errors import DataError
from kedge_base.generated import PREFIX, open_entry, open_task
from kedge_base.machine.memory import free_memory, memory_limit, private_memory
from kedge_base.texts import IN_MEMORY, pointer_fault

_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    **{".jsonl": json_rows, ".ndjson": json_rows, ".json": json_rows, ".parquet": parquet_rows},
    **{".csv": csv_rows, ".tsv": csv_rows},
}
# Not .json, which contains metadata in a folder of data files; .csv, which may contain metadata, is the second choice.
_FOLDER_FORMATS = ((".jsonl", ".ndjson", ".parquet"), (".csv", ".tsv"))
_SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")

# name, name:split or name:config:split; a split may be a slice, `train[:1000]`.
_NAME = re.compile(r"(?P<name>[^:]+)(?::(?:(?P<config>[^:\[\]]+):)?(?P<split>[^:\[\]]+(?:\[.*\])?))?")

# Misnamed files: how their content starts, and the correct suffixes.
_MISNAMED = {
    (b"<!doctype html", ()): "a web page, not the data: download the file itself",
    (b"<html", ()): "a web page, not the data: download the file itself",
    (b"par1", (".parquet",)): "a Parquet file; name it .parquet",
    (b"\x1f\x8b", (".gz",)): "compressed by gzip; name it .gz",
    (b"pk\x03\x04", ()): "an archive; unpack it",
    (b"\xff\xfe", ()): "UTF-16; save it as UTF-8",
}
_SHARD = re.compile(r"[-_.]?\d+(-of-\d+)?([-_.][0-9a-f]{8,})?$")
_COPY = re.compile(r"(-checkpoint| ?\(\d+\)|[ _-]+copy( ?\(?\d+\)?)?|\.bak|\.old)(?=\.\w+)", re.IGNORECASE)
_SPLIT = re.compile(r"(?<![a-z])(train(ing)?|test|valid(ation)?|val|dev|eval(uation)?)(?![a-z])", re.IGNORECASE)

_HUB_ID = re.compile(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*(:\S+)?")


@dataclass(frozen=True)
class Sources:
    """Names of files, folders or hub data sets, read in order; marks strings as names instead of texts."""

    names: tuple[str, ...]


Source: TypeAlias = "str | os.PathLike[str] | Sources | Iterable[Any]"


def rows_of(source: Source) -> Iterator[Row]:
    """The rows of a source, in order.

    Args:
        source: one of

            - a `.jsonl`, `.json`, `.parquet`, `.csv` or `.tsv` file; texts also compressed;
            - a folder that `datasets` saved, or with such files; `folder:split` takes the files of one split;
            - a task of reasoning-gym: `reasoning-gym:NAME,size=…,seed=…`;
            - a Hugging Face id: `org/name`, `org/name:split` (default `train`), `org/name:config:split`;
            - rows: a list (or any iterable) of mappings or texts, a `DatasetDict` or a DataFrame;
            - a list of the first four. A list of strings counts as names if each string is an existing file or looks
              like a file or like `org/name`; `Sources` makes it explicit.

    Raises:
        DataError: The source does not exist or cannot be read.
    """
    return (row for _, row in numbered_rows(source))


def numbered_rows(source: Source) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a source, each with the index of its name; arguments and errors as in `rows_of`."""
    if isinstance(source, Sources):
        names: Iterable[Any] = source.names
    elif isinstance(source, (str, os.PathLike)):
        names = [source]
    elif isinstance(source, (list, tuple)) and source and all(_is_source_name(entry) for entry in source):
        names = source
    else:
        return ((0, row) for row in listed_rows(table_rows(source, "the data")))
    named = map(os.path.expanduser, names)
    # Opened lazily, with the first row, so that the memory limit also covers opening.
    opened = (within_free_memory(chain.from_iterable(map(_open_rows, (name,))), name) for name in named)
    return ((index, row) for index, rows in enumerate(opened) for row in rows)


def _is_source_name(entry: object) -> bool:
    if isinstance(entry, os.PathLike):
        return True
    if not isinstance(entry, str) or any(character.isspace() for character in entry):
        return False
    return (
        entry.startswith(PREFIX)
        or _format(entry) in _READERS
        or os.path.exists(os.path.expanduser(entry))
        or _HUB_ID.fullmatch(entry) is not None
    )


def _open_rows(name: str) -> Iterator[Row]:
    if name == IN_MEMORY:
        raise DataError(f"{name} is data that was passed from Python, or as text; pass it again, or name its file")
    if name.startswith(PREFIX):
        return listed_rows(_generated_rows(name), name)
    if os.path.isfile(name):
        return _file_rows(Path(name))
    if os.path.isdir(name):
        return _folder_rows(Path(name), None)
    if os.path.exists(name):
        raise DataError(f"{name} is neither a file nor a folder")
    match = _NAME.fullmatch(name)
    if match is None:
        raise DataError(
            f"{name!r} is not a data source: no such file, and not of the form org/name:split{_text_advice(name)}"
        )
    folder = match["name"]
    config = match["config"]
    split = match["split"]
    if os.path.isdir(folder) and config is None:
        return _folder_rows(Path(folder), split)
    if _looks_like_path(folder):
        raise DataError(f"{name}: no such file or folder{_text_advice(name)}")
    return _hub_rows(name, folder, config, split or "train")


def _generated_rows(source: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a generated source, with the errors of `open_task`. A verifier finds a row by its `entry`."""
    for index in range(len(open_task(source))):
        entry = open_entry(source, index)
        yield {"question": entry["question"], "answer": str(entry["answer"]), "entry": f"{source}#{index}"}


def _text_advice(name: str) -> str:
    """Advice for a name that was meant as a prompt's text."""
    return (
        ""
        if _format(name) in _READERS or re.fullmatch(r"[\w./:~-]*", name)
        else "; for a text, pass a list, in Python: prompts=[…]"
    )


def _looks_like_path(name: str) -> bool:
    return _format(name) in _READERS or name.startswith((".", "~", os.sep)) or name.count("/") > 1


def _format(name: str | os.PathLike[str]) -> str:
    """Return the suffix that determines a file's format, such as `.jsonl` for `rows.jsonl.gz`."""
    path = Path(name)
    return Path(path.stem if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()


def is_data_file(path: Path) -> bool:
    """True if a file's name makes it part of a folder of data, or of a saved data set."""
    return _format(path) in (*chain.from_iterable(_FOLDER_FORMATS), ".arrow")


def _file_rows(path: Path) -> Iterator[Row]:
    reader = _READERS.get(_format(path))
    if reader is None:
        compressed = ", ".join(COMPRESSIONS)
        raise DataError(
            f"{path} has an unsupported file type; supported: {', '.join(_READERS)}; texts also as {compressed}; "
            'each prompt of a text file as a JSON line: {"prompt": "…"}'
        )
    _check_start(path)
    return reader(path)


def _check_start(path: Path) -> None:
    """Reject a file whose content does not match its name, such as a pointer to the data."""
    if (fault := pointer_fault(path)) is not None:
        raise DataError(fault)
    start = _start_of(path).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for (first, ends), kind in _MISNAMED.items():
        if start.startswith(first) and not path.name.lower().endswith(ends):
            raise DataError(f"{path} is {kind}")


def _start_of(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(1024)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _folder_rows(folder: Path, split: str | None) -> Iterator[Row]:
    if any(os.path.exists(folder / file) for file in _SAVED_DATASET_FILES):
        return _saved_rows(folder, split)
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if os.path.isfile(path)]
    files = [path for path in files if not any(part.startswith(".") for part in path.parts)]
    found = next(filter(None, ([path for path in files if _format(path) in kinds] for kinds in _FOLDER_FORMATS)), [])
    splits = {path: _split_of(path) for path in found}
    chosen = _of_split(splits, split)
    if not chosen:
        wanted = f"for the split {split!r} " if split else ""
        named = f"; it has {', '.join(sorted(set(splits.values())))}" if splits else ""
        json = next((f"; name the file: {folder / path}" for path in files if _format(path) == ".json"), "")
        formats = ", ".join(chain.from_iterable(_FOLDER_FORMATS))
        raise DataError(f"{folder} holds no {formats} file {wanted}and no saved data set{named or json}")
    _check_configurations(folder, sorted({path.parent for path in chosen}))
    _check_copies(folder, chosen)
    names = sorted({splits[path] for path in chosen})
    # Files with the same name form a split; files with several names are only read together if none is named like a
    # split.
    if len(names) > 1 and any(_SPLIT.search(splits[path]) or "-of-" in path.name for path in chosen):
        raise DataError(f"{folder} has several splits ({', '.join(names)}); name one, e.g. {folder}:{names[0]}")
    copies = {(path.parent, splits[path], _format(path)) for path in chosen}
    if len(copies) > len({copy[:2] for copy in copies}):
        kinds = ", ".join(sorted({copy[2] for copy in copies}))
        raise DataError(f"{folder} has the same names as {kinds}, which may be copies; name one of the files")
    return chain.from_iterable(_file_rows(folder / path) for path in chosen)


def _check_copies(folder: Path, paths: Sequence[Path]) -> None:
    """Reject files that are copies of others, by content or by the names that file managers and Jupyter give copies."""
    alike: dict[tuple[int, bytes], list[Path]] = {}  # many files of a folder may have the same size
    for path in paths:
        whole = folder / path
        alike.setdefault((os.path.getsize(whole), _start_of(whole)), []).append(path)
    twins = (twin for (size, _), same in alike.items() if size for twin in combinations(same, 2))
    pairs = [twin for twin in twins if filecmp.cmp(*map(folder.joinpath, twin), shallow=False)]
    pairs += [
        (first, path)
        for path in paths
        if (first := path.with_name(_COPY.sub("", path.name))) != path and first in paths
    ]
    if pairs:
        first, second = pairs[0]
        raise DataError(f"{folder}: {second} looks like a copy of {first}; remove it, or name the files to read")


def _check_configurations(folder: Path, parents: list[Path]) -> None:
    """Reject files from several folders that the README lists as configurations, since those are separate data sets."""
    readme = folder / "README.md"
    if len(parents) < 2 or not readme.is_file():
        return
    header = readme.read_bytes()[:100_000].decode("utf-8", "replace").split("\n---", maxsplit=1)[0]
    names = re.findall(r"config_name:\s*[\"']?([^\s\"']+)", header)
    if header.startswith("---") and len(set(names)) > 1:
        raise DataError(
            f"{folder} has several configurations ({', '.join(names)}); name the folder "
            f"of one, e.g. {folder / parents[0]}"
        )


def _split_of(path: Path) -> str:
    """Return the split of a file: its name without a shard number, or a folder named like a split.

    `train-00000-of-00002.parquet` and `train/0001.jsonl` belong to `train`.
    """
    while path.suffix.lower() in (*COMPRESSIONS, *_READERS):
        path = path.with_suffix("")
    stem = _SHARD.sub("", path.name)
    return next((name for name in (stem, *reversed(path.parts[:-1])) if _SPLIT.search(name)), stem)


def _of_split(splits: Mapping[Path, str], split: str | None) -> list[Path]:
    """Select the files of a split; by default those of the training split, else those of no split, else all."""
    if split is not None:
        named = re.compile(rf"{re.escape(split)}([-_.].*)?")
        same = [path for path, name in splits.items() if name == split]
        return same or [path for path, name in splits.items() if named.fullmatch(name)]
    kinds = {path: match[0].lower() if (match := _SPLIT.search(name)) else "" for path, name in splits.items()}
    train = [path for path, kind in kinds.items() if kind.startswith("train")]
    return train or [path for path, kind in kinds.items() if not kind] or list(splits)


def _saved_rows(folder: Path, split: str | None) -> Iterator[Row]:
    import datasets  # slow to import, and only these sources need it

    arrow_files = list(folder.rglob("*.arrow"))
    for path in arrow_files:
        _check_start(path)
    with one_line_errors(lambda: f"{folder} cannot be read as a saved data set"):
        saved = datasets.load_from_disk(str(folder))
    name = str(folder)
    if isinstance(saved, datasets.Dataset):
        if split is not None:
            raise DataError(f"{folder} is a data set without splits: remove :{split}")
    else:
        splits = list(map(str, saved))
        chosen = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if chosen not in splits:
            choice = f"; name one, e.g. {folder}:{splits[0]}" if splits else ""
            raise DataError(f"{folder} has no split {chosen!r}; it has {', '.join(splits) or 'none'}{choice}")
        saved = saved[chosen]
        name = f"{folder}:{chosen}"
    check_row_count(name, num_rows=len(saved), num_bytes=sum(path.stat().st_size for path in arrow_files))
    return listed_rows(saved, name, " completely")


def _hub_rows(name: str, repository: str, config: str | None, split: str) -> Iterator[Row]:
    from kedge.downloads import hub_fault  # slow to import, like datasets

    if (fault := hub_fault(repository, "dataset")) is not None:
        raise DataError(f"{name!r}: no such file or folder; {fault}{_text_advice(name)}")
    import datasets

    with one_line_errors(lambda: f"{name!r} is not a local file and cannot be read from the Hugging Face Hub"):
        dataset = datasets.load_dataset(repository, config, split=split)
    return listed_rows(dataset, name, " completely")


T = TypeVar("T")

GIB = 2**30
SHARE = 0.9
"""Share of the free memory that one source may use, so that the machine keeps running."""

AT_ONCE = 8
"""Rows read each time the limit is set, since setting it takes longer than reading a row."""


def within_free_memory(rows: Iterable[T], name: str) -> Iterator[T]:
    """Yield the rows of a source as long as they and the resulting records fit into the free memory.

    A small file may expand beyond any machine's memory, by compression or a million references to one long text.

    Raises:
        DataError: The next rows do not fit.
    """
    free = int(SHARE * free_memory())
    most = private_memory() + free
    iterator = iter(rows)
    count = 0
    while True:
        try:
            with memory_limit(most):
                few = list(islice(iterator, AT_ONCE))
        except MemoryError as error:
            room = f"the {free / GIB:.2f} GiB of free memory"
            raise DataError(f"{name}: reading past row {count:,} needs more than {room}") from error
        if not few:
            return
        count += len(few)
        yield from few
