"""A server that answers as OpenAI-compatible servers do, or fails as they do, and counts what it gets."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kedge_tasks.judge import Judge


@dataclass
class Reply:
    """One answer: a status with headers and a body, or a connection that is closed without one."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    closes: bool = False


def said(content: object, *, usage: tuple[int, int] | None = (10, 5)) -> Reply:
    """A completion with this text, or the JSON of an object."""
    text = content if isinstance(content, str) else json.dumps(content)
    used = {} if usage is None else {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    return Reply({"choices": [{"message": {"role": "assistant", "content": text}}], **used})


def check(judge: str, **settings: Any) -> None:
    """Check that a judge can be asked."""
    Judge(judge, **settings).endpoint.check()


def quoted(body: Mapping[str, Any]) -> list[str]:
    """The prompt and the responses that a request quotes."""
    text = body["messages"][1]["content"]
    return [inner for _, inner in re.findall(r"^<[\w ]+? (\w{20})>\n(.*?)\n</[\w ]+? \1>$", text, re.M | re.S)]


def likes_e(body: Mapping[str, Any]) -> Reply:
    """Score by the number of letters e, prefer the response with more of them."""
    _, *responses = quoted(body)
    counts = [text.count("e") for text in responses]
    if len(counts) == 1:
        return said({"reasoning": "counted", "score": min(1 + counts[0], 10)})
    winner = "tie" if counts[0] == counts[1] else "A" if counts[0] > counts[1] else "B"
    return said({"reasoning": "counted", "winner": winner})


class StandIn:
    """The server.

    Attributes:
        answer: Makes the reply to a request's body.
        requests: The bodies so far, in order.
        keys: The headers `Authorization` so far.
        most_at_once: The largest number of requests at the same time.
        times: When each request came.
    """

    def __init__(self, answer: Callable[[Mapping[str, Any]], Reply] = likes_e, models: Any = ("m",)) -> None:
        self.answer = answer
        self.models = models
        self.requests: list[Mapping[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in.keys.append(self.headers.get("Authorization"))
                if isinstance(stand_in.models, Reply):
                    self._reply(stand_in.models)
                else:
                    self._reply(Reply({"data": [{"id": name} for name in stand_in.models]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stand_in._lock:
                    stand_in.requests.append(body)
                    stand_in.keys.append(self.headers.get("Authorization"))
                    stand_in.times.append(time.monotonic())
                    stand_in._now += 1
                    stand_in.most_at_once = max(stand_in.most_at_once, stand_in._now)
                try:
                    reply = stand_in.answer(body)
                finally:
                    with stand_in._lock:
                        stand_in._now -= 1
                self._reply(reply)

            def _reply(self, reply: Reply) -> None:
                if reply.closes:
                    self.close_connection = True
                    return
                text = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                try:
                    self.send_response(reply.status)
                    for name, value in {"Content-Length": str(len(text)), **reply.headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:  # the client has given up
                    pass

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.judge = f"openai:m@{self.url}"

    def replies(self, *replies: Reply, then: Callable[[Mapping[str, Any]], Reply] = likes_e) -> None:
        """Give these replies in order, then others."""
        waiting = list(replies)
        lock = threading.Lock()

        def answer(body: Mapping[str, Any]) -> Reply:
            with lock:
                reply = waiting.pop(0) if waiting else None
            return then(body) if reply is None else reply

        self.answer = answer

    @contextmanager
    def running(self) -> Iterator[StandIn]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
