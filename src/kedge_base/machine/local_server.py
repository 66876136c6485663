"""A server for browsers on this machine that have its secret address.

Other programs on the machine can also reach the port, and so can a web site open in the same browser. Therefore the
address holds a random token, a request must name this machine as its host (which defeats DNS rebinding), and a request
that changes something must come from the server's own page, as JSON.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socket import SHUT_WR
from types import TracebackType
from typing import Any, TypeAlias, cast

from kedge_base.errors import ConfigError, DataError

LOOPBACK = "127.0.0.1"
MAX_BODY = 2**20
"""Maximum bytes of a request's body."""

MAX_UNREAD = 2**28
PIECE = 2**16
"""Maximum bytes that are still received from a refused request, and bytes per call."""

POLL = 0.1
"""Seconds between checks for shutdown."""

CLOSED_POLICY = "default-src 'none'; frame-ancestors 'none'"
PAGE_POLICY = "object-src 'none'; base-uri 'none'; form-action 'none'; connect-src 'self'; frame-ancestors 'none'"
"""Restrictions on top of the page's own policy, which names its scripts."""
SCRIPT_POLICY = f"default-src 'none'; script-src 'self'; style-src 'self'; {PAGE_POLICY}"
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


Stream: TypeAlias = "Callable[[Callable[[bytes], object]], None]"
"""Writes a body piece by piece through a function, which raises ConnectionError once no one reads."""


@dataclass(frozen=True)
class Request:
    """A request with the right host and token.

    Attributes:
        method: GET or POST.
        root: The path of the server's page: the token, between slashes.
        path: The rest of the path.
        known: The version that the browser has (`If-None-Match`), or empty.
        body: The JSON of a POST.
        name: The name that its token belongs to, if tokens have names.
    """

    method: str
    root: str
    path: str
    known: str = ""
    body: bytes = b""
    name: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        status: Its status.
        body: The whole body, or a function that writes it piece by piece.
        kind: Its content type.
        policy: Its content security policy.
        version: A text that changes with the body; empty for none.
    """

    status: HTTPStatus
    body: bytes | Stream = b""
    kind: str = "text/plain; charset=utf-8"
    policy: str = CLOSED_POLICY
    version: str = ""

    def headers(self) -> dict[str, str]:
        """Headers against caching, MIME sniffing, framing, cross-site reads and referrers."""
        return {
            "Content-Type": self.kind,
            # Without a length, the body ends with the connection.
            **({"Content-Length": str(len(self.body))} if isinstance(self.body, bytes) else {"Connection": "close"}),
            "Content-Security-Policy": self.policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **({"ETag": self.version} if self.version else {}),
        }


class LocalServer:
    """Answers requests from this machine while its context is open.

    Args:
        answer: Answers a request; called from several threads.
        port: The local port; 0 picks a free one.
        takes_posts: POST is allowed; without it, nothing can be changed.
        tokens: By name, tokens of `new_token`: each name gets its own address. By default, there is one address,
            without a name.

    Raises:
        ConfigError: The port is taken or not permitted.
    """

    def __init__(
        self,
        answer: Callable[[Request], Answer],
        *,
        port: int = 0,
        takes_posts: bool = False,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._answer = answer
        self._tokens = {"": new_token()} if tokens is None else dict(tokens)
        try:
            self._server = _Server((LOOPBACK, port), _handler(self._answer_raw, takes_posts=takes_posts))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be used: {error}; omit --port to use a free one") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL,), daemon=True)

    @property
    def port(self) -> int:
        """The port in use."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """Address of the page, including its token: the first, if there are several."""
        return next(iter(self.urls.values()))

    @property
    def urls(self) -> dict[str, str]:
        """The address of each name."""
        return {name: f"http://{LOOPBACK}:{self.port}/{token}/" for name, token in self._tokens.items()}

    def wait(self) -> None:
        """Serve until Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def __enter__(self) -> LocalServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer_raw(self, sent: BaseHTTPRequestHandler) -> Answer:
        """Answer a raw request, after checking that it is allowed."""
        hosts = (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}")
        if sent.headers.get("Host", "") not in hosts:
            return _refusal(HTTPStatus.FORBIDDEN, "This page is only served to the machine it runs on.")
        token, _, rest = sent.path.partition("?")[0].removeprefix("/").partition("/")
        given = token.encode("utf-8", "surrogateescape")
        # All are compared, so that the time does not tell which one is close.
        names = [name for name, known in self._tokens.items() if hmac.compare_digest(given, known.encode())]
        if not names:
            return _refusal(HTTPStatus.FORBIDDEN, "The address lacks the token.")
        body = b""
        if sent.command == "POST":
            if sent.headers.get("Origin") not in {f"http://{host}" for host in hosts}:
                return _refusal(HTTPStatus.FORBIDDEN, "Only this server's own page may send.")
            if sent.headers.get_content_type() != "application/json":
                return _refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Expected JSON.")
            length = sent.headers.get("Content-Length", "")
            if not (length.isdecimal() and len(length) < 10 and int(length) <= MAX_BODY):
                return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"At most {MAX_BODY} bytes, of a stated length.")
            body = sent.rfile.read(int(length))
        known = sent.headers.get("If-None-Match", "")
        return self._answer(Request(sent.command, f"/{token}/", rest, known, body, names[0]))


def new_token() -> str:
    """A secret that cannot be guessed."""
    return secrets.token_urlsafe(24)


def as_json(values: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Answer:
    """An answer with a JSON object, on a line of its own."""
    return Answer(status, (json.dumps(values) + "\n").encode(), "application/json")


def read_object(body: bytes) -> Mapping[str, Any]:
    """Read the JSON object in the body of a request.

    Raises:
        DataError: There is none.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError("expected JSON") from error
    if not isinstance(values, dict):
        raise DataError("expected a JSON object")
    return cast("Mapping[str, Any]", values)


def asset(package: str, name: str) -> Answer:
    """A file in a package's folder `assets`. Pages may run their own script files, and no inline code."""
    path = files(package) / "assets" / name
    kind = KINDS[name.rpartition(".")[2]]
    policy = SCRIPT_POLICY if kind == KINDS["html"] else CLOSED_POLICY
    return Answer(HTTPStatus.OK, path.read_bytes(), f"{kind}; charset=utf-8", policy=policy)


def _refusal(status: HTTPStatus, reason: str) -> Answer:
    return Answer(status, f"{reason}\n".encode())


def _handler(get_answer: Callable[[BaseHTTPRequestHandler], Answer], *, takes_posts: bool) -> type:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10
        protocol_version = "HTTP/1.1"
        server_version = "kedge"
        sys_version = ""

        def do_GET(self) -> None:
            answer = get_answer(self)
            # The unread body of a rejected request would be read as the next request.
            self.close_connection = self.close_connection or self.command == "POST"
            self.send_response(answer.status)
            for name, value in answer.headers().items():
                self.send_header(name, value)
            self.end_headers()
            if isinstance(answer.body, bytes):
                self.wfile.write(answer.body)
            else:
                answer.body(self.wfile.write)  # unbuffered: each piece is sent at once

        def finish(self) -> None:
            """End the connection once the browser has read the answer: unread data would reset it before."""
            super().finish()
            with suppress(OSError):
                self.connection.shutdown(SHUT_WR)
                for _ in range(MAX_UNREAD // PIECE):
                    if not self.connection.recv(PIECE):
                        return

        if takes_posts:
            do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because the requested path contains the token."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
