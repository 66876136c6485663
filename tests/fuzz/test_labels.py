"""Random evenings of labeling against a model: tabs, lost replies, kills, people who undo, join and withdraw."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kedge_base.machine.local_server import Request
from kedge_base.run_folder.record_format import read_json_lines
from kedge_people import labels
from kedge_people.assignments import Assignments, Question, read_assignments, write_assignments
from kedge_people.server import Desk
from tests.fuzz.outcome import case_counts, fuzz
from tests.fuzz.values import JSON, LEAVES

PEOPLE = ("ana", "ben", "cyd")


class Evening:
    """A folder of labels, its server, and what the folder must hold: the answers that count, in order."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.folder = random.Random(seed), folder
        sizes = self.draw.choice([(1,), (2,), (2, 3), (1, 2, 4)])
        texts = [tuple(f"{n}.{k}" for k in range(self.draw.choice(sizes))) for n in range(self.draw.randint(1, 8))]
        items = (labels.Item(str(n), f"question {n}", own, ("m",) * len(own)) for n, own in enumerate(texts))
        self.items = {item.id: item for item in items}
        labels.write_items(folder, self.items.values())
        shares = {"overlap": self.draw.choice([0.0, 0.5, 1.0]), "repeats": self.draw.choice([0.0, 0.3, 0.5])}
        write_assignments(folder, Assignments(seed=seed, **shares))
        self.counting: list[dict[str, Any]] = []
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.pages: list[tuple[str, dict[str, Any]]] = []
        self.start("ana")

    def start(self, *joining: str) -> None:
        self.file = labels.AnswerFile(self.folder)
        self.assignments = read_assignments(self.folder).dealt(labels.read_labels(self.folder), joining)
        write_assignments(self.folder, self.assignments)
        self.desk = Desk(self.folder, self.assignments, self.file)

    def stop(self) -> None:
        """End the server, or kill it while it writes an answer."""
        os.close(self.file._file)
        if self.draw.random() < 0.5:
            with (self.folder / labels.ANSWERS_FILE).open("ab") as file:
                file.write(b'{"id": "ana-torn", "item"'[: self.draw.randint(1, 25)])

    def own(self, person: str) -> list[dict[str, Any]]:
        return [each for each in self.counting if each["person"] == person]

    def left(self, person: str) -> list[Question]:
        own = {each["question"]: each["verdict"] for each in self.own(person)}
        skipped = {question.item for question, verdict in own.items() if verdict == "skipped"}
        questions = self.assignments.questions(person, self.items)
        return [each for each in questions if each not in own and each.item not in skipped]

    def request(self, person: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        method = "GET" if body is None else "POST"
        reply = self.desk.reply(Request(method, "/x/", path, "", json.dumps(body).encode(), person))
        assert isinstance(reply.body, bytes)
        assert not any(f"by {other}" in reply.body.decode() for other in PEOPLE if other != person)
        return int(reply.status), json.loads(reply.body)

    def show(self, person: str, state: dict[str, Any]) -> None:
        """Check what a page got."""
        own, left = self.own(person), self.left(person)
        total = len(self.assignments.questions(person, self.items))
        assert (state["done"], state["total"], state["most_back"]) == (total - len(left), total, len(own))
        asked = own[-state["back"]]["question"] if state["back"] else left[0] if left else None
        assert (state["question"] is None) == (asked is None)
        if asked is not None:
            responses = self.items[asked.item].responses
            assert state["question"]["responses"] == [responses[place] for place in asked.order]
            assert state["question"]["replaces"] == (own[-state["back"]]["id"] if state["back"] else None)
            self.pages.append((person, {**state["question"], "asked": asked}))

    def load(self) -> None:
        person = self.draw.choice(self.assignments.people)
        self.show(person, self.request(person, f"question/{self.draw.choice([0, 0, 1, 2])}")[1])

    def answer(self) -> None:
        """Answer what some page shows, which may be old; the reply may be lost."""
        if not self.pages:
            return
        person, shown = self.draw.choice(self.pages[-6:])
        asked, size = shown["asked"], len(shown["responses"])
        verdict = self.draw.choice(["ranked", "ranked", "bad", "skipped"])
        lists = {
            "ranks": [self.draw.randint(1, size) for _ in range(size)] if verdict == "ranked" else [],
            "thumbs": [self.draw.choice([0, 0, 1, -1]) for _ in range(size)],
            "edits": [self.draw.choice([None, None, f"better, by {person}"]) for _ in range(size)],
        }
        about = {"question": shown["id"], "replaces": shown["replaces"], "seconds": 1.0, "verdict": verdict}
        body = {"id": f"sent-{len(self.sent):08}", "note": f"by {person}", **about, **lists}
        replaced = [each for each in self.own(person) if each["id"] == shown["replaces"]]
        is_open = bool(replaced) if shown["replaces"] else asked in self.left(person)
        status, state = self.request(person, "answer", body)
        assert status == (200 if is_open else 409), state
        if is_open:
            self.sent.append((person, body))
            self.counting = [each for each in self.counting if each not in replaced]
            if not (replaced and verdict == "skipped" and not any(lists["edits"]) and not any(lists["thumbs"])):
                places = {name: dict(zip(asked.order, values, strict=False)) for name, values in lists.items()}
                name = f"{person}-{body['id']}"
                self.counting.append({"id": name, "person": person, "question": asked, "verdict": verdict, **places})
            if self.draw.random() < 0.7:
                self.show(person, state)

    def repeat(self) -> None:
        """Send an answer again whose reply was lost."""
        if self.sent:
            person, body = self.draw.choice(self.sent)
            assert self.request(person, "answer", body)[0] == 200

    def restart(self) -> None:
        self.stop()
        self.start(*self.draw.choice([(), (), PEOPLE[:2], PEOPLE]))

    def withdraw(self) -> None:
        person = self.draw.choice(PEOPLE)
        self.stop()
        with labels.AnswerFile(self.folder) as file:
            file.withdraw(person, "later")
        self.counting = [each for each in self.counting if each["person"] != person]
        self.start()

    def check(self) -> None:
        """Compare the folder with the model."""
        assert [each.id for each in labels.write_data_sets(self.folder).answers] == [
            each["id"] for each in self.counting
        ]
        rankings, learned = list[Any](), list[Any]()
        for each in self.counting:
            texts = self.items[each["question"].item].responses
            places = range(len(texts))
            edits, thumbs = each["edits"], each["thumbs"]
            is_ranking = each["verdict"] == "ranked" and len(texts) > 1
            if is_ranking:
                levels = sorted({*each["ranks"].values()})
                rankings.append(([*texts], [levels.index(each["ranks"][place]) + 1 for place in places]))
            rankings += [([edits[place], texts[place]], [1, 2]) for place in places if edits[place]]
            judged = [(texts[place], 1 if thumbs[place] > 0 else 2) for place in places if thumbs[place]]
            if not is_ranking and {rank for _, rank in judged} == {1, 2}:
                rankings.append(([text for text, _ in judged], [rank for _, rank in judged]))
            learned += [edits[place] or texts[place] for place in places if edits[place] or thumbs[place] > 0]
        rows = read_json_lines(self.folder / labels.COMPARISONS_FILE)
        assert [(row["responses"], row["ranks"]) for row in rows] == rankings
        assert [row["completion"] for row in read_json_lines(self.folder / labels.DEMONSTRATIONS_FILE)] == learned


@case_counts(40, 1000)
def test_the_folder_holds_every_acknowledged_answer_once(tmp_path, num_cases):
    for seed in range(num_cases):
        folder = tmp_path / str(seed)
        folder.mkdir()
        evening = Evening(folder, seed)
        for _ in range(60):
            steps = [evening.load, evening.answer, evening.repeat, evening.restart, evening.withdraw]
            evening.draw.choices(steps, (6, 10, 1, 1, 0.3))[0]()
        evening.stop()
        evening.start()
        evening.check()
        evening.stop()


def of_two(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """A list with an entry for each of two responses."""
    return st.lists(entries, min_size=2, max_size=2)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "id": st.text("aZ9-_\n", min_size=7, max_size=9),
    "verdict": st.sampled_from(["ranked", "bad", "skipped"]),
    "seconds": st.floats(0),
    "ranks": of_two(st.integers(-1, 3)),
    "axes": st.dictionaries(st.sampled_from(["style", "length"]), of_two(st.none() | st.integers(0, 8)), max_size=2),
    "thumbs": of_two(st.integers(-1, 1)),
    "edits": of_two(st.none() | st.text(max_size=3)),
    "note": st.text(),
}
ONE_FIELD = st.dictionaries(st.sampled_from([*FIELDS]), JSON | of_two(LEAVES), max_size=1)
SENT = st.tuples(st.fixed_dictionaries({}, optional=FIELDS), ONE_FIELD).map(lambda parts: {**parts[0], **parts[1]})


@case_counts(300, 5000)
def test_every_answer_that_the_server_takes_can_be_read(tmp_path, num_cases, record_property):
    labels.write_items(tmp_path, [labels.Item("1", "question", ("a", "b"), ("m", "m"))])
    assignments = Assignments(("ana",), axes=("style",), owners={"1": None})

    def check(changed: dict[str, Any]) -> None:
        (tmp_path / labels.ANSWERS_FILE).write_bytes(b"")
        desk = Desk(tmp_path, assignments, file)
        shown = json.loads(desk.reply(Request("GET", "/x/", "question/0", "", b"", "ana")).body)["question"]
        usual = {"id": "answer-1", "question": shown["id"], "seconds": 1, "verdict": "ranked", "ranks": [1, 2]}
        body = json.dumps({**usual, **changed}).encode()
        status = desk.reply(Request("POST", "/x/", "answer", "", body, "ana")).status
        assert status in (200, 400)
        assert len(labels.read_labels(tmp_path).answers) == (status == 200)

    with labels.AnswerFile(tmp_path) as file:
        fuzz(num_cases, SENT, check, record_property)
