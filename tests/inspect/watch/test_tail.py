"""Reading a growing log gives the same rows as reading all of it."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kedge.inspect.watch.tail import Tail
from kedge.logs.json_lines import read_json_lines, truncate_rows


def updates(tail: Tail) -> list[int]:
    return [row["update"] for row in tail.rows]


def line(update: int, text: str = "") -> str:
    return json.dumps({"update": update, "text": text}, ensure_ascii=False) + "\n"


def test_a_row_counts_once_its_line_is_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    assert (tail.read(), updates(tail)) == (False, [])
    path.write_text("")
    assert (tail.read(), updates(tail)) == (True, [])
    path.write_text(line(1) + line(2)[:9])
    assert (tail.read(), updates(tail)) == (True, [1])
    assert not tail.read()
    path.write_text(line(1) + line(2))
    assert (tail.read(), updates(tail)) == (True, [1, 2])
    assert (tail.read(), updates(tail)) == (False, [1, 2])


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=9), max_size=8),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_the_rows_do_not_depend_on_how_they_were_written(tmp_path_factory, texts, cuts):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    content = "".join(line(number, text) for number, text in enumerate(texts)).encode()
    tail = Tail(path)
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    with path.open("wb", buffering=0) as file:
        for begin, end in itertools.pairwise(edges):
            file.write(content[begin:end])
            tail.read()
    assert list(tail.rows) == read_json_lines(path)


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(map(line, range(1000))))
    tail = Tail(path)
    tail.read()
    parsed: list[str] = []
    monkeypatch.setattr(json, "loads", lambda text, loads=json.loads: parsed.append(text) or loads(text))
    with path.open("a") as file:
        file.write(line(1000))
    tail.read()
    assert len(parsed) == 1
    assert updates(tail) == [*range(1001)]


def test_a_truncated_log_is_read_again(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(map(line, range(1, 6))))
    tail = Tail(path)
    tail.read()
    truncate_rows(path, 3)  # as a resumed run does: the file is replaced
    with path.open("a") as file:
        file.writelines(map(line, range(4, 9)))  # and is longer than before at the next read
    assert (tail.read(), updates(tail)) == (True, [1, 2, 3, 4, 5, 6, 7, 8])
    path.unlink()
    assert (tail.read(), updates(tail)) == (True, [])
    assert not tail.read()


def test_the_end_of_a_long_log_is_enough(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(map(line, range(1000))))
    tail = Tail(path, keep=3, last_bytes=200)
    tail.read()
    assert updates(tail) == [997, 998, 999]
    with path.open("a") as file:
        file.write(line(1000))
    assert (tail.read(), updates(tail)) == (True, [998, 999, 1000])


def test_a_line_longer_than_the_first_read_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(line(1, "x" * 500))
    tail = Tail(path, last_bytes=100)
    tail.read()
    assert updates(tail) == []
    with path.open("a") as file:
        file.write(line(2))
    tail.read()
    assert updates(tail) == [2]


def test_rows_without_an_update_are_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"update": 1}\n[1]\n{"a": 1}\n\n3\n{"update": 2}\n')
    tail = Tail(path)
    tail.read()
    assert updates(tail) == [1, 2]


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"update": 1}\n{"upd\n[1]\n{"update": ' + "9" * 5000 + "}\n" + "[" * 9000 + '\n{"update": 2}\n')
    tail = Tail(path)
    tail.read()
    assert updates(tail) == [1, 2]
    assert tail.skipped == 4


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "log.jsonl")
    tail = Tail(tmp_path / "log.jsonl")
    assert not tail.read()
