"""A folder of labels: what counts, what survives, and the data sets that are made from it."""

import errno
import json
import os
import threading

import pydantic
import pytest

from kedge.data.parsing import ReadingOptions, parse_comparison, parse_demonstration
from kedge_base.errors import DataError, OutputError
from kedge_people.labels import (
    ANSWERS_FILE,
    COMPARISONS_FILE,
    DEMONSTRATIONS_FILE,
    ITEMS_FILE,
    Answer,
    AnswerFile,
    Item,
    read_labels,
    write_data_sets,
    write_items,
)
from tests.tiny import tiny_tokenizer

PAIR = Item("1", "a question", ("short", "a long one"), ("old", "new"), {"post": "p"})
SINGLE = Item("2", [{"role": "user", "content": "hello"}], ("hi",), ("new",))


def answer(name: str, **values):
    given = {"item": "1", "person": "ana", "ranks": (2, 1), "verdict": "ranked", **values}
    order = (1, 0) if given["item"] == "1" else (0,)
    return Answer(id=name, **{"when": "2026-01-01T00:00:00Z", "seconds": 3.5, "order": order, **given})


@pytest.fixture
def folder(tmp_path):
    write_items(tmp_path, [PAIR, SINGLE])
    return tmp_path


def add(folder, *answers):
    with AnswerFile(folder) as file:
        for each in answers:
            file.add(each)


def rows(folder, name=COMPARISONS_FILE):
    write_data_sets(folder)
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_what_is_written_is_read(folder):
    given = [
        answer("a", axes={"overall": (3, None)}, note="a \u2028 line\nand \ud800 half", edits=(None, "better")),
        answer("b", item="2", ranks=(), verdict="skipped", thumbs=(1,)),
    ]
    add(folder, *given)
    labels = read_labels(folder)
    assert list(labels.items.values()) == [PAIR, SINGLE]
    assert labels.answers == given


def test_an_answer_that_is_replaced_or_withdrawn_does_not_count(folder):
    add(folder, answer("a"), answer("b", person="ben"), answer("c", replaces="a", ranks=(1, 1)))
    assert [each.id for each in read_labels(folder).answers] == ["b", "c"]
    with AnswerFile(folder) as file:
        file.withdraw("ana", "2026-01-02T00:00:00Z")
    assert [each.id for each in read_labels(folder).answers] == ["b"]
    assert [row["label"]["person"] for row in rows(folder)] == ["ben"]
    add(folder, answer("d"))  # asked again, and back
    assert [each.id for each in read_labels(folder).answers] == ["b", "d"]


def test_an_answer_that_is_undone_counts_nowhere(folder):
    skip = {"verdict": "skipped", "ranks": (), "replaces": "a"}
    add(folder, answer("a"), answer("b", **skip))
    assert read_labels(folder).answers == []
    add(folder, answer("c"), answer("d", **{**skip, "replaces": "c"}, thumbs=(1, -1)))
    assert [each.id for each in read_labels(folder).answers] == ["d"]  # it says something
    add(folder, answer("e", **{**skip, "replaces": None}))
    assert [each.id for each in read_labels(folder).answers] == ["d", "e"]  # a first skip is an answer


def test_rankings_corrections_and_thumbs_become_comparisons(folder):
    add(
        folder,
        answer("a"),
        answer("b", verdict="bad", ranks=()),
        answer("c", verdict="skipped", ranks=(), edits=("shorter", None)),
        answer("d", verdict="skipped", ranks=(), thumbs=(-1, 1)),
        answer("e", item="2", verdict="skipped", ranks=(), edits=("hi there",)),
        answer("f", item="2", ranks=(1,)),
        answer("g", thumbs=(-1, 1)),
    )
    found = [(row["responses"], row["ranks"], row["label"]["source"], row["label"]["answer"]) for row in rows(folder)]
    assert found == [
        (["short", "a long one"], [2, 1], "ranking", "a"),
        (["shorter", "short"], [1, 2], "correction", "c"),
        (["short", "a long one"], [2, 1], "thumbs", "d"),
        (["hi there", "hi"], [1, 2], "correction", "e"),
        (["short", "a long one"], [2, 1], "ranking", "g"),  # once, though its thumbs say the same
    ]
    assert rows(folder)[0]["post"] == "p"
    assert rows(folder)[0]["label"]["order"] == [1, 0]
    written = rows(folder, DEMONSTRATIONS_FILE)
    assert [(row["completion"], row["label"]["source"]) for row in written] == [
        ("shorter", "correction"),
        ("a long one", "thumbs"),
        ("hi there", "correction"),
        ("a long one", "thumbs"),
    ]
    assert written[-2]["prompt"] == SINGLE.prompt


@pytest.mark.parametrize("template", ["none", "tldr"])
def test_summaries_of_posts_are_read_with_and_without_their_template(tmp_path, template):
    post = {"subreddit": "sail", "title": "Rope", "post": "It broke."}
    prompt = "SUBREDDIT: r/sail\n\nTITLE: Rope\n\nPOST: It broke.\n\nTL;DR:"
    write_items(tmp_path, [Item("1", prompt, (" one", " two"), ("m", "m"), post)])
    add(tmp_path, answer("a1", thumbs=(1, 0), edits=(None, " three")))
    options = ReadingOptions(tiny_tokenizer(), template=template)
    found = [parse_demonstration(row, options) for row in rows(tmp_path, DEMONSTRATIONS_FILE)]
    assert [(each.prompt, each.completion) for each in found] == [(prompt, " one"), (prompt, " three")]
    for row, expected in zip(rows(tmp_path), [(" one", " two"), (" three", " two")], strict=True):
        ranking = parse_comparison(row, options)
        assert (ranking.prompt, ranking.responses) == (prompt, expected)


def test_a_torn_line_is_dropped_before_the_next_answer(folder):
    add(folder, answer("a"))
    with (folder / ANSWERS_FILE).open("ab") as file:
        file.write(b'{"id": "b", "item"')
    assert [each.id for each in read_labels(folder).answers] == ["a"]
    add(folder, answer("c"))
    assert [each.id for each in read_labels(folder).answers] == ["a", "c"]


def test_answers_of_many_threads_are_all_there(folder):
    with AnswerFile(folder) as file:
        threads = [
            threading.Thread(target=lambda name=name: [file.add(answer(f"{name}-{number}")) for number in range(20)])
            for name in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_labels(folder).answers) == 160


def test_a_full_disk_leaves_whole_lines(folder, monkeypatch):
    write = os.write

    def full(file, text):
        if len(text) > 40:
            return write(file, text[:40])
        raise OSError(28, "No space left on device")

    with AnswerFile(folder) as file:
        file.add(answer("a"))
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OutputError, match="No space left on device"):
            file.add(answer("b"))
        monkeypatch.undo()
        file.add(answer("c"))
    assert [each.id for each in read_labels(folder).answers] == ["a", "c"]


def test_one_process_at_a_time_writes(folder):
    with AnswerFile(folder), pytest.raises(DataError, match="is in use"):
        AnswerFile(folder)
    add(folder, answer("a"))


def test_file_systems_without_locks_do_not_check(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    add(folder, answer("a"))
    assert [each.id for each in read_labels(folder).answers] == ["a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a"}', "line 1: item: Field required"),
        ("[1]", "line 1: not a JSON object"),
        (json.dumps({**vars(answer("a")), "ranks": 5}), "line 1: ranks: Input should be a valid list"),
        (json.dumps({**vars(answer("a")), "ranks": [1, "b"]}), "line 1: ranks: Input should be a valid integer"),
        (json.dumps({**vars(answer("a")), "order": None}), "line 1: order: Input should be a valid list"),
        (json.dumps({**vars(answer("a")), "verdict": "good"}), "line 1: verdict: Input should be 'ranked', 'bad' or"),
        (json.dumps({**vars(answer("a")), "axes": [1]}), "line 1: axes: Input should be a valid dictionary"),
        (json.dumps({**vars(answer("a")), "item": "9"}), "line 1: no item has the id '9'"),
        *(
            (json.dumps({**vars(answer("a")), "order": order}), "line 1: order needs the numbers from 0 to 1")
            for order in ([0], [0, 0], [0, 1, 2])
        ),
        *(
            (json.dumps({**vars(answer("a")), "ranks": ranks}), "line 1: ranks needs an entry for each")
            for ranks in ([1], [1, 2, 3])
        ),
        (json.dumps({**vars(answer("a")), "verdict": "ranked", "ranks": []}), "line 1: a ranked answer needs ranks"),
        (json.dumps({**vars(answer("a")), "edits": ["x"]}), "line 1: edits needs an entry for each"),
        (json.dumps({**vars(answer("a")), "axes": {"overall": [1]}}), "line 1: overall needs an entry for each"),
    ],
)
def test_damaged_lines_are_named(folder, line, message):
    (folder / ANSWERS_FILE).write_text(f"{line}\n{json.dumps({'withdrawn': 'ana'})}\n")
    with pytest.raises(DataError, match=message):
        read_labels(folder)


def test_damaged_items_are_named(folder):
    (folder / ITEMS_FILE).write_text('{"id": "1", "prompt": "p", "responses": 5, "models": ["m"]}\n')
    with pytest.raises(DataError, match=r"items\.jsonl, line 1: responses: Input should be a valid list"):
        read_labels(folder)


def test_the_schema_of_a_line_is_built_once(folder, monkeypatch):
    built: list[object] = []
    real = pydantic.TypeAdapter.__init__
    monkeypatch.setattr(pydantic.TypeAdapter, "__init__", lambda *given: (built.append(given), real(*given))[1])
    write_items(folder, [Item(str(number), "p", ("a",), ("m",)) for number in range(20)])
    assert len(read_labels(folder).items) == 20
    assert len(built) <= 2


def test_a_folder_without_items_is_named(tmp_path):
    with pytest.raises(DataError, match=r"items.jsonl' does not exist"):
        read_labels(tmp_path)
