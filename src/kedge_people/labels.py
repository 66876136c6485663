"""A folder of labels: what is asked, who answered what, and the data sets that `kedge reward` and `kedge sft` read.

    items.jsonl ─▶ asked ─▶ answers.jsonl (only ever added to) ─▶ comparisons.jsonl, demonstrations.jsonl

An answer is on the disk before anything else uses it. To undo or change an answer, another one replaces it; to
withdraw a person's answers, a line says so. Both data sets are rewritten from the answers that count.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from kedge_base.errors import DataError
from kedge_base.machine.durable import sync, sync_folder
from kedge_base.run_folder.output import replace_file, writing
from kedge_base.run_folder.record_format import read_json_lines

ITEMS_FILE = "items.jsonl"
ANSWERS_FILE = "answers.jsonl"
COMPARISONS_FILE = "comparisons.jsonl"
DEMONSTRATIONS_FILE = "demonstrations.jsonl"

Verdict: TypeAlias = Literal["ranked", "bad", "skipped"]
"""The responses were ranked, are all bad, or were not judged."""

_Parsed = TypeVar("_Parsed")
_adapter = cache(TypeAdapter)  # building one takes a millisecond


@dataclass(frozen=True)
class Item:
    """A prompt with responses to judge.

    Attributes:
        id: A name that is unique in the folder.
        prompt: A text, or the messages of a conversation.
        responses: One or more.
        models: Who wrote each response; people do not see it.
        columns: Other columns of the prompt that a template needs, such as `post`.
    """

    id: str
    prompt: str | list[dict[str, str]]
    responses: tuple[str, ...]
    models: tuple[str, ...]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Answer:
    """A person's answer to an item. Every list has one entry per response, in the order of the item.

    Attributes:
        id: A name that is unique in the folder.
        item: The item's id.
        person: Who answered.
        when: The time in UTC, ISO 8601.
        seconds: Time from the display of the item to the answer.
        order: The responses in the order shown, by their place in the item.
        verdict: Whether the responses were ranked.
        ranks: 1 is the best, equal ranks are a tie; empty unless ranked.
        axes: Grades per axis, such as Stiennon's four from 1 to 7; None for a response without a grade.
        thumbs: 1 for up, −1 for down, 0 for none; empty without thumbs.
        edits: Corrected texts; None for a response that was not corrected; empty without corrections.
        note: A remark.
        replaces: The answer that this one replaces; None for a first one. A skip that replaces one undoes it and
            does not count.
    """

    id: str
    item: str
    person: str
    when: str
    seconds: float
    order: tuple[int, ...]
    verdict: Verdict
    ranks: tuple[int | float, ...] = ()
    axes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict[str, "tuple[int | None, ...]"])
    thumbs: tuple[int, ...] = ()
    edits: tuple[str | None, ...] = ()
    note: str = ""
    replaces: str | None = None

    def count_in(self, answers: dict[str, Answer]) -> None:
        """Add this answer to those that count, by id, instead of the one that it replaces."""
        answers.pop(self.replaces or "", None)
        if self.replaces is None or self.verdict != "skipped" or any(self.edits) or any(self.thumbs):
            answers[self.id] = self


@dataclass(frozen=True)
class Labels:
    """The contents of a folder.

    Attributes:
        items: All items by id, in order.
        answers: The answers that count, in order: neither replaced nor undone nor withdrawn.
    """

    items: Mapping[str, Item]
    answers: Sequence[Answer]


class AnswerFile:
    """Adds answers to a folder's file, each on the disk before `add` returns; one process at a time may hold it.

    Raises:
        DataError: Another process has it open.
        OutputError: The file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ANSWERS_FILE
        self._lock = threading.Lock()
        with writing(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _hold(self._file, self._path)
            # A kill or a power failure can leave an incomplete last line, which was never confirmed.
            os.ftruncate(self._file, self._path.read_bytes().rfind(b"\n") + 1)
            sync(self._file)
            sync_folder(folder)

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, answer: Answer) -> None:
        """Add an answer."""
        self._write(asdict(answer))

    def withdraw(self, person: str, when: str) -> None:
        """Withdraw all of a person's answers up to now."""
        self._write({"withdrawn": person, "when": when})

    def _write(self, line: Mapping[str, Any]) -> None:
        text = _line(line)
        with self._lock, writing(self._path):
            size = os.fstat(self._file).st_size
            try:
                while text:
                    text = text[os.write(self._file, text) :]
                sync(self._file)
            except BaseException:  # a full disk; re-raised
                os.ftruncate(self._file, size)
                raise


def read_labels(folder: Path) -> Labels:
    """Read a folder of labels.

    Raises:
        DataError: It is no such folder, or a line is damaged.
    """
    path = folder / ITEMS_FILE
    read = (parsed(row, Item, f"{path}, line {number}: ") for number, row in enumerate(read_json_lines(path), 1))
    items = {item.id: item for item in read}
    path = folder / ANSWERS_FILE
    answers: dict[str, Answer] = {}
    for number, row in enumerate(read_json_lines(path) if path.is_file() else [], 1):
        if "withdrawn" in row:
            answers = {name: each for name, each in answers.items() if each.person != row["withdrawn"]}
            continue
        place = f"{path}, line {number}: "
        answer = parsed(row, Answer, place)
        if answer.item not in items:
            raise DataError(f"{place}no item has the id {answer.item!r}")
        if fault := _size_fault(answer, len(items[answer.item].responses)):
            raise DataError(f"{place}{fault}")
        answer.count_in(answers)
    return Labels(items, list(answers.values()))


def write_items(folder: Path, items: Iterable[Item]) -> None:
    """Write the items of a folder, atomically."""
    replace_file(folder / ITEMS_FILE, map(_line, map(asdict, items)))


def write_data_sets(folder: Path) -> Labels:
    """Rewrite both data sets, atomically.

    Returns:
        The labels that they were made from.
    """
    labels = read_labels(folder)
    replace_file(folder / COMPARISONS_FILE, map(_line, comparisons(labels)))
    replace_file(folder / DEMONSTRATIONS_FILE, map(_line, demonstrations(labels)))
    return labels


def comparisons(labels: Labels) -> Iterator[dict[str, Any]]:
    """Yield the rows of the answers as rankings of two or more responses, ties included.

    A correction is better than the response that it corrects, and a thumb up than a thumb down, unless the answer also
    ranks them. The column `label` says where each comes from.
    """
    for answer in labels.answers:
        item = labels.items[answer.item]
        is_ranking = answer.verdict == "ranked" and len(answer.ranks) > 1
        if is_ranking:
            yield _row(item, answer, {"responses": list(item.responses), "ranks": list(answer.ranks)})
        for text, edited in zip(item.responses, answer.edits, strict=False):
            if edited is not None and edited != text:
                yield _row(item, answer, {"responses": [edited, text], "ranks": [1, 2]}, source="correction")
        if {1, -1} <= {*answer.thumbs} and not is_ranking:
            judged = [place for place, thumb in enumerate(answer.thumbs) if thumb]
            texts = [item.responses[place] for place in judged]
            ranks = [1 if answer.thumbs[place] > 0 else 2 for place in judged]
            yield _row(item, answer, {"responses": texts, "ranks": ranks}, source="thumbs")


def demonstrations(labels: Labels) -> Iterator[dict[str, Any]]:
    """Yield the corrected responses, and those with a thumb up that were not corrected.

    For a post they are also the column `summary`, so that `data.template=tldr` can read them.
    """
    for answer in labels.answers:
        item = labels.items[answer.item]
        names = ("completion", "summary") if "post" in item.columns else ("completion",)
        for text, edited, thumb in zip_longest(item.responses, answer.edits, answer.thumbs):
            if edited is not None or thumb == 1:
                learned, source = (text, "thumbs") if edited is None else (edited, "correction")
                yield _row(item, answer, dict.fromkeys(names, learned), source=source)


def _row(item: Item, answer: Answer, values: Mapping[str, Any], *, source: str = "ranking") -> dict[str, Any]:
    about = {name: getattr(answer, name) for name in ("item", "person", "when", "seconds", "order", "axes", "note")}
    about |= {"answer": answer.id, "models": item.models, "source": source}
    return {**item.columns, "prompt": item.prompt, **values, "label": about}


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def parsed(row: Mapping[str, Any], kind: type[_Parsed], place: str = "") -> _Parsed:
    """Parse a row.

    Raises:
        DataError: A field is missing or wrong; the message starts with the place.
    """
    try:
        return _adapter(kind).validate_python(row)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{place}{first['loc'][0]}: {first['msg'].replace('tuple', 'list')}") from error


def _size_fault(answer: Answer, size: int) -> str | None:
    """Name the first list of an answer that does not fit the number of responses."""
    if sorted(answer.order) != [*range(size)]:
        return f"order needs the numbers from 0 to {size - 1}"
    if answer.verdict == "ranked" and not answer.ranks:
        return "a ranked answer needs ranks"
    lists = [("ranks", answer.ranks), ("thumbs", answer.thumbs), ("edits", answer.edits), *answer.axes.items()]
    faults = (
        f"{name} needs an entry for each of the {size} responses"
        for name, values in lists
        if values and len(values) != size
    )
    return next(faults, None)


def _hold(file: int, path: Path) -> None:
    """Lock the file until it is closed; systems and network file systems without such locks do not check.

    Raises:
        DataError: Another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise DataError(f"{path} is in use by another `kedge label` or `kedge chat`; stop it first") from error
    except OSError:  # such as a network file system without locks
        return
