"""Chat in a browser on this machine: one page and one conversation, kept by the server."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from kedge_base.errors import DataError, KedgeError
from kedge_base.machine.local_server import Answer, LocalServer, Request, as_json, asset, read_object
from kedge_inspect import page
from kedge_lab.chat.chat import Chat, Interrupted, Reply
from kedge_people.corrections import Corrections
from kedge_people.labels import Item

ASSETS = {
    "": (__package__, "chat.html"),
    "style.css": (page.__name__, "style.css"),
    "chat.css": (__package__, "chat.css"),
    "chat.js": (__package__, "chat.js"),
}

Write = Callable[[bytes], object]


def chat_server(chat: Chat, *, port: int = 0, corrections: Corrections | None = None) -> LocalServer:
    """Serve a page for a chat; use it as a context.

    Args:
        chat: The models.
        port: The local port; 0 picks a free one.
        corrections: Takes thumbs and corrections of answers; None for none.

    Raises:
        ConfigError: The port is taken or not permitted.
    """
    return LocalServer(_ChatPage(chat, corrections).answer, port=port, takes_posts=True)


class _ChatPage:
    """Answers the page's requests; one answer is sampled at a time."""

    def __init__(self, chat: Chat, corrections: Corrections | None) -> None:
        self._chat = chat
        self._corrections = corrections
        self._labeling = threading.Lock()
        self._items: dict[str, tuple[Item, float]] = {}
        self._turns = list[dict[str, Any]]()
        self._busy = threading.Lock()
        self._stopped = threading.Event()

    def answer(self, request: Request) -> Answer:
        """Serve the page and its parts for GET, and the actions `ask`, `stop`, `set`, `reset`, `label` for POST."""
        actions = {"ask": self._ask, "stop": self._stop, "set": self._set, "reset": self._reset, "label": self._label}
        if request.method == "GET" and request.path in ASSETS:
            return asset(*ASSETS[request.path])
        if request.method == "GET" and request.path == "state":
            return as_json(self._state())
        if request.method != "POST" or request.path not in actions:
            return Answer(HTTPStatus.NOT_FOUND, b"Not found.\n")
        try:
            return actions[request.path](read_object(request.body))
        except KedgeError as error:
            return as_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)

    def _state(self) -> dict[str, Any]:
        chat = self._chat
        return {
            "models": [
                {"name": policy.source, "about": line.removeprefix(f"{policy.source}: ")}
                for policy, line in zip(chat.policies, chat.introductions(), strict=True)
            ],
            "reward": None if chat.scorer is None else chat.scorer.name,
            "settings": chat.settings,
            "turns": self._turns,
        }

    def _ask(self, values: Mapping[str, Any]) -> Answer:
        text = values.get("text")
        if not isinstance(text, str) or not text.strip():
            raise DataError("expected a text")
        return Answer(HTTPStatus.OK, lambda write: self._stream(text, write), "application/x-ndjson")

    def _stream(self, text: str, write: Write) -> None:
        """Write the answers as lines of JSON: pieces of text, then all replies, or the error."""
        if not self._busy.acquire(blocking=False):
            write(_line({"error": "another answer is being sampled; wait for it, or stop it"}))
            return
        try:
            self._stopped.clear()
            found = self._chat.ask(text, lambda *piece: self._send(write, *piece))
            replies = [{**asdict(reply), **self._labelable(model, text, reply)} for model, reply in enumerate(found)]
            self._turns.append({"text": text, "replies": replies})
            write(_line({"replies": replies}))
        except KedgeError as error:
            write(_line({"error": str(error)}))
        finally:
            self._busy.release()

    def _labelable(self, model: int, text: str, reply: Reply) -> dict[str, Any]:
        """How the page names an answer that can be labeled, and its label so far; nothing if it cannot."""
        if self._corrections is None or reply.ending == "interrupted" or not reply.text.strip():
            return {}
        prompt = self._chat.conversations[model].answered(text)
        response = reply.text if isinstance(prompt, str) else reply.text.strip()
        item = Item(f"chat-{uuid.uuid4()}", prompt, (response,), (self._chat.policies[model].source,))
        self._items[item.id] = (item, time.monotonic())
        return {"item": item.id, "thumb": 0, "edit": None}

    def _label(self, values: Mapping[str, Any]) -> Answer:
        known = self._items.get(str(values.get("item")))
        if self._corrections is None or known is None:
            raise DataError("there is no such answer, or kedge chat was started without --labels")
        item, shown = known
        given = {"thumb": values.get("thumb"), "edit": values.get("edit")}
        with self._labeling:
            self._corrections.take(item, **given, seconds=time.monotonic() - shown)
            for reply in (reply for turn in self._turns for reply in turn["replies"] if reply.get("item") == item.id):
                reply.update(given)
        return as_json(given)

    def _send(self, write: Write, model: int, piece: str) -> None:
        if self._stopped.is_set():
            raise Interrupted
        try:
            write(_line({"model": model, "piece": piece}))
        except OSError as error:  # the page was closed
            raise Interrupted from error

    def _stop(self, values: Mapping[str, Any]) -> Answer:
        self._stopped.set()
        return as_json({})

    def _set(self, values: Mapping[str, Any]) -> Answer:
        for name, value in values.items():
            self._chat.set(name, value)
        return as_json({"settings": self._chat.settings})

    def _reset(self, values: Mapping[str, Any]) -> Answer:
        if not self._busy.acquire(blocking=False):
            raise DataError("an answer is being sampled; wait for it, or stop it")
        try:
            self._chat.reset()
            self._turns.clear()
        finally:
            self._busy.release()
        return as_json({})


def _line(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values) + "\n").encode()
