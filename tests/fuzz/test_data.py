"""Malformed data files: every row is a record or a rejection, every file a table or a one-line error."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from kedge.data import Table, read_rows, text_files
from kedge.data.fields import Role
from kedge.logs.json_lines import JsonLines
from tests.fuzz.outcome import case_counts, fuzz, line_or_result, lines_of
from tests.fuzz.values import JSON, TEXTS
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

PLAIN, CHAT = tiny_tokenizer(), tiny_tokenizer(chat_template=CHAT_TEMPLATE)
ROLES: tuple[Role, ...] = ("prompts", "demonstrations", "comparisons")
FIELDS = [
    *("prompt", "completion", "chosen", "rejected", "responses", "ranks", "margin", "messages", "text"),
    *("subreddit", "title", "post", "summary", "score", "stopped", "completions", "seed", "kedge:type"),
]
GOOD: dict[str, Any] = {
    **{"prompt": "Why?", "completion": " So.", "chosen": " Aye.", "rejected": " No.", "summary": "short"},
    **{"subreddit": "boats", "title": "Help", "post": "The rope broke."},
}
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]) | TEXTS, "content": JSON})
values = JSON | st.lists(message, max_size=3) | st.just("Why?")
row = st.dictionaries(st.sampled_from(FIELDS) | TEXTS, values, max_size=6).map(lambda fields: {**GOOD, **fields}) | JSON

ODD_LINES = [
    b"",
    b"   ",
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"{",
    b'{"prompt": "a"',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "a", "n": NaN}',
    b'{"prompt": "a", "ranks": [Infinity, -Infinity]}',
    b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}",
    b'{"prompt": ' * 2000 + b"1" + b"}" * 2000,
    b'{"prompt": "a", "deep": ' + b"[" * 400 + b"]" * 400 + b"}",
    b'{"prompt": "' + b"x" * 100_000 + b'"}',
    b'{"prompt": "a", "prompt": 1}',
    b"[1, 2]",
    b"null",
    b'{"' + b"k" * 100_000 + b'": "\\ud800"}',
    b'{"prompt": "a", "messages": 5}',
]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A JSON-lines file of generated rows and odd lines, with some bytes changed."""
    line = row.map(lambda value: json.dumps(value).encode()) | st.sampled_from(ODD_LINES) | st.binary(max_size=20)
    ending = draw(st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]))
    content = draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + ending.join(draw(st.lists(line, max_size=4)))
    return changed(draw, content) if draw(st.booleans()) else content


def changed(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with some bytes replaced, or truncated."""
    at = draw(st.integers(0, len(content)))
    return content[:at] + draw(st.sampled_from([b"", content[at:], draw(st.binary(max_size=8)) + content[at + 3 :]]))


@case_counts(120, 1200)
def test_json_lines(num_cases: int, tmp_path: Path, record_property) -> None:
    numbers = itertools.count()

    def check(case: tuple[bytes, str, int, str, bool]) -> None:
        content, suffix, reader, template, chat = case
        path, rejected = tmp_path / f"rows{suffix}", tmp_path / str(next(numbers)) / "rejected.jsonl"
        path.write_bytes(content)
        read_and_check(path, ROLES[reader], rejected, template=template, tokenizer=CHAT if chat else PLAIN)

    suffixes = st.sampled_from([".jsonl", ".ndjson", ".json"])
    templates = st.sampled_from(["none", "tldr"])
    fuzz(num_cases, st.tuples(files(), suffixes, st.integers(0, 2), templates, st.booleans()), check, record_property)


def read_and_check(path: Path, role: Role, rejected: Path, **settings: Any) -> Table[Any] | str:
    """Read a file: a table that accounts for every row and can be written to a file, or a one-line error."""
    table = line_or_result(
        read_rows, str(path), role, max_rejected_fraction=1.0, rejected_to=rejected, max_prompt_tokens=50, **settings
    )
    written = [json.loads(line) for line in lines_of(rejected)]
    if isinstance(table, Table):
        assert table.records
        assert [each["line"] for each in written] == [each.line for each in table.rejected]
        rejected.parent.mkdir(exist_ok=True)
        with closing(JsonLines(rejected.with_name("records.jsonl"))) as log:
            for record in table.records:
                log.write(vars(record))
    assert all(len(each["reason"]) < 400 and len(each["preview"]) <= 120 for each in written)
    return table


@case_counts(40, 400)
def test_parquet(num_cases: int, tmp_path: Path, record_property) -> None:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([{**GOOD, "n": n, "list": [n]} for n in range(20)]), buffer)
    whole = buffer.getvalue()
    numbers = itertools.count()

    @st.composite
    def damaged(draw: st.DrawFn) -> bytes:
        content = bytearray(whole)
        for _ in range(draw(st.integers(0, 4))):
            content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
        return bytes(content[: draw(st.sampled_from([len(content), draw(st.integers(0, len(content)))]))])

    def check(content: bytes) -> None:
        path = tmp_path / "rows.parquet"
        path.write_bytes(content)
        read_and_check(path, "prompts", tmp_path / str(next(numbers)) / "rejected.jsonl", tokenizer=PLAIN)

    fuzz(num_cases, damaged(), check, record_property)


@case_counts(5, 60)
def test_saved_data_sets(num_cases: int, tmp_path: Path, record_property) -> None:
    import datasets

    datasets.Dataset.from_list([GOOD] * 20).save_to_disk(str(tmp_path / "saved"))
    contents = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    numbers = itertools.count()

    @st.composite
    def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
        name = draw(st.sampled_from(sorted(contents)))
        return name, changed(draw, contents[name])

    def check(case: tuple[str, bytes]) -> None:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        for name, content in {**contents, case[0]: case[1]}.items():
            (folder / name).write_bytes(content)
        read_and_check(folder, "prompts", folder / "out" / "rejected.jsonl", tokenizer=PLAIN)

    fuzz(num_cases, damaged(), check, record_property)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\x00" * 100, b"[]", b"{}", b"[", b"PAR1"])
def test_files_without_a_row(role: Role, suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    assert isinstance(line_or_result(read_rows, str(path), role, tokenizer=PLAIN), str)


@pytest.mark.parametrize("role", ROLES)
def test_one_row_and_rows_that_are_all_alike(role: Role, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for count in (1, 50):
        path.write_text((json.dumps(GOOD) + "\n") * count, encoding="utf-8")
        assert len(read_rows(str(path), role, tokenizer=PLAIN).records) == count


@pytest.mark.parametrize("role", ROLES)
def test_lines_of_ten_megabytes(role: Role, tmp_path: Path) -> None:
    giant = "The tide went out.\n" * 550_000
    lines = [json.dumps({**GOOD, name: giant}) for name in ("prompt", "completion", "chosen", "id")]
    lines += ["x" * 10_000_000, "[" * 10_000_000, json.dumps(GOOD)[:-1] + " " * 10_000_000]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), *lines, ""]), encoding="utf-8")
    limits = {} if role == "prompts" else {"max_length": 60}
    table = line_or_result(
        read_rows,
        str(path),
        role,
        tokenizer=PLAIN,
        max_rejected_fraction=1.0,
        max_prompt_tokens=50,
        **limits,
    )
    assert isinstance(table, Table)
    assert len(table.records) + len(table.rejected) == 8
    assert {each.line for each in table.rejected} >= {2, 6, 7, 8}


def test_a_line_over_the_length_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_LONGEST_LINE", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + b"x" * 5432 + b'\n{"prompt": "b"}\n' + b"y" * 3000)
    table = read_rows(str(path), "prompts", tokenizer=PLAIN, max_rejected_fraction=1.0)
    assert [record.text for record in table.records] == ["a", "b"]
    assert [(each.line, each.reason) for each in table.rejected] == [
        (2, "the line is longer than 1,000 bytes"),
        (4, "the line is longer than 1,000 bytes"),
    ]
    monkeypatch.setattr(text_files, "_LONGEST_FILE", 10)
    path = tmp_path / "rows.json"
    path.write_text('["a", "b", "c"]')
    said = line_or_result(read_rows, str(path), "prompts", tokenizer=PLAIN)
    assert said == f"{path} is JSON of over 10 bytes; write its rows as JSON lines instead"


def test_rows_that_cannot_be_written_to_a_file() -> None:
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    endless: list[Any] = []
    endless.append(endless)
    strange = [deep, endless, {"a": endless}, {"\ud800": 1}, ["\ud800"]]
    table = line_or_result(
        read_rows,
        ["a", *({"prompt": "a", "id": value} for value in strange)],
        "prompts",
        tokenizer=PLAIN,
        max_rejected_fraction=1.0,
    )
    assert isinstance(table, Table)
    deeper = "field 'id' nests deeper than 100 levels"
    surrogate = "field 'id' holds a lone surrogate, which UTF-8 cannot write"
    assert [each.reason for each in table.rejected] == [deeper, deeper, deeper, surrogate, surrogate]


def test_integers_too_long_for_json(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "rows.jsonl")) as log:
        log.write({"n": 10**5000, "m": -(10**400)})
    written = json.loads((tmp_path / "rows.jsonl").read_text())
    assert written["n"].startswith("0x")
    assert written["m"] == -(10**400)


@pytest.mark.parametrize("column", [5, "text", [5], [{"role": "user"}], [{"role": "user", "content": None}], {}])
def test_a_messages_column_is_a_conversation(column: Any) -> None:
    values = [{"prompt": "Why?", "messages": column}]
    assert isinstance(line_or_result(read_rows, values, "prompts", tokenizer=PLAIN), str)


# Paths that are not regular files.


def test_pipes_devices_and_broken_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkfifo("pipe.jsonl")
    Path("loop.jsonl").symlink_to("loop.jsonl")
    Path("gone.jsonl").symlink_to("nowhere")
    Path("endless.jsonl").symlink_to("/dev/zero")
    Path("folder.jsonl").mkdir()
    Path("round").mkdir()
    Path("round/again").symlink_to(tmp_path / "round")
    os.mkfifo("round/pipe.jsonl")
    names = ["pipe", "pipe.jsonl", "loop.jsonl", "gone.jsonl", "endless.jsonl", "folder.jsonl", "round", "/dev/zero"]
    for name in [*names, "a\x00b.jsonl", "a\nb.jsonl", "\ud800.jsonl", "x" * 5000 + ".jsonl", "~nobody-of-that-name/x"]:
        said = line_or_result(read_rows, name, "prompts", tokenizer=PLAIN)
        assert isinstance(said, str), name


def test_a_folder_that_links_to_itself_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "again").symlink_to(tmp_path)
    table = line_or_result(read_rows, str(tmp_path), "prompts", tokenizer=PLAIN)
    assert isinstance(table, Table)
    assert len(table.records) == 1


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root can drop permissions")
def test_files_without_permission(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD))
    path.chmod(0)
    (tmp_path / "locked").mkdir(mode=0)
    os.seteuid(65534)
    try:
        for name in (path, tmp_path / "locked", tmp_path / "locked" / "rows.jsonl"):
            assert isinstance(line_or_result(read_rows, str(name), "prompts", tokenizer=PLAIN), str)
    finally:
        os.seteuid(0)


# Small files that expand beyond memory.


def parquet_file(path: Path, column: Any, **settings: Any) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": column}), path, compression="zstd", **settings)
    return path


def same_texts(text: str, count: int) -> Any:
    """A column of one text, stored once."""
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text]))


def one_list(column: Any) -> Any:
    """A whole column as one row."""
    import pyarrow

    return pyarrow.ListArray.from_arrays(pyarrow.array([0, len(column)], pyarrow.int32()), column)


def saved_rows(folder: Path, column: Any) -> Path:
    """A saved data set whose file is compressed."""
    import datasets
    import pyarrow

    table, options = pyarrow.table({"prompt": column}), pyarrow.ipc.IpcWriteOptions(compression="zstd")
    datasets.Dataset(table.slice(0, 1)).save_to_disk(str(folder))
    [path] = folder.glob("*.arrow")
    with pyarrow.ipc.new_stream(str(path), table.schema, options=options) as stream:
        stream.write_table(table)
    return folder


def array_file(path: Path) -> Path:
    path.write_bytes(b"[" + b"{}," * 6_000_000 + b"{}]")
    return path


def nothing(count: int) -> Any:
    import pyarrow

    return pyarrow.nulls(count)


BOMBS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "one text, many rows": (
        lambda folder: parquet_file(folder / "rows.parquet", same_texts("a" * 5_000_000, 10_000)),
        "reading past row 0 needs more than",
    ),
    "one row": (
        lambda folder: parquet_file(folder / "rows.parquet", one_list(same_texts("c" * 1_000_000, 10_000))),
        "reading past row 0 needs more than",
    ),
    "rows of nothing": (
        lambda folder: parquet_file(folder / "rows.parquet", nothing(200_000_000)),
        "claims to hold 200,000,000 rows in ",
    ),
    "a saved data set of one text": (
        lambda folder: saved_rows(folder / "saved", same_texts("a" * 5_000_000, 10_000)),
        "reading past row 0 needs more than",
    ),
    "a saved data set of nothing": (
        lambda folder: saved_rows(folder / "saved", nothing(200_000_000)),
        "claims to hold 200,000,000 rows in ",
    ),
    "an array of nothing": (lambda folder: array_file(folder / "rows.json"), "needs more than the 0.11 GiB"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
@pytest.mark.parametrize("bomb", BOMBS)
def test_small_files_that_expand_beyond_memory(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = BOMBS[bomb]
    path = make(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < 20_000_000
    monkeypatch.setattr("kedge.data.sources.free_memory", lambda: 2**27)
    line = line_or_result(read_rows, path, "prompts", tokenizer=PLAIN)
    assert isinstance(line, str)
    assert str(path) in line
    assert said in line


# Chat templates, which come with the model.


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(1000000000) %}x{% endfor %}", "rejects the conversation: Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took over 0.5 s"),
        ("{{ 3 ** (10 ** 9) % 7 }}", " over 0."),
        # Single operations of C, which no signal ends.
        ("{% set l = range(99999) | list * 100 %}{{ range(99999) | select('in', l) | list * 0 }}", "took over 0.5 s"),
        ("{{ 7 ** 3000000 % 3 ** 1500000 }}", "took over 0.5 s"),
        ("{{ 'a' * 10000000000 }}", "needs over 0.125 GiB of memory"),
        ("{{ 'a' * 3000000 }}", "renders 3,000,000 characters"),
        ("{{ '%10000000000d' % 1 }}", "needs over 0.125 GiB of memory"),
        ("{{ 'a' | center(10000000000) }}", "needs over 0.125 GiB of memory"),
        ("{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}", "needs over 0.125 GiB of memory"),
        (
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
            "needs over 0.125 GiB of memory",
        ),
        ("{{ range(99999) | list * 99999 }}", "needs over 0.125 GiB of memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rejects the conversation"),
        ("{{ 1 // 0 }}", "rejects the conversation"),
        ("{{ messages[0]['content'].encode('no-such-codec') }}", "rejects the conversation: unknown encoding"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects the conversation"),
        ("{{ cycler.__init__.__globals__.os.system('touch trap') }}", "rejects the conversation"),
        ("{{ messages.append(1) }}", "rejects the conversation"),
        ("{{ raise_exception('no\nsystem\x1b[2J role') }}", "rejects the conversation: no system"),
        ("{% if", "rejects the conversation"),
        ("{% include '/etc/passwd' %}", "rejects the conversation"),
        ("{{ '{0.__class__}'.format(1) }}", "leaves out a part of message 1"),
        ("{{ undefined_function() }}", "rejects the conversation"),
        (5, "rejects the conversation"),
        ({"other": "x"}, "rejects the conversation"),
    ],
)
def test_chat_templates(template: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A busy machine must not run out of time first where another limit is expected.
    monkeypatch.setattr("kedge.data.chat.TEMPLATE_SECONDS", 0.5 if " over 0." in said and "memory" not in said else 60)
    monkeypatch.setattr("kedge.data.chat.TEMPLATE_MEMORY", 2**27)
    monkeypatch.setattr("kedge.data.chat.LONGEST_TEXT", 1_000_000)
    tokenizer = tiny_tokenizer(chat_template=template)
    row = {"messages": [{"role": "user", "content": "Why?"}]}
    line = line_or_result(read_rows, [row], "prompts", tokenizer=tokenizer)
    assert isinstance(line, str)
    assert said in line
    assert not Path("trap").exists()
