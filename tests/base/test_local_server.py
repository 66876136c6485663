"""The local server: reachable from this machine only, with its secret address only, and read-only unless asked."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from kedge_base.errors import ConfigError
from kedge_base.machine.local_server import Answer, LocalServer, Request, new_token


def found(request: Request) -> Answer:
    return Answer(HTTPStatus.OK, request.path.encode())


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(found) as server:
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


@pytest.mark.parametrize("path", ["/", "//", "/data.json", "/x/", "/%00/", "/%C3%A9/", "*", "/?" + "a" * 99])
def test_without_the_token_there_is_nothing(server, path):
    response, body = ask(server, path)
    assert (response.status, body) == (403, b"The address lacks the token.\n")


def test_bytes_that_are_no_text_are_no_token(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /\xff\xe9/ HTTP/1.0\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.port)
        assert connection.recv(100).startswith(b"HTTP/1.1 403 ")


def test_a_token_that_is_nearly_right_is_wrong(server):
    token = path_of(server).strip("/")
    for wrong in (token[:-1], token + "A", token.swapcase(), token[:-1] + ("A" if token[-1] != "A" else "B")):
        assert ask(server, f"/{wrong}/")[0].status == 403
    assert len(token) >= 32
    with LocalServer(found) as other:
        assert path_of(other) != path_of(server)


FOREIGN = ("evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}",
           "[::1]:{port}", "0.0.0.0:{port}", "")  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_for_this_machine_is_refused(server, host):
    assert ask(server, path_of(server), Host=host.format(port=server.port))[0].status == 403


def test_localhost_is_this_machine(server):
    assert ask(server, path_of(server), Host=f"localhost:{server.port}")[0].status == 200


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


def test_a_port_that_is_taken_is_told(server):
    with pytest.raises(ConfigError, match=rf"--port {server.port} cannot be used: .*; omit --port to use a free one"):
        LocalServer(found, port=server.port)


def test_a_browser_that_goes_away_is_no_error(server, capfd):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"GET {path_of(server)} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode())
    assert ask(server, path_of(server))[0].status == 200
    assert capfd.readouterr() == ("", "")  # no log either: it would hold the token


@pytest.mark.parametrize(
    ("method", "changed", "status"),
    [
        ("POST", {}, 413),
        ("POST", {"Content-Type": "text/plain"}, 415),
        ("POST", {"Origin": "http://evil.example"}, 403),
        ("PUT", {}, 501),
    ],
)
def test_a_refusal_reaches_a_browser_that_is_still_sending(method, changed, status):
    with LocalServer(found, takes_posts=True) as server:
        headers = {"Origin": f"http://127.0.0.1:{server.port}", "Content-Type": "application/json", **changed}
        for _ in range(5):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request(method, path_of(server), b"x" * 2**22, headers)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (status, True)
            connection.close()


def test_it_ends():
    with LocalServer(found) as server:
        port = server.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_everybody_has_an_address_of_their_own():
    tokens = {"ana": new_token(), "ben": new_token()}
    with LocalServer(
        lambda request: Answer(HTTPStatus.OK, f"{request.name} {request.root}".encode()), tokens=tokens
    ) as server:
        assert list(server.urls) == ["ana", "ben"]
        assert server.url == server.urls["ana"]
        for name, token in tokens.items():
            assert server.urls[name] == f"http://127.0.0.1:{server.port}/{token}/"
            assert ask(server, f"/{token}/")[1].decode() == f"{name} /{token}/"
        for wrong in ("", "ana", tokens["ana"][:-1], tokens["ana"] + tokens["ben"]):
            assert ask(server, f"/{wrong}/")[0].status == 403
