"""Chat in a browser on this machine: one page, one conversation, which the server holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from importlib.resources import files
from typing import Any, cast

from kedge.errors import DataError, KedgeError
from kedge.inspect import page
from kedge.stages.chat.chat import Chat, Interrupted
from kedge.system.local_server import CLOSED_POLICY, PAGE_POLICY, Answer, LocalServer, Request

ASSETS = {
    "": (__package__, "chat.html", "text/html"),
    "style.css": (page.__name__, "style.css", "text/css"),
    "chat.css": (__package__, "chat.css", "text/css"),
    "chat.js": (__package__, "chat.js", "text/javascript"),
}
POLICY = f"default-src 'none'; script-src 'self'; style-src 'self'; {PAGE_POLICY}"
"""The page runs its own script file and no other; nothing inline."""

Write = Callable[[bytes], object]


def chat_server(chat: Chat, *, port: int = 0) -> LocalServer:
    """A server of a page for a chat; use it as a context.

    Args:
        chat: The models.
        port: The local port; 0 picks a free one.

    Raises:
        ConfigError: The port is taken or not permitted.
    """
    return LocalServer(_ChatPage(chat).answer, port=port, takes_posts=True)


class _ChatPage:
    """Answers the page's requests; one answer is sampled at a time."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._turns = list[dict[str, Any]]()
        self._busy = threading.Lock()
        self._stopped = threading.Event()

    def answer(self, request: Request) -> Answer:
        """Serve the page and its parts for GET, and the actions `ask`, `stop`, `set` and `reset` for POST."""
        actions = {"ask": self._ask, "stop": self._stop, "set": self._set, "reset": self._reset}
        if request.method == "GET" and request.path in ASSETS:
            return _asset(request.path)
        if request.method == "GET" and request.path == "state":
            return _as_json(self._state())
        if request.method != "POST" or request.path not in actions:
            return Answer(HTTPStatus.NOT_FOUND, b"Not found.\n")
        try:
            return actions[request.path](_read(request.body))
        except KedgeError as error:
            return _as_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)

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
            replies = [asdict(reply) for reply in self._chat.ask(text, lambda *piece: self._send(write, *piece))]
            self._turns.append({"text": text, "replies": replies})
            write(_line({"replies": replies}))
        except KedgeError as error:
            write(_line({"error": str(error)}))
        finally:
            self._busy.release()

    def _send(self, write: Write, model: int, piece: str) -> None:
        if self._stopped.is_set():
            raise Interrupted
        try:
            write(_line({"model": model, "piece": piece}))
        except OSError as error:  # the page was closed
            raise Interrupted from error

    def _stop(self, values: Mapping[str, Any]) -> Answer:
        self._stopped.set()
        return _as_json({})

    def _set(self, values: Mapping[str, Any]) -> Answer:
        for name, value in values.items():
            self._chat.set(name, value)
        return _as_json({"settings": self._chat.settings})

    def _reset(self, values: Mapping[str, Any]) -> Answer:
        if not self._busy.acquire(blocking=False):
            raise DataError("an answer is being sampled; wait for it, or stop it")
        try:
            self._chat.reset()
            self._turns.clear()
        finally:
            self._busy.release()
        return _as_json({})


def _read(body: bytes) -> Mapping[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError("expected JSON") from error
    if not isinstance(values, dict):
        raise DataError("expected a JSON object")
    return cast("Mapping[str, Any]", values)


def _asset(path: str) -> Answer:
    package, name, kind = ASSETS[path]
    content = (files(package) / "assets" / name).read_bytes()
    return Answer(HTTPStatus.OK, content, f"{kind}; charset=utf-8", policy=CLOSED_POLICY if path else POLICY)


def _as_json(values: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return Answer(status, _line(values), "application/json")


def _line(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values) + "\n").encode()
