"""The live page: reachable from this machine only, with its secret address only, and read-only."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kedge.errors import ConfigError, DataError
from kedge.inspect.watch import LivePage, page_server
from kedge.system.local_server import LocalServer


class Shown:
    """A page whose content the test sets."""

    def __init__(self) -> None:
        self.version = "1"
        self.data: dict[str, Any] = {"runs": ["\ud800 é"]}
        self.made = 0

    def make(self) -> dict[str, Any]:
        self.made += 1
        if self.version == "damaged":
            raise DataError("'metrics.jsonl' is damaged")
        return self.data

    def page(self) -> LivePage:
        return LivePage(lambda: self.version, self.make, lambda data, live: json.dumps({**data, "live": live}).encode())


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def live(shown: Shown) -> Iterator[LocalServer]:
    """A server of what the test shows."""
    with page_server(shown.page()) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """A server of what does not change."""
    with page_server(Shown().page()) as server:
        yield server


def ask(
    server: LocalServer, path: str, *, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def path_of(server: LocalServer, name: str = "") -> str:
    return "/" + server.url.split("/", 3)[3] + name


def test_the_page_and_its_data(live, shown):
    response, body = ask(live, path_of(live))
    assert (response.status, response.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    page = json.loads(body)
    assert (page["runs"], page["live"]) == (["\ud800 é"], path_of(live, "data.json"))
    response, body = ask(live, page["live"])
    assert (response.status, response.headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == {"runs": ["\ud800 é"], "version": page["version"]}
    assert shown.made == 1


def test_a_browser_is_told_what_it_does_not_have(live, shown):
    page = json.loads(ask(live, path_of(live))[1])
    response, body = ask(live, page["live"], If_None_Match=page["version"])
    assert (response.status, body) == (304, b"")
    shown.version, shown.data = "2", {"runs": ["grown"]}
    newer = json.loads(ask(live, page["live"], If_None_Match=page["version"])[1])
    assert newer["runs"] == ["grown"]
    assert ask(live, page["live"], If_None_Match=newer["version"])[0].status == 304
    assert shown.made == 2


@pytest.mark.parametrize("path", ["/", "//", "/data.json", "/x/", "/%00/", "/%C3%A9/", "*", "/?" + "a" * 99])
def test_without_the_token_there_is_nothing(server, path):
    response, body = ask(server, path)
    assert (response.status, body) == (403, b"The address lacks the token.\n")


def test_bytes_that_are_no_text_are_no_token(live, shown):
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(b"GET /\xff\xe9/ HTTP/1.0\r\nHost: 127.0.0.1:%d\r\n\r\n" % live.port)
        assert connection.recv(100).startswith(b"HTTP/1.1 403 ")
    assert shown.made == 0


def test_a_token_that_is_nearly_right_is_wrong(server):
    token = path_of(server).strip("/")
    for wrong in (token[:-1], token + "A", token.swapcase(), token[:-1] + ("A" if token[-1] != "A" else "B")):
        assert ask(server, f"/{wrong}/")[0].status == 403
    assert len(token) >= 32
    with page_server(Shown().page()) as other:
        assert path_of(other) != path_of(server)


FOREIGN = ("evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}",
           "[::1]:{port}", "0.0.0.0:{port}", "")  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_for_this_machine_is_refused(server, host):
    assert ask(server, path_of(server), Host=host.format(port=server.port))[0].status == 403


def test_localhost_is_this_machine(server):
    assert ask(server, path_of(server), Host=f"localhost:{server.port}")[0].status == 200


@pytest.mark.parametrize(
    "name", ["index.html", "../", "..%2f..%2fetc/passwd", "config.yaml", "data.json/", "/etc/passwd"]
)
def test_nothing_else_is_served(server, name):
    response, body = ask(server, path_of(server, name))
    assert (response.status, body) == (404, b"Not found.\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server, method):
    assert ask(server, path_of(server), method=method)[0].status == 501


@pytest.mark.parametrize("name", ["", "data.json", "nothing"])
def test_every_answer_is_sealed(server, name):
    headers = ask(server, path_of(server, name))[0].headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


def test_it_listens_to_this_machine_alone(server):
    assert server.url.startswith(f"http://127.0.0.1:{server.port}/")
    # All of 127/8 is this machine; a server that is bound to every address would answer there.
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", server.port), timeout=2):
        pass


def test_a_run_that_cannot_be_read_for_now(live, shown):
    shown.version = "damaged"
    response, body = ask(live, path_of(live, "data.json"))
    assert (response.status, body) == (503, b"'metrics.jsonl' is damaged\n")
    shown.version = "mended"
    assert ask(live, path_of(live, "data.json"))[0].status == 200


def test_a_port_that_is_taken_is_told(server):
    with pytest.raises(ConfigError, match=rf"--port {server.port} cannot be used: .*; omit --port to use a free one"):
        page_server(Shown().page(), port=server.port)


def test_a_browser_that_goes_away_is_no_error(server, capfd):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"GET {path_of(server)} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode())
    assert ask(server, path_of(server))[0].status == 200
    assert capfd.readouterr() == ("", "")  # no log either: it would hold the token


def test_it_ends(shown):
    with page_server(shown.page()) as server:
        port = server.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)
