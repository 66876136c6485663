"""The key: where it comes from, whom it is sent to, and that it is nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kedge_base.errors import RewardError
from kedge_tasks.judge import Judge
from tests.tasks.judge.standin import Reply, StandIn, check, said

KEY = "sk-Secret/0123456789abcdef"


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn().running() as stand_in:
        yield stand_in


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    monkeypatch.setenv("OTHER_KEY", "other")


def test_the_key_is_that_of_the_named_variable(server):
    for variable, sent in (("OPENAI_API_KEY", f"Bearer {KEY}"), ("OTHER_KEY", "Bearer other"), (None, None)):
        server.keys.clear()
        limits = {"key_variable": variable}
        check(server.judge, limits=limits)
        Judge(server.judge, limits=limits).score(["a"], ["e"])
        assert server.keys == [sent, sent]


@pytest.mark.parametrize("short", ["1", "e"])
def test_a_key_that_is_a_part_of_the_answer_leaves_it_as_it_is(server, monkeypatch, short):
    monkeypatch.setenv("OPENAI_API_KEY", short)
    server.answer = lambda body: said({"reasoning": "", "score": 10}, usage=(11, 1))
    ours = Judge(server.judge)
    assert ours.score(["a"], ["e"]) == [10]
    assert ours._ledger.usage()["tokens"] == 12


def test_a_redirect_takes_the_key_nowhere(server):
    with StandIn().running() as thief:
        server.models = Reply(b"", 302, {"Location": f"{thief.url}/models"})
        server.answer = lambda body: Reply(b"", 308, {"Location": f"{thief.url}/chat/completions"})
        with pytest.raises(RewardError, match="redirects to 127"):
            check(server.judge)
        with pytest.raises(RewardError, match="redirects to 127"):
            Judge(server.judge).score(["a"], ["e"])
        assert thief.keys == []


def test_an_unencrypted_connection_to_another_machine_needs_to_be_allowed():
    with pytest.raises(RewardError, match="OPENAI_API_KEY would be sent unencrypted") as caught:
        Judge("openai:m@http://gpu7.example:8000/v1")
    assert KEY not in str(caught.value)
    Judge("openai:m@http://gpu7.example:8000/v1", limits={"key_variable": None})
    Judge("openai:m@http://gpu7.example:8000/v1", limits={"allow_http": True})
    Judge("openai:m@https://gpu7.example:8000/v1")
    Judge("openai:m@http://localhost:8000/v1")
    Judge("openai:m@http://[::1]:8000/v1")


def test_proxies_do_not_get_what_is_for_this_machine(server, monkeypatch):
    with StandIn().running() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        Judge(server.judge).score(["a"], ["e"])
        assert len(server.requests) == 1
        assert proxy.keys == []


@pytest.mark.parametrize("status", [200, 400, 401, 500])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_server_that_repeats_the_key_does_not_spread_it(server, tmp_path, status, escaped):
    text = json.dumps({"error": {"message": f"wrong key Bearer {KEY} " * 9}, "choices": []})
    text = text.replace("/", "\\/") if escaped else text
    server.answer = lambda body: Reply(text.encode(), status)
    with pytest.raises(RewardError) as caught:
        Judge(server.judge, limits={"retries": 0}, file=tmp_path / "judges.sqlite").score(["a"], ["e"])
    assert "Secret" not in str(caught.value)
    answer: Any = {"reasoning": f"I saw {KEY}", "score": 3}
    server.answer = lambda body: said(json.dumps(answer).replace("/", "\\/") if escaped else answer)
    assert Judge(server.judge, file=tmp_path / "judges.sqlite").score(["a"], ["e"]) == [3]
    assert b"I saw [key]" in (tmp_path / "judges.sqlite-wal").read_bytes()
    assert not any(b"Secret" in path.read_bytes() for path in tmp_path.iterdir())


def test_a_list_of_models_that_repeats_the_key_does_not_spread_it(server):
    server.models = Reply(json.dumps({"data": [{"id": f"for {KEY}"}]}).replace("/", "\\/").encode())
    with pytest.raises(RewardError, match=r"has no such model; it has for \[key\]"):
        check(server.judge)


def test_a_key_that_no_header_can_have_is_one_line_without_it(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nX-Other: 1")
    with pytest.raises(RewardError, match="characters that no key has") as caught:
        Judge(server.judge)
    assert "Secret" not in str(caught.value)


def test_the_key_is_in_no_repr(server):
    ours = Judge(server.judge)
    assert "Secret" not in repr(ours) + repr(ours.endpoint) + repr(vars(ours))


def test_a_host_that_cannot_be_encoded_is_one_line():
    with pytest.raises(RewardError, match="label"):
        check(f"openai:m@https://{'x' * 70}.example/v1")
