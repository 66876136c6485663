"""A server of one page, for browsers on this machine that have its secret address.

Other programs on the machine can reach the port too, and so can a web site open in the same browser. Therefore the
address holds a random token, a request must name this machine as its host (which defeats DNS rebinding), the server
only answers GET, and it serves nothing else.
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
REBUILD_SHARE = 10
"""Rebuilding the data takes at most one part in this many of the time: the machine belongs to the run."""

POLL = 0.1
"""Seconds between checks for shutdown."""

CLOSED_POLICY = "default-src 'none'; frame-ancestors 'none'"
PAGE_POLICY = "object-src 'none'; base-uri 'none'; form-action 'none'; connect-src 'self'; frame-ancestors 'none'"
"""Restrictions on top of the page's own policy, which names its scripts."""


@dataclass(frozen=True)
class LivePage:
    """The page to serve.

    Attributes:
        version: A text that changes whenever the data does; cheap to compute.
        data: The data of the page, in JSON types.
        render: The page as HTML, from its data and the URL of newer data.
    """

    version: Callable[[], str]
    data: Callable[[], Mapping[str, Any]]
    render: Callable[[Mapping[str, Any], str], bytes]


class PageServer:
    """Serves a page while its context is open.

    Args:
        page: The page.
        port: The local port; 0 picks a free one.

    Raises:
        ConfigError: The port is taken or not permitted.
    """

    def __init__(self, page: LivePage, *, port: int = 0) -> None:
        self._token, self._page = secrets.token_urlsafe(24), page
        self._lock, self._next_build = threading.Lock(), 0.0
        self._built: tuple[str, Mapping[str, Any]] = ("", {})
        try:
            self._server = _Server((LOOPBACK, port), self._handler())
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be used: {error}; omit --port to use a free one") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL,), daemon=True)

    @property
    def port(self) -> int:
        """The port in use."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """Address of the page, including its token."""
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
            host: Its `Host` header.
            path: Its path.
            known: Its `If-None-Match` header: the version that the browser has, or empty.
        """
        if host not in (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"):
            return _Answer(HTTPStatus.FORBIDDEN, b"This page is only served to the machine it runs on.\n")
        token, _, rest = path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token.encode()):
            return _Answer(HTTPStatus.FORBIDDEN, b"The address lacks the token.\n")
        try:
            if rest == "":
                page = self._page.render(self._newest()[1], f"/{self._token}/data.json")
                return _Answer(HTTPStatus.OK, page, "text/html; charset=utf-8", policy=PAGE_POLICY)
            if rest == "data.json":
                version, data = self._newest()
                if known == version:
                    return _Answer(HTTPStatus.NOT_MODIFIED, version=version)
                text = json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
                return _Answer(HTTPStatus.OK, text, "application/json", version=version)
        except KedgeError as error:  # the run's folder was moved or is damaged
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode("utf-8", "backslashreplace"))
        return _Answer(HTTPStatus.NOT_FOUND, b"Not found.\n")

    def _newest(self) -> tuple[str, Mapping[str, Any]]:
        """Version and data, rebuilt when there is something new, but not too often."""
        with self._lock:
            version = f'"{self._page.version()}"'
            if version != self._built[0] and time.monotonic() >= self._next_build:
                started = time.monotonic()
                self._built = (version, {**self._page.data(), "version": version})
                self._next_build = started + REBUILD_SHARE * (time.monotonic() - started)
            return self._built

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        get_answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            timeout = 10
            protocol_version = "HTTP/1.1"
            server_version, sys_version = "kedge", ""

            def do_GET(self) -> None:
                headers = self.headers
                answer = get_answer(headers.get("Host", ""), self.path, headers.get("If-None-Match", ""))
                self.send_response(answer.status)
                for name, value in answer.headers().items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: the requested path holds the token."""

        return Handler


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    policy: str = CLOSED_POLICY
    version: str = ""

    def headers(self) -> dict[str, str]:
        """Headers against caching, MIME sniffing, framing, cross-site reads and referrers."""
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
        """Ignore a browser that disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
