"""Serves the page on which people label, a link for each of them; an answer is on the disk before the page says so.

question ─▶ page ─▶ answer, checked ─▶ answers.jsonl ─▶ next question
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Any, cast

from kedge_base.errors import ConfigError, DataError, KedgeError, OutputError
from kedge_base.machine.durable import replace_contents
from kedge_base.machine.local_server import Answer as Reply
from kedge_base.machine.local_server import LocalServer, Request, as_json, asset, new_token, read_object
from kedge_base.run_folder.output import writing
from kedge_base.run_folder.record_format import read_json_lines
from kedge_base.texts import names_judge
from kedge_inspect import page
from kedge_people.assignments import Assignments, Question
from kedge_people.labels import ANSWERS_FILE, Answer, AnswerFile, Item, read_labels

LINKS_FILE = "links.json"
"""The port and everybody's token: links and open pages still work after a restart. Only its owner may read it."""

ASSETS = {
    "": (__package__, "label.html"),
    "style.css": (page.__name__, "style.css"),
    "label.css": (__package__, "label.css"),
    "label.js": (__package__, "label.js"),
}

GRADES = range(1, 8)
LONGEST_NOTE = 10_000
MOST_RESPONSES = 9
"""InstructGPT's largest number; ranks are single keys."""

_ID = re.compile(r"[0-9A-Za-z-]{8,64}")


class Stale(DataError):
    """An answer to a question that does not wait for this person: another page of theirs has answered it."""


@contextmanager
def label_server(
    folder: Path, assignments: Assignments, file: AnswerFile, *, port: int | None = None
) -> Iterator[LocalServer]:
    """Serve the page within this context; afterwards, no answer is taken.

    Args:
        folder: The folder of labels.
        assignments: Who is asked what.
        file: The folder's answers, open for writing.
        port: The local port; by default that of the last time, or a free one.

    Raises:
        DataError: The folder is damaged, or an item has too many responses.
        ConfigError: The port is taken or not permitted.
    """
    known_port, tokens = _read_links(folder)
    tokens = {name: tokens.get(name) or new_token() for name in assignments.people if not names_judge(name)}
    desk = Desk(folder, assignments, file)
    made = partial(LocalServer, desk.reply, takes_posts=True, tokens=tokens)
    server = None
    if port is None and known_port:
        with suppress(ConfigError):  # taken by another program
            server = made(port=known_port)
    server = server or made(port=port or 0)
    path = folder / LINKS_FILE
    with writing(path):
        replace_contents(path, [json.dumps({"port": server.port, "tokens": tokens}).encode()], mode=0o600)
    try:
        with server:
            yield server
    finally:
        desk.close()


class Desk:
    """Hands out questions and takes answers.

    Args:
        folder: The folder of labels.
        assignments: Who is asked what.
        file: The folder's answers, open for writing.
    """

    def __init__(self, folder: Path, assignments: Assignments, file: AnswerFile) -> None:
        labels = read_labels(folder)
        for item in labels.items.values():
            if len(item.responses) > MOST_RESPONSES:
                many = f"item {item.id!r} has {len(item.responses)} responses"
                raise DataError(f"{folder}: {many}, at most {MOST_RESPONSES} can be ranked")
        self._items = labels.items
        self._assignments = assignments
        self._file = file
        self._lock = threading.Lock()
        self._is_open = True
        self._answers = {answer.id: answer for answer in labels.answers}
        self._known = {row["id"] for row in read_json_lines(folder / ANSWERS_FILE) if "id" in row}

    def reply(self, request: Request) -> Reply:
        """Serve the page and its parts, and questions (`question/0` is the next one, `question/1` the last one that was
        answered), for GET; take an `answer` for POST.
        """
        if request.method == "GET" and request.path in ASSETS:
            return asset(*ASSETS[request.path])
        back = re.fullmatch(r"question/(\d{1,6})", request.path)
        try:
            if request.method == "GET" and back:
                with self._lock:
                    return as_json(self._shown(request.name, int(back[1])))
            if request.method == "POST" and request.path == "answer":
                with self._lock:
                    self._take(request.name, read_object(request.body))
                    return as_json(self._shown(request.name, 0))
        except KedgeError as error:
            # The page sends an answer again that could not be written.
            unwritten = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, OutputError) else HTTPStatus.BAD_REQUEST
            return as_json({"error": str(error)}, HTTPStatus.CONFLICT if isinstance(error, Stale) else unwritten)
        return Reply(HTTPStatus.NOT_FOUND, b"Not found.\n")

    def close(self) -> None:
        """Wait for the answer that is being written, and take no more."""
        with self._lock:
            self._is_open = False

    def _shown(self, person: str, back: int) -> dict[str, Any]:
        """Return the page's content: progress, and a question without its models and others' answers."""
        own = self._own(person)
        left = self._left(person)
        total = len(self._assignments.questions(person, self._items))
        state = {
            "person": person,
            "done": total - len(left),
            "total": total,
            "seconds": median([each.seconds for each in own]) if own else None,
            "axes": self._assignments.axes,
            "back": min(back, len(own)),
            "most_back": len(own),
            "question": None,
        }
        earlier = own[-state["back"]] if state["back"] else None
        if earlier is not None:
            question = Question(earlier.item, earlier.order)
        elif left:
            question = left[0]
        else:
            return state
        item = self._items[question.item]
        state["question"] = {
            "id": _question_id(question),
            "prompt": item.prompt,
            "responses": [item.responses[place] for place in question.order],
            "replaces": None if earlier is None else earlier.id,
            "answer": None if earlier is None else _as_shown(earlier),
        }
        return state

    def _take(self, person: str, values: Mapping[str, Any]) -> None:
        """Check an answer and write it; one that was sent before, whose reply was lost, changes nothing.

        Raises:
            OutputError: It cannot be written now.
            Stale: It answers a question that does not wait for the person, or replaces an answer that does not count.
            DataError: It is not an answer to the question.
        """
        given = values.get("id")
        if not (isinstance(given, str) and _ID.fullmatch(given)):
            raise DataError("expected an id of 8 to 64 letters and digits")
        name = f"{person}-{given}"
        if name in self._known:
            return
        if not self._is_open:
            raise OutputError("the server is ending")
        replaces = values.get("replaces")
        if replaces is None:
            # Not the next one alone: while a page shows it, an earlier answer may be undone elsewhere, or people join.
            asked = self._left(person)
        else:
            before = self._answers.get(str(replaces))
            asked = [Question(before.item, before.order)] if before and before.person == person else []
        question = next((each for each in asked if _question_id(each) == values.get("question")), None)
        if question is None:
            raise Stale("this question was answered in another window, or is not yours; the next one is shown")
        item = self._items[question.item]
        about = {"id": name, "person": person, "when": now(), "replaces": replaces}
        answer = _checked(values, item, question.order, self._assignments.axes, about)
        self._file.add(answer)
        self._known.add(name)
        answer.count_in(self._answers)

    def _own(self, person: str) -> list[Answer]:
        return [answer for answer in self._answers.values() if answer.person == person]

    def _left(self, person: str) -> list[Question]:
        return self._assignments.left(person, self._items, self._own(person))


def _question_id(question: Question) -> str:
    """A name of a question that tells nothing, and differs when its item is asked again, in another order."""
    return hashlib.sha256(repr(tuple(question)).encode()).hexdigest()[:16]


def _as_shown(answer: Answer) -> dict[str, Any]:
    """An answer with its lists in the order shown."""

    def shown(lists: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        return {name: [values[place] for place in answer.order] for name, values in lists.items() if values}

    lists = shown({"ranks": answer.ranks, "thumbs": answer.thumbs, "edits": answer.edits})
    return {**lists, "axes": shown(answer.axes), "note": answer.note}


def _checked(
    values: Mapping[str, Any], item: Item, order: tuple[int, ...], axes: Sequence[str], about: Mapping[str, Any]
) -> Answer:
    """Check the page's answer, and bring its lists from the order shown into that of the item."""

    def listed(
        field: str, is_right: Callable[[Any], bool], expected: str, source: Mapping[str, Any] = values
    ) -> tuple[Any, ...]:
        given = source.get(field)
        if given in (None, []):
            return ()
        entries = cast("list[Any]", given) if isinstance(given, list) else []
        if len(entries) != len(order) or not all(map(is_right, entries)):
            raise DataError(f"{field} must be a list of {len(order)}: {expected}")
        found = tuple(entries[order.index(place)] for place in range(len(order)))
        return found if any(found) else ()

    verdict = values.get("verdict")
    if verdict not in ("ranked", "bad", "skipped"):
        raise DataError("verdict must be ranked, bad or skipped")
    ranks = listed("ranks", lambda rank: _is_whole(rank, range(1, len(order) + 1)), "ranks from 1")
    if (verdict == "ranked") != bool(ranks):
        raise DataError("ranks are needed where the verdict is ranked, and nowhere else")
    levels = sorted(set(ranks))
    grades = values.get("axes") or {}
    if not isinstance(grades, dict) or not set(grades) <= set(axes):
        raise DataError(f"axes must be some of {', '.join(axes) or 'none'}")
    found = {
        axis: listed(
            axis, lambda grade: grade is None or _is_whole(grade, GRADES), "grades from 1 to 7, or null", grades
        )
        for axis in grades
    }
    seconds = values.get("seconds")
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < math.inf:
        raise DataError("seconds must be a number from 0")
    note = values.get("note") or ""
    if not isinstance(note, str) or len(note) > LONGEST_NOTE:
        raise DataError(f"note must be a text of at most {LONGEST_NOTE:,} characters")
    texts = listed("edits", lambda text: text is None or isinstance(text, str), "texts, or null")
    edits = tuple(None if text == response else text for text, response in zip(texts, item.responses, strict=False))
    if any(text is not None and not text.strip() for text in edits):
        raise DataError("edits must not be blank")
    return Answer(
        **about,
        item=item.id,
        seconds=round(seconds, 2),
        order=order,
        verdict=verdict,
        ranks=tuple(levels.index(rank) + 1 for rank in ranks),
        axes={axis: kept for axis, kept in found.items() if kept},
        thumbs=listed("thumbs", lambda thumb: _is_whole(thumb, (-1, 0, 1)), "-1, 0 or 1"),
        edits=edits if any(edits) else (),
        note=note,
    )


def _is_whole(value: object, among: Sequence[int] | range) -> bool:
    return type(value) is int and value in among


def now() -> str:
    """The time in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _read_links(folder: Path) -> tuple[int, dict[str, str]]:
    """The port and the tokens of the last time; nothing if there are none, or the file is damaged."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        links = json.loads((folder / LINKS_FILE).read_bytes())
        return int(links["port"]), {str(name): str(token) for name, token in links["tokens"].items() if len(token) > 24}
    return 0, {}
