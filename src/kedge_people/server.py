"""Serves the labeling page, with a link per person; an answer is on the disk before the page confirms it.

question ─▶ page ─▶ answer, checked ─▶ answers.jsonl ─▶ next question
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kedge_base.errors import ConfigError, DataError, KedgeError, OutputError
from kedge_base.machine.durable import replace_contents
from kedge_base.machine.local_server import Answer as Reply
from kedge_base.machine.local_server import LocalServer, Request, as_json, asset, new_token, read_object
from kedge_base.run_folder.output import writing
from kedge_base.run_folder.record_format import read_json_lines
from kedge_base.texts import names_judge
from kedge_inspect import page
from kedge_people.assignments import Assignments, Question
from kedge_people.labels import ANSWERS_FILE, Answer, AnswerFile, Item, Verdict, parsed, read_labels

LINKS_FILE = "links.json"
"""The port and everybody's token: links and open pages still work after a restart. Only its owner may read it."""

ASSETS = {
    "": (__package__, "label.html"),
    "style.css": (page.__name__, "style.css"),
    "label.css": (__package__, "label.css"),
    "label.js": (__package__, "label.js"),
}

MOST_RESPONSES = 9
"""InstructGPT's largest number; ranks are single keys."""


class Stale(DataError):
    """An answer to a question that is not open for this person: another page of theirs has answered it."""


class Given(BaseModel):
    """An answer as the page sends it, with its lists in the order shown; see `Answer`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    id: str = Field(pattern=r"^[0-9A-Za-z-]{8,64}$")
    question: str
    verdict: Verdict
    seconds: float = Field(ge=0)
    replaces: str | None = None
    ranks: list[int] = []
    axes: dict[str, list[Annotated[int, Field(ge=1, le=7)] | None]] = {}
    thumbs: list[Annotated[int, Field(ge=-1, le=1)]] = []
    edits: list[str | None] = []
    note: str = Field("", max_length=10_000)


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
            Stale: It answers a question that is not open for the person, or replaces an answer that does not count.
            DataError: It is not an answer to the question.
        """
        given = parsed(values, Given)
        name = f"{person}-{given.id}"
        if name in self._known:
            return
        if not self._is_open:
            raise OutputError("the server is ending")
        if given.replaces is None:
            # Not the next one alone: while a page shows it, an earlier answer may be undone elsewhere, or people join.
            asked = self._left(person)
        else:
            before = self._answers.get(given.replaces)
            asked = [Question(before.item, before.order)] if before and before.person == person else []
        question = next((each for each in asked if _question_id(each) == given.question), None)
        if question is None:
            raise Stale("this question was answered in another window, or is not yours; the next one is shown")
        about = {"id": name, "person": person, "when": now()}
        answer = _answer(given, question, self._items[question.item], self._assignments.axes, about)
        self._file.add(answer)
        self._known.add(name)
        answer.count_in(self._answers)

    def _own(self, person: str) -> list[Answer]:
        return [answer for answer in self._answers.values() if answer.person == person]

    def _left(self, person: str) -> list[Question]:
        return self._assignments.left(person, self._items, self._own(person))


def _question_id(question: Question) -> str:
    """An opaque id of a question; a repeat of its item, in another order, has another one."""
    return hashlib.sha256(repr(tuple(question)).encode()).hexdigest()[:16]


def _as_shown(answer: Answer) -> dict[str, Any]:
    """An answer with its lists in the order shown."""

    def shown(lists: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        return {name: [values[place] for place in answer.order] for name, values in lists.items() if values}

    lists = shown({"ranks": answer.ranks, "thumbs": answer.thumbs, "edits": answer.edits})
    return {**lists, "axes": shown(answer.axes), "note": answer.note}


def _answer(given: Given, question: Question, item: Item, axes: Sequence[str], about: Mapping[str, Any]) -> Answer:
    """Bring the lists of the page's answer from the order shown into that of the item.

    Raises:
        DataError: It does not fit the item.
    """
    order = question.order

    def listed(values: Sequence[Any]) -> tuple[Any, ...]:
        if values and len(values) != len(order):
            raise DataError(f"a list has {len(values)} entries; expected {len(order)}, one for each response")
        return tuple(values[order.index(place)] for place in range(len(order))) if any(values) else ()

    if (given.verdict == "ranked") != bool(given.ranks):
        raise DataError("ranks are needed where the verdict is ranked, and nowhere else")
    if not {*given.ranks} <= {*range(1, len(order) + 1)}:
        raise DataError(f"ranks must be from 1 to {len(order)}")
    if not set(given.axes) <= set(axes):
        raise DataError(f"axes must be some of {', '.join(axes) or 'none'}")
    levels = sorted(set(given.ranks))
    edits = zip(listed(given.edits), item.responses, strict=False)
    changed = [None if text == response else text for text, response in edits]
    if any(text is not None and not text.strip() for text in changed):
        raise DataError("edits must not be blank")
    return Answer(
        **about,
        item=item.id,
        replaces=given.replaces,
        seconds=round(given.seconds, 2),
        order=order,
        verdict=given.verdict,
        ranks=tuple(levels.index(rank) + 1 for rank in listed(given.ranks)),
        axes={axis: found for axis, grades in given.axes.items() if (found := listed(grades))},
        thumbs=listed(given.thumbs),
        edits=tuple(changed) if any(changed) else (),
        note=given.note,
    )


def now() -> str:
    """The time in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _read_links(folder: Path) -> tuple[int, dict[str, str]]:
    """The port and the tokens of the last time; nothing if there are none, or the file is damaged."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        links = json.loads((folder / LINKS_FILE).read_bytes())
        return int(links["port"]), {str(name): str(token) for name, token in links["tokens"].items() if len(token) > 24}
    return 0, {}
