"""Servers that speak OpenEnv's protocol as its package does, well and badly."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from contextlib import contextmanager
from http import HTTPStatus

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
META = {"type": "object", "additionalProperties": True}


def schema_of(action, observation, required=("message",)):
    """The reply to `GET /schema`, as pydantic writes it."""
    more = {"done": {"type": "boolean"}, "reward": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "metadata": META}
    return {
        "action": {"type": "object", "properties": {"metadata": META, **action}, "required": list(required)},
        "observation": {"type": "object", "properties": {**more, **observation}},
        "state": {},
    }


GUESS = schema_of({"message": TEXT}, {"text": TEXT, "turn": NUMBER})


def observed(text, reward: object = None, done: object = False):
    return {"type": "observation", "data": {"observation": {"text": text, "turn": 1}, "reward": reward, "done": done}}


def error(message, code, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


BAD = {
    "text": "no JSON",
    "deep": "[" * 100_000,
    "list": "[1, 2]",
    "nothing": json.dumps({"type": "observation"}),
    "state": json.dumps({"type": "state", "data": {"step_count": 1}}),
    "no reward": json.dumps({"type": "observation", "data": {"observation": {"text": "x"}, "done": False}}),
    "no done": json.dumps({"type": "observation", "data": {"observation": {"text": "x"}, "reward": 1}}),
    "done null": json.dumps(observed("x", 1, None)),
    "done 1": json.dumps(observed("x", 1, 1)),
    "reward text": json.dumps(observed("x", "much")),
    "reward nan": json.dumps(observed("x", float("nan"))),
    "no text": json.dumps({"type": "observation", "data": {"observation": {"turn": 1}, "reward": 1, "done": False}}),
    "list for observation": json.dumps(
        {"type": "observation", "data": {"observation": [], "reward": 1, "done": False}}
    ),
    "long": json.dumps(observed("x" * 1_000_001)),
    "huge": json.dumps(observed("x" * 2**24)),
    "raised": json.dumps(error("the wire\nis cut", "EXECUTION_ERROR")),
    "strange error": json.dumps({"type": "error", "data": {"message": ["x"]}}),
}


class Server:
    """A server of a guessing game; a policy that says the name of a fault gets it.

    Attributes:
        received: The messages of all sessions.
        opened: Sessions so far.
        open: Sessions now.
    """

    def __init__(self, schema=GUESS, *, most_sessions=64, closing=()):
        self.schema = schema
        self.most_sessions = most_sessions
        self.closing = closing
        self.received = []
        self.opened = self.open = 0
        self.connections = []

    def answer_http(self, connection, request):
        if request.path == "/schema":
            body = self.schema if isinstance(self.schema, str) else json.dumps(self.schema)
            return connection.respond(HTTPStatus.OK, body)
        return None if request.path == "/ws" else connection.respond(HTTPStatus.NOT_FOUND, "")

    def session(self, connection):
        if self.open >= self.most_sessions:
            connection.send(json.dumps(error("Server at capacity: 1/1 sessions active.", "CAPACITY_REACHED")))
            return
        self.opened += 1
        self.open += 1
        self.connections.append(connection)
        try:
            self.play(connection)
        except ConnectionClosed:
            pass
        finally:
            self.open -= 1

    def play(self, connection):
        secret = 0
        while True:
            message = json.loads(connection.recv())
            self.received.append(message)
            if len(self.received) in self.closing:
                connection.close(1001, "maintenance")
                return
            data = message["data"]
            if message["type"] == "reset":
                secret = random.Random(data["seed"]).randint(1, data.get("most", 5))
                done = data.get("says") == "over"
                connection.send(json.dumps(observed(f"From 1 to {data.get('most', 5)}.\n", done=done)))
                continue
            said = data["message"]
            if said == "hang":
                time.sleep(3)
            elif said == "close":
                connection.close(1011, "out of memory")
                return
            elif said == "drop":
                connection.socket.shutdown(socket.SHUT_RDWR)
                return
            elif said == "bytes":
                connection.send(b"\xff\xfe")
            elif said in BAD:
                connection.send(BAD[said])
            elif said == "":
                faults = [{"type": "string_too_short", "loc": ["message"], "msg": "String should have 1 character"}]
                connection.send(json.dumps(error("Invalid message", "VALIDATION_ERROR", errors=faults)))
            elif sum(character.isdigit() for character in said) == secret:
                connection.send(json.dumps(observed("yes", 1.0, True)))
            else:
                connection.send(json.dumps(observed("no.\n", None if said == "unpaid" else 0.25)))


@contextmanager
def running(given=None):
    """The server's address, and the server."""
    given = given or Server()
    with serve(
        given.session, "127.0.0.1", 0, process_request=given.answer_http, compression=None, close_timeout=1
    ) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", given
        finally:
            for connection in given.connections:
                connection.close_socket()
            server.shutdown()
            thread.join(5)
