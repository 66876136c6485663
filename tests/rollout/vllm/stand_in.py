"""A stand-in for a vLLM server: its HTTP routes and the rules of its weight updates, on the standard library alone.

As a program it takes vLLM's arguments that it needs, and answers every prompt with its last token; a test gives it a
sampler of its own.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Sample = Callable[[list[int], dict[str, Any]], tuple[list[int], list[float]]]


def echo(prompt: list[int], parameters: dict[str, Any]) -> tuple[list[int], list[float]]:
    count = parameters["max_tokens"]
    return [prompt[-1]] * count, [-1.0] * count


class StandIn(ThreadingHTTPServer):
    """A server; `requests` are those for responses, `calls` all others, by path, in order.

    `silent` lets connections break off without an answer, as those of a process that was killed; `mute` does so for one
    path; `fail_after` is the number of responses after which it turns silent.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, sample: Sample = echo, on_update: Callable[[dict], object] = lambda info: None):
        super().__init__(("127.0.0.1", port), Handler)
        self.sample, self.on_update = sample, on_update
        self.calls: list[tuple[str, dict]] = []
        self.requests: list[dict] = []
        self.paused = self.active = self.silent = False
        self.version = "initial"
        self.fail_after: int | None = None
        self.mute, self.can_come_back = "", True
        self.raw: bytes | None = None  # the body of every answer
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def come_back(self) -> bool:
        if self.can_come_back:
            self.silent, self.fail_after = False, None
        return False

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Clients that break off are part of the tests."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "health":
            return 200, None
        if path == "inference/v1/generate":
            return self.generate(body)
        self.calls.append((path, body))
        error = {"error": {"message": ""}}
        if path == "pause?mode=wait":
            self.paused = True
        elif path == "resume":
            self.paused = False
        elif path == "start_weight_update":
            if self.active:
                error["error"]["message"] = "a weight update is already active. Call finish_weight_update first."
                return 500, error
            self.active = True
        elif path in ("update_weights", "finish_weight_update"):
            if not self.active or not self.paused:
                error["error"]["message"] = f"{path} without a matching start_weight_update."
                return 500, error
            if path == "update_weights":
                self.on_update(body["update_info"])
            else:
                self.active, self.version = False, body.get("weight_version", self.version)
        else:
            return 404, {"error": {"message": "Not Found"}}
        return 200, {"message": "done"}

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.requests.append(body)
            if self.fail_after is not None:
                self.fail_after -= 1
                self.silent = self.silent or self.fail_after < 0
            tokens, logprobs = self.sample(body["token_ids"], body["sampling_params"])
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        spans = [{"version": self.version, "start": 0, "end": len(tokens)}]
        choice = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
        return 200, {"choices": [{**choice, "finish_reason": "length"}]}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def respond(self, body: dict[str, Any]) -> None:
        if self.server.silent or self.path.removeprefix("/") == self.server.mute:
            return
        status, content = self.server.answer(self.path.removeprefix("/"), body)
        if self.server.silent:
            return
        data = b"" if content is None else self.server.raw or json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if "--refuse" in sys.argv:
        sys.exit("ValueError: head size 8 is not supported\nRuntimeError: Engine core initialization failed.")
    StandIn(int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
