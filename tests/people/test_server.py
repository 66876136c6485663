"""The server of the page: a link per person; every acknowledged answer is on the disk, none twice."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge_base.errors import DataError, OutputError
from kedge_base.machine.local_server import LocalServer
from kedge_people.assignments import Assignments, read_assignments, write_assignments
from kedge_people.labels import ANSWERS_FILE, Answer, AnswerFile, Item, read_labels, write_items
from kedge_people.server import LINKS_FILE, label_server

PAIR = [Item(str(number), f"question {number}", ("one", "two"), ("old", "new")) for number in range(6)]
THREE = [Item("a", [{"role": "user", "content": "hi"}], ("x", "y", "z"), ("m", "m", "m"))]


@contextmanager
def serving(folder: Path, people=("ana", "ben"), *, items=PAIR, **settings):
    if not (folder / "items.jsonl").exists():
        write_items(folder, items)
        write_assignments(folder, Assignments(**{"overlap": 1, "repeats": 0, **settings}))
    with AnswerFile(folder) as file:
        assignments = read_assignments(folder).dealt(read_labels(folder), people)
        write_assignments(folder, assignments)
        with label_server(folder, assignments, file) as server:
            yield server


def send(server: LocalServer, person: str, path: str, values: Any = None, **headers: str | None):
    """A request as a person's page sends it; some headers changed, or left out if None."""
    body = values if values is None or isinstance(values, bytes) else json.dumps(values).encode()
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Content-Type": "application/json"}
    sent = {**(own if body is not None else {}), **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    root = server.urls[person].split("/", 3)[3]
    given = {name: value for name, value in sent.items() if value}
    connection.request("GET" if body is None else "POST", f"/{root}{path}", body, given)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(
        content
    ) if response.headers.get_content_type() == "application/json" else content


def answer(state: Any, name: str = "answer-1", **values: Any) -> dict[str, Any]:
    """The page's answer to a question: the first response shown is the best."""
    question = state["question"]
    ranks = list(range(1, len(question["responses"]) + 1))
    given = {"id": name, "question": question["id"], "replaces": question["replaces"], "seconds": 3.5}
    return {**given, "verdict": "ranked", "ranks": ranks, **values}


def ask(server: LocalServer, person: str, back: int = 0):
    status, state = send(server, person, f"question/{back}")
    assert status == 200
    return state


def give(server: LocalServer, person: str, name: str, **values: Any):
    status, state = send(server, person, "answer", answer(ask(server, person), name, **values))
    assert status == 200, state
    return state


def test_the_page_runs_its_own_script_alone(tmp_path):
    with serving(tmp_path) as server:
        status, page = send(server, "ana", "")
        assert status == 200
        assert b"<script>" not in page
        assert b"http" not in page  # nothing from elsewhere
        for name in ("label.js", "label.css", "style.css"):
            status, content = send(server, "ana", name)
            assert status == 200
            assert not any(word in content for word in (b"http", b"innerHTML", b"insertAdjacent", b"eval("))
        for path in (
            "label.html",
            "answers.jsonl",
            "../answers.jsonl",
            "question/",
            "question/-1",
            "answer",
            "links.json",
        ):
            assert send(server, "ana", path)[0] == 404


def test_an_answer_is_written_in_the_items_order(tmp_path):
    with serving(tmp_path, ["ana"], items=THREE, axes=("overall", "tone")) as server:
        state = ask(server, "ana")
        assert state["question"]["prompt"] == THREE[0].prompt
        shown = state["question"]["responses"]
        assert sorted(shown) == ["x", "y", "z"]
        ranks = {"x": 1, "y": 3, "z": 3}
        values = {
            "ranks": [ranks[text] for text in shown],
            "axes": {"overall": [7 if text == "y" else None for text in shown], "tone": [None] * 3},
            "thumbs": [1 if text == "z" else 0 for text in shown],
            "edits": [f"{text}!" if text == "x" else text for text in shown],
            "note": "<b>hm</b>",
        }
        after = give(server, "ana", "answer-1", **values)
        assert (after["done"], after["total"], after["seconds"], after["question"]) == (1, 1, 3.5, None)
        [found] = read_labels(tmp_path).answers
        assert [THREE[0].responses[place] for place in found.order] == shown
        expected = Answer(
            "ana-answer-1", "a", "ana", found.when, 3.5, found.order, "ranked", (1, 2, 2),
            {"overall": (None, 7, None)}, (0, 0, 1), ("x!", None, None), "<b>hm</b>",
        )  # fmt: skip
        assert found == expected
        assert found.when.endswith("Z")
        before = ask(server, "ana", 1)
        assert before["question"]["responses"] == shown
        assert [before["question"]["answer"]["ranks"][shown.index(text)] for text in "xyz"] == [1, 2, 2]


def test_what_a_person_sees_tells_nothing_about_models_and_others(tmp_path):
    with serving(tmp_path) as server:
        give(server, "ben", "answer-1", note="ben was here")
        text = json.dumps([ask(server, "ana", back) for back in (0, 1)])
        assert not any(word in text for word in ("old", "new", "ben", "order", "model"))
        assert ask(server, "ana")["done"] == 0


def test_the_same_question_until_it_is_answered(tmp_path):
    with serving(tmp_path) as server:
        first = ask(server, "ana")
        assert ask(server, "ana") == first
    with serving(tmp_path) as again:
        assert again.urls == server.urls, "links and open pages still work"
        assert ask(again, "ana") == first
        assert give(again, "ana", "answer-1")["question"]["id"] != first["question"]["id"]


def test_an_answer_that_is_sent_again_counts_once(tmp_path):
    with serving(tmp_path) as server:
        sent = answer(ask(server, "ana"))
        states = [send(server, "ana", "answer", sent) for _ in range(3)]
        assert states[0] == states[1] == states[2]
        assert states[0][0] == 200
    with serving(tmp_path) as server:
        assert send(server, "ana", "answer", sent)[0] == 200
        assert send(server, "ben", "answer", answer(ask(server, "ben")))[0] == 200, "ids are one's own"
    assert [each.id for each in read_labels(tmp_path).answers] == ["ana-answer-1", "ben-answer-1"]


def test_a_second_tab_cannot_answer_twice(tmp_path):
    with serving(tmp_path) as server:
        state = ask(server, "ana")
        assert send(server, "ana", "answer", answer(state))[0] == 200
        status, reply = send(server, "ana", "answer", answer(state, "answer-2"))
        assert (status, reply["error"][:26]) == (409, "this question was answered")
    assert len(read_labels(tmp_path).answers) == 1


def test_questions_of_others_are_refused(tmp_path):
    with serving(tmp_path, overlap=0) as server:
        theirs = ask(server, "ben")
        assert theirs["question"]["prompt"] != ask(server, "ana")["question"]["prompt"]
        assert send(server, "ana", "answer", answer(theirs))[0] == 409
        assert send(server, "ana", "answer", {**answer(theirs), "question": "nothing"})[0] == 409
        give(server, "ben", "answer-1")
        mine = ask(server, "ben", 1)
        assert mine["question"]["replaces"] == "ben-answer-1"
        assert send(server, "ana", "answer", answer(mine, "answer-2"))[0] == 409
    assert [each.person for each in read_labels(tmp_path).answers] == ["ben"]


def test_an_answer_is_replaced(tmp_path):
    with serving(tmp_path) as server:
        first = ask(server, "ana")
        for number in range(3):
            give(server, "ana", f"answer-{number}")
        assert ask(server, "ana", 3)["question"]["prompt"] == first["question"]["prompt"]
        assert ask(server, "ana", 99)["back"] == 3
        change = answer(ask(server, "ana", 3), "answer-9", verdict="bad", ranks=[])
        status, state = send(server, "ana", "answer", change)
        assert (status, state["done"], state["back"]) == (200, 3, 0)
        assert send(server, "ana", "answer", {**change, "id": "answer-10"})[0] == 409, "it does not count anymore"
        assert (
            send(server, "ana", "answer", answer({"question": {**first["question"], "replaces": None}}, "x" * 8))[0]
            == 409
        )
    found = read_labels(tmp_path).answers
    assert [(each.id, each.replaces) for each in found] == [
        ("ana-answer-1", None),
        ("ana-answer-2", None),
        ("ana-answer-9", "ana-answer-0"),
    ]
    assert found[-1].item == PAIR[0].id


def test_an_answer_that_was_undone_is_asked_again(tmp_path):
    with serving(tmp_path, ["ana"]) as server:
        first = ask(server, "ana")
        give(server, "ana", "answer-1")
        undone = answer(ask(server, "ana", 1), "answer-2", verdict="skipped", ranks=[])
        status, state = send(server, "ana", "answer", undone)
        assert (status, state["done"], state["question"]["id"]) == (200, 0, first["question"]["id"])
        state = give(server, "ana", "answer-3", verdict="skipped", ranks=[])
        assert (state["done"], state["question"]["id"] != first["question"]["id"]) == (1, True)


def test_a_question_on_another_page_waits_while_an_answer_is_undone(tmp_path):
    with serving(tmp_path, ["ana"]) as server:
        first = ask(server, "ana")
        shown = give(server, "ana", "answer-1")
        undone = answer(ask(server, "ana", 1), "answer-2", verdict="skipped", ranks=[])
        assert send(server, "ana", "answer", undone)[0] == 200
        status, state = send(server, "ana", "answer", answer(shown, "answer-3"))
        assert (status, state["done"], state["question"]["id"]) == (200, 1, first["question"]["id"])
        assert send(server, "ana", "answer", answer(shown, "answer-4"))[0] == 409
    assert [each.item for each in read_labels(tmp_path).answers] == [PAIR[1].id]


def test_the_question_on_the_screen_is_taken_after_somebody_joins(tmp_path):
    items = [replace(PAIR[0], id=str(number)) for number in range(20)]
    with serving(tmp_path, ["ana"], items=items, overlap=0, repeats=0.5) as server:
        state = ask(server, "ana")
        for number in range(9):
            state = give(server, "ana", f"answer-{number}")
    with serving(tmp_path, ["ana", "ben"]) as server:
        assert ask(server, "ana")["question"]["id"] != state["question"]["id"], "an item is asked again earlier now"
        assert send(server, "ana", "answer", answer(state, "answer-9"))[0] == 200
    assert [each.item for each in read_labels(tmp_path).answers] == [str(number) for number in range(10)]


def test_repeats_are_further_answers_and_what_was_skipped_is_not_repeated(tmp_path):
    items = [replace(PAIR[0], id=str(number)) for number in range(20)]
    with serving(tmp_path, ["ana"], items=items, repeats=0.1) as server:
        questions = read_assignments(tmp_path).questions("ana", {item.id: item for item in items})
        counts = Counter(question.item for question in questions)
        skipped, again = sorted((item for item, count in counts.items() if count == 2), key=int)
        assert ask(server, "ana")["total"] == 22
        state = ask(server, "ana")
        for number in range(21):
            skips = {"verdict": "skipped", "ranks": []} if number == int(skipped) else {}
            state = give(server, "ana", f"answer-{number}", **skips)
        assert state["question"] is None
        assert state["done"] == 22
    found = read_labels(tmp_path).answers
    assert Counter(each.item for each in found) == {**dict.fromkeys(map(str, range(20)), 1), again: 2}
    first, second = [each for each in found if each.item == again]
    assert first.order != second.order
    assert second.replaces is None


BAD = [
    (b"{", "expected JSON"),
    (b"[]", "expected a JSON object"),
    (b"\xff", "expected JSON"),
    (b"[" * 100_000, "expected JSON"),
    ({"id": "short"}, "id: "),
    ({"id": 7}, "id: "),
    ({"id": "../../../etc"}, "id: "),
    ({"verdict": "good"}, "verdict: "),
    ({"verdict": "bad"}, "ranks are needed where"),
    ({"ranks": []}, "ranks are needed where"),
    ({"ranks": [1]}, "a list has 1 entries; expected 2"),
    ({"ranks": [0, 0]}, "ranks must be from 1 to 2"),
    ({"ranks": [0, 1]}, "ranks must be from 1 to 2"),
    ({"ranks": [1, 3]}, "ranks must be from 1 to 2"),
    ({"ranks": [-1, 5]}, "ranks must be from 1 to 2"),
    ({"ranks": [1, True]}, "ranks: "),
    ({"ranks": "12"}, "ranks: "),
    ({"thumbs": [2, 0]}, "thumbs: "),
    ({"thumbs": [True, 0]}, "thumbs: "),
    ({"thumbs": [1.0, 0]}, "thumbs: "),
    ({"edits": [1, None]}, "edits: "),
    ({"edits": [" ", None]}, "edits must not be blank"),
    ({"axes": {"style": [1, 2]}}, "axes must be some of none"),
    ({"axes": [1]}, "axes: "),
    ({"seconds": -1}, "seconds: "),
    ({"seconds": None}, "seconds: "),
    ({"seconds": True}, "seconds: "),
    ({"seconds": float("inf")}, "seconds: "),
    ({"seconds": float("nan")}, "seconds: "),
    ({"note": ["x"]}, "note: "),
    ({"note": "x" * 10_001}, "note: "),
]


def test_unusable_answers_are_refused_and_change_nothing(tmp_path):
    with serving(tmp_path) as server:
        state = ask(server, "ana")
        for values, fault in BAD:
            given = values if isinstance(values, bytes) else {**answer(state), **values}
            status, reply = send(server, "ana", "answer", given)
            assert (status, fault in reply["error"]) == (400, True), (values, reply)
        assert send(server, "ana", "answer", {**answer(state), "note": "x" * 2_000_000})[0] == 413
        for headers in ({"Origin": "http://evil.example"}, {"Origin": None}, {"Host": "evil.example"}):
            assert send(server, "ana", "answer", answer(state), **headers)[0] == 403
        assert send(server, "ana", "answer", answer(state), Content_Type="text/plain")[0] == 415
        assert ask(server, "ana") == state
    assert read_labels(tmp_path).answers == []


def test_a_wrong_token_is_refused(tmp_path):
    with serving(tmp_path) as server:
        state = ask(server, "ana")
        token = server.urls["ana"].split("/")[3]
        for wrong in (token[:-1], token + "A", token.swapcase(), "", "ana"):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            headers = {"Origin": f"http://127.0.0.1:{server.port}", "Content-Type": "application/json"}
            connection.request("POST", f"/{wrong}/answer", json.dumps(answer(state)).encode(), headers)
            assert connection.getresponse().status == 403
            connection.close()
        assert len({url.split("/")[3] for url in server.urls.values()}) == 2
        assert all(len(url.split("/")[3]) >= 32 for url in server.urls.values())
        assert stat.S_IMODE((tmp_path / LINKS_FILE).stat().st_mode) == 0o600
    (tmp_path / LINKS_FILE).chmod(0o644)
    with serving(tmp_path):
        assert stat.S_IMODE((tmp_path / LINKS_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": "x"}', '{"port": 1, "tokens": {"ana": "short", "ben": 7}}'])
def test_damaged_links_are_made_anew(tmp_path, text):
    with serving(tmp_path):
        pass
    (tmp_path / LINKS_FILE).write_text(text)
    with serving(tmp_path) as server:
        assert all(len(url.split("/")[3]) >= 32 for url in server.urls.values())


def test_a_taken_port_gives_a_free_one(tmp_path):
    with serving(tmp_path) as server:
        port = server.port
    with LocalServer(lambda request: None, port=port), serving(tmp_path) as other:
        assert other.port != port
        assert ask(other, "ana")["done"] == 0


def test_a_full_disk_is_said_and_nothing_counts(tmp_path, monkeypatch):
    with serving(tmp_path) as server:
        state = ask(server, "ana")
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        status, reply = send(server, "ana", "answer", answer(state))
        monkeypatch.undo()
        assert status == 503
        assert "No space left on device" in reply["error"]
        assert ask(server, "ana") == state
        assert send(server, "ana", "answer", answer(state))[0] == 200
    assert len(read_labels(tmp_path).answers) == 1


def test_more_responses_than_keys_are_refused(tmp_path):
    item = Item("many", "q", tuple("abcdefghij"), ("m",) * 10)
    with pytest.raises(DataError, match="'many' has 10 responses, at most 9"), serving(tmp_path, ["ana"], items=[item]):
        pass


def test_texts_arrive_as_they_are(tmp_path):
    nasty = "</script><script>alert(1)</script>\u202e\x1b[31m\0\u2028" + "x" * 100_000 + "\ud800"
    with serving(tmp_path, ["ana"], items=[Item("1", nasty, (nasty, "b"), ("m", "m"))]) as server:
        state = ask(server, "ana")
        assert state["question"]["prompt"] == nasty
        texts = [f"{text}!" for text in state["question"]["responses"]]
        give(server, "ana", "answer-1", edits=texts, note=nasty[:100])
    [found] = read_labels(tmp_path).answers
    assert found.edits == (f"{nasty}!", "b!")


SERVE = """
import sys, time
from pathlib import Path
from kedge_people.assignments import read_assignments
from kedge_people.labels import AnswerFile
from kedge_people.server import label_server
folder = Path(sys.argv[1])
with AnswerFile(folder) as file, label_server(folder, read_assignments(folder), file) as server:
    print(server.port, flush=True)
    server.wait()
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        return process, int(lines.readline())


class Client:
    """A person who answers as the page does: an answer with an id is sent until it is acknowledged."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token
        self.acknowledged: list[str] = []
        self.resent = 0

    def request(self, path: str, values: Any = None) -> Any:
        own = {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"}
        body = None if values is None else json.dumps(values).encode()
        for _ in range(2000):
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
                    connection.request("GET" if body is None else "POST", f"/{self.token}/{path}", body, own)
                    response = connection.getresponse()
                    content = response.read()
                assert response.status == 200, content
                return json.loads(content)
            except (OSError, http.client.HTTPException):
                self.resent += body is not None
                time.sleep(0.02)
        raise AssertionError("the server did not come back")

    def work(self) -> None:
        state = self.request("question/0")
        while state["question"] is not None:
            name = f"answer-{len(self.acknowledged)}"
            state = self.request("answer", answer(state, name))
            self.acknowledged.append(name)


@pytest.mark.parametrize(("count", "kills"), [(15, 2), pytest.param(125, 10, marks=pytest.mark.slow)])
def test_acknowledged_answers_survive_kills_and_none_is_twice(tmp_path, count, kills):
    people = [f"person-{number}" for number in range(8)]
    with serving(tmp_path, people, items=[replace(PAIR[0], id=str(number)) for number in range(count)]):
        pass
    process, port = start(tmp_path)
    tokens = json.loads((tmp_path / LINKS_FILE).read_text())["tokens"]
    clients = {person: Client(port, tokens[person]) for person in people}
    threads = [threading.Thread(target=client.work) for client in clients.values()]
    try:
        for thread in threads:
            thread.start()
        draw = random.Random(0)
        for number in range(kills):
            reached = (number + 1) * 8 * count // (kills + 1)
            while sum(len(client.acknowledged) for client in clients.values()) < reached - 8:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process, same = start(tmp_path)
            assert same == port
        for thread in threads:
            thread.join(120)
    finally:
        process.kill()
        process.wait()
    found = read_labels(tmp_path).answers
    assert Counter((each.person, each.item) for each in found) == Counter(
        (person, str(number)) for person in people for number in range(count)
    )
    assert {each.id for each in found} == {
        f"{person}-{name}" for person, client in clients.items() for name in client.acknowledged
    }
    assert len((tmp_path / ANSWERS_FILE).read_text().splitlines()) == 8 * count
    print(f"{len(found)} answers, {kills} kills, {sum(client.resent for client in clients.values())} requests repeated")


def test_links_are_as_they_were_if_they_cannot_be_written(tmp_path, monkeypatch):
    with serving(tmp_path) as server:
        before = dict(server.urls)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        patch.setattr(Path, "replace", full)
        with pytest.raises(OutputError, match="No space left on device"), serving(tmp_path):
            pass
    with serving(tmp_path) as server:
        assert server.urls == before
