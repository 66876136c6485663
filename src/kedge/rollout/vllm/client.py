"""HTTP to one vLLM server: JSON in, JSON out, two kinds of failure."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kedge_base.texts import error_text

CONNECT_TIMEOUT = 10.0
HEALTH_TIMEOUT = 5.0
ANSWER_TIMEOUT = 3600.0
"""Maximum seconds for all responses of an update, or for a weight update."""
MAX_MESSAGE = 500
MAX_ANSWER = 2**28
"""Maximum bytes of an answer; a response of a million tokens is shorter."""


class ServerGone(Exception):
    """The server cannot be reached, or its connection broke off: it may have died."""


class ServerRefused(Exception):
    """The server is running and answered with an error, which a retry would not change."""


class Client:
    """Sends requests to a server; can be used from several threads.

    Args:
        url: The server's address. Its API key, if it has one, is in the environment.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect = lambda: kind(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT)
        self._base = parts.path
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        token = os.environ.get("VLLM_API_KEY")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}

    def get(self, path: str, *, timeout: float = ANSWER_TIMEOUT) -> Any:
        """The JSON at a path; None if the answer is empty.

        Raises:
            ServerGone, ServerRefused: See the classes.
        """
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post JSON; errors as in `get`."""
        return self._request("POST", path, json.dumps(body or {}), ANSWER_TIMEOUT)

    def is_healthy(self) -> bool:
        """True if the server is ready for requests."""
        try:
            self.get("health", timeout=HEALTH_TIMEOUT)
        except (ServerGone, ServerRefused):
            return False
        return True

    def abort(self) -> None:
        """Abort all requests in flight; they raise `ServerGone`."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _request(self, method: str, path: str, body: str | None, timeout: float) -> Any:
        connection = self._connect()
        with self._lock:
            self._open.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            connection.request(method, f"{self._base}/{path}", body, self._headers)
            with connection.getresponse() as answer:
                status = answer.status
                content = answer.read(MAX_ANSWER + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error_text(error)
            raise ServerGone(f"{self.url}: {reason}") from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if len(content) > MAX_ANSWER:
            raise ServerRefused(f"{self.url}/{path}: the answer does not end; is this a vLLM server?")
        if status >= 400:
            message = f"{self.url}/{path.partition('?')[0]}: {_message(content) or f'status {status}'}"
            # A server still answers for a moment after its engine has died.
            gone = status >= 500 and (path == "health" or not self.is_healthy())
            raise ServerGone(message) if gone else ServerRefused(message)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError) as error:
            raise ServerRefused(f"{self.url}/{path}: the answer is not JSON; is this a vLLM server?") from error


def _message(content: bytes) -> str:
    """The message in an error's body, without line breaks."""
    text = content.decode("utf-8", "replace")
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}…"
