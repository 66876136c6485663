"""A page that is served to the browsers of this machine alone, and only to those that know its address.

Other programs of the machine reach the port as well, and a web site that is open in the same browser may ask for it.
So the address holds a token that cannot be guessed, a request must name this machine as its host (a foreign name that
was made to lead here is refused), nothing can be changed, and nothing else is served.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from kedge.errors import ConfigError, KedgeError

__all__ = ["LivePage", "PageServer"]

LOOPBACK = "127.0.0.1"
SHARE_OF_TIME = 10
"""The page is made anew in no more than this part of the time: the machine is the run's."""

POLL = 0.1
"""Seconds until the server notices that it is to end."""

SEALED = "default-src 'none'; frame-ancestors 'none'"
OPENED = "object-src 'none'; base-uri 'none'; form-action 'none'; connect-src 'self'; frame-ancestors 'none'"
"""What the page may do beside what its own policy says, which names its scripts."""


@dataclass(frozen=True)
class LivePage:
    """What is served.

    Attributes:
        version: Another text whenever there is something new; quick to say.
        data: What the page shows now, in JSON's types.
        render: The page as HTML, from what it shows and the address that answers with newer data.
    """

    version: Callable[[], str]
    data: Callable[[], Mapping[str, Any]]
    render: Callable[[Mapping[str, Any], str], bytes]


class PageServer:
    """Serves a page from its making on, to be used as a context.

    Args:
        page: What is served.
        port: On which port of this machine; 0 takes one that is free.

    Raises:
        ConfigError: The port is taken, or may not be used.
    """

    def __init__(self, page: LivePage, *, port: int = 0) -> None:
        self._token, self._page = secrets.token_urlsafe(24), page
        self._lock, self._next = threading.Lock(), 0.0
        self._made: tuple[str, Mapping[str, Any]] = ("", {})
        try:
            self._server = _Server((LOOPBACK, port), self._handler())
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be used: {error}; without --port a free one is taken") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL,), daemon=True)

    @property
    def port(self) -> int:
        """The port."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is, token and all."""
        return f"http://{LOOPBACK}:{self.port}/{self._token}/"

    def wait(self) -> None:
        """Serve until Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, host: str, path: str, known: str) -> _Answer:
        """The answer to a request.

        Args:
            host: The host that it names.
            path: What it asks for.
            known: The version that the browser has, or nothing.
        """
        if host not in (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"):
            return _Answer(HTTPStatus.FORBIDDEN, b"This page is served to its own machine.\n")
        token, _, rest = path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token.encode()):
            return _Answer(HTTPStatus.FORBIDDEN, b"The address lacks its token.\n")
        try:
            if rest == "":
                page = self._page.render(self._newest()[1], f"/{self._token}/data.json")
                return _Answer(HTTPStatus.OK, page, "text/html; charset=utf-8", policy=OPENED)
            if rest == "data.json":
                version, data = self._newest()
                if known == version:
                    return _Answer(HTTPStatus.NOT_MODIFIED, version=version)
                text = json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
                return _Answer(HTTPStatus.OK, text, "application/json", version=version)
        except KedgeError as error:  # the run's folder was moved away, or is damaged
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode("utf-8", "backslashreplace"))
        return _Answer(HTTPStatus.NOT_FOUND, b"There is nothing else here.\n")

    def _newest(self) -> tuple[str, Mapping[str, Any]]:
        """Version and data, made anew where there is something new, and not too often."""
        with self._lock:
            version = f'"{self._page.version()}"'
            if version != self._made[0] and time.monotonic() >= self._next:
                begun = time.monotonic()
                self._made = (version, {**self._page.data(), "version": version})
                self._next = begun + SHARE_OF_TIME * (time.monotonic() - begun)
            return self._made

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        ask = self.answer

        class Handler(BaseHTTPRequestHandler):
            timeout = 10
            protocol_version = "HTTP/1.1"
            server_version, sys_version = "kedge", ""

            def do_GET(self) -> None:
                headers = self.headers
                answer = ask(headers.get("Host", ""), self.path, headers.get("If-None-Match", ""))
                self.send_response(answer.status)
                for name, value in answer.headers().items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: what is asked for holds the token."""

        return Handler


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    policy: str = SEALED
    version: str = ""

    def headers(self) -> dict[str, str]:
        """Nothing is kept, guessed, framed, handed to other sites, or told to where a link leads."""
        return {
            "Content-Type": self.kind,
            "Content-Length": str(len(self.body)),
            "Content-Security-Policy": self.policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **({"ETag": self.version} if self.version else {}),
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
