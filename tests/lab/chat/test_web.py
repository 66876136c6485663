"""The page of a chat: reachable from this machine only, with its secret address, and only its own page can send."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from kedge.config import load_config
from kedge_base.machine.local_server import LocalServer
from kedge_lab.chat import Chat, chat_server, load_chat
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

CONFIG = load_config(overrides=["generate.temperature=1", "generate.max_new_tokens=6", "runtime.num_threads=1"])


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("models")
    talker = save_tiny_policy(folder / "talker", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    reward = lambda completions: [float(len(text)) for text in completions]  # noqa: E731
    return load_chat(CONFIG, [str(talker), str(save_tiny_policy(folder / "base"))], reward=reward)


@pytest.fixture
def server(chat: Chat) -> Iterator[LocalServer]:
    chat.reset()
    with chat_server(chat) as server:
        yield server


def send(server: LocalServer, path: str, body: bytes | None = None, **headers: str | None) -> tuple[int, bytes, Any]:
    """A request as the page sends it, with some headers changed, or left out if None."""
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Content-Type": "application/json"}
    sent = {**(own if body is not None else {}), **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    method = "GET" if body is None else "POST"
    given = {name: value for name, value in sent.items() if value}
    connection.request(method, urlsplit(server.url).path + path, body, given)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content, response.headers


def post(server: LocalServer, path: str, values: Any) -> tuple[int, list[Any]]:
    status, content, _ = send(server, path, json.dumps(values).encode())
    return status, [json.loads(line) for line in content.splitlines()]


def test_the_page_runs_its_own_script_alone(server):
    status, page, headers = send(server, "")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert b"http" not in page  # nothing from elsewhere
    assert b"<script>" not in page
    for name in ("chat.js", "chat.css", "style.css"):
        status, content, _ = send(server, name)
        assert (status, b"http" in content, b"innerHTML" in content) == (200, False, False)


def test_a_text_is_answered_piece_by_piece_and_scored(server, chat):
    status, lines = post(server, "ask", {"text": "<b>Ahoy</b>"})
    assert status == 200
    *pieces, last = lines
    for model, reply in enumerate(last["replies"]):
        text = "".join(line["piece"] for line in pieces if line["model"] == model)
        assert (text, reply["score"]) == (reply["text"], len(text))
    assert {line["model"] for line in pieces} == {0, 1}
    state = json.loads(send(server, "state")[1])
    assert [turn["text"] for turn in state["turns"]] == ["<b>Ahoy</b>"]
    assert state["settings"] == {"temperature": 1.0, "max_new_tokens": 6, "seed": 0}
    assert [model["name"] for model in state["models"]] == [policy.source for policy in chat.policies]
    assert post(server, "reset", {}) == (200, [{}])
    assert json.loads(send(server, "state")[1])["turns"] == []


def test_settings_change_and_mistakes_are_one_line(server):
    assert post(server, "set", {"seed": "4"})[1][0]["settings"]["seed"] == 4
    assert post(server, "set", {"seed": 0})[0] == 200
    for path, values in (("set", {"temperature": "hot"}), ("set", {"x": 1}), ("ask", {}), ("ask", {"text": " "})):
        status, [answer] = post(server, path, values)
        assert (status, list(answer)) == (400, ["error"])
    assert "generate.temperature must be a number" in post(server, "set", {"temperature": "hot"})[1][0]["error"]
    status, [answer] = post(server, "ask", {"text": "x" * 900})
    assert "tokens with its template" in answer["error"]
    assert send(server, "ask", b"{")[0] == 400
    assert send(server, "ask", b"[]")[0] == 400


def test_an_answer_is_stopped(server, chat, monkeypatch):
    whole = chat.ask

    def stopped_early(text: str, write: Any) -> Any:
        assert post(server, "stop", {}) == (200, [{}])
        assert "another answer" in post(server, "ask", {"text": "too"})[1][0]["error"]
        assert post(server, "reset", {})[0] == 400
        return whole(text, write)

    monkeypatch.setattr(chat, "ask", stopped_early)
    [reply] = post(server, "ask", {"text": "Ahoy"})[1][-1]["replies"]
    assert reply["ending"] == "interrupted"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": None}, 415),
        ({"Content_Length": "9999999"}, 413),
        ({"Content_Length": "-1"}, 413),
    ],
)
def test_another_page_cannot_send(server, headers, status):
    assert send(server, "reset", b"{}", **headers)[0] == status


@pytest.mark.parametrize("path", ["ask", "chat.html", "../chat.js", "assets/chat.js"])
def test_nothing_else_is_served(server, path):
    assert send(server, path)[0] == 404
