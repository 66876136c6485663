import bz2
import gzip
import json
import lzma
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge import downloads as hub
from kedge.data import Sources, read_rows
from kedge.data.sources import rows_of
from kedge_base.errors import DataError
from tests.tiny import tiny_tokenizer

ROWS = [{"prompt": "a"}, {"prompt": "b"}]


def written(path: Path, rows: list[dict] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def values(source) -> list:
    return [row.value for row in rows_of(source)]


def test_importing_the_package_loads_no_slow_library():
    code = "import sys, kedge.data; print({'transformers', 'datasets', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_json_lines_with_bom_crlf_and_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}')
    assert [(row.value, row.line, row.fault) for row in rows_of(path)] == [(ROWS[0], 1, None), (ROWS[1], 4, None)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "train-00000-of-00001.parquet"])
def test_a_git_lfs_pointer_is_named(tmp_path, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4000\n"
    (tmp_path / name).write_text(pointer)
    for source in [tmp_path / name, *([tmp_path] if name != "rows.json" else [])]:
        with pytest.raises(DataError, match=f"{name} is a git-lfs pointer.* `git lfs pull`"):
            values(source)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 13"),
        (b'{"prompt": ', "not JSON"),
        (b'{"prompt": "a', "not JSON: Unterminated string starting at column 12"),
        (b"[1, 2]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\x00\x00\x00", "not JSON"),
        (b"[" * 200_000, "the nesting too deep"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "a number is too long"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_bad_line_does_not_lose_the_others(tmp_path, line, fault):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    rows = list(rows_of(path))
    assert (rows[0].value, rows[-1].value) == (ROWS[0], ROWS[1])
    assert fault in rows[1].fault
    assert len(rows[1].preview) <= 120
    assert rows[1].place == f"{path}:2"


def test_a_json_array_and_a_json_file_of_lines(tmp_path):
    array = tmp_path / "array.json"
    array.write_text(json.dumps(ROWS, indent=1))
    assert values(array) == ROWS == values(written(tmp_path / "lines.json"))
    array.write_text("[1, 2")
    with pytest.raises(DataError, match="starts like a JSON array"):
        values(array)


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ({"version": "1", "data": ROWS}, ROWS),
        ({"data": ROWS}, ROWS),
        ({"data": ROWS, "schema": {"fields": []}}, ROWS),  # pandas: to_json(orient="table"), "columns"
        ({"prompt": {"0": "a", "1": "b"}}, ROWS),
        ({"id1": {"prompt": "a"}, "id2": {"prompt": "b"}}, ROWS),
        ({"prompt": ["a", "b"]}, ROWS),
        ({"train": ROWS, "test": ROWS[:1]}, ROWS),
        ({"prompt": "a"}, ROWS[:1]),
        (ROWS, ROWS),
        *(
            (row, [row])
            for row in (
                {"messages": [{"role": "user", "content": "a"}]},
                {"id": 1, "conversation": [{"role": "user", "content": "a"}]},
                {"dialog": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
                {"input_ids": [5, 6], "labels": [-100, 6]},
            )
        ),
        ({"input_ids": [[5, 6], [7]]}, [{"input_ids": [5, 6]}, {"input_ids": [7]}]),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_as_a_whole(tmp_path, value, rows, suffix, indent):
    path = tmp_path / f"rows{suffix}"
    path.write_text(json.dumps(value, indent=indent))
    assert values(path) == rows


names = st.sampled_from(["columns", "data", "prompt", "messages", "train", "index"])
entries = st.recursive(
    st.text(max_size=2) | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
)


@settings(max_examples=80, deadline=None)
@given(value=st.dictionaries(names, entries, max_size=3))
def test_any_json_object_is_rows_or_one_line(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "rows.json"
    path.write_text(json.dumps(value, indent=1))
    with suppress(DataError):
        assert isinstance(values(path), list)


def test_several_json_values_with_line_breaks_and_damaged_ones(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("\n".join(json.dumps(row, indent=2) for row in ROWS))
    assert values(path) == ROWS
    path.write_text(json.dumps({"data": ROWS}, indent=2)[:-2])
    with pytest.raises(DataError, match=r"starts like a JSON object but cannot be parsed as one: .* line 9"):
        values(path)
    path.write_text(json.dumps({"good": ROWS, "bad": ROWS}))
    with pytest.raises(DataError, match=r"several lists of rows \(good, bad\); write the one to read"):
        values(path)
    path.write_text('{"prompt":\n{"prompt": "b"}\n')
    assert [(row.line, row.fault is None) for row in rows_of(path)] == [(1, False), (2, True)]


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.bz2", "rows.JSONL.xz", "rows.ndjson.zst", "rows.csv.gz"])
def test_compressed_files(tmp_path, name):
    text = "prompt\na\nb\n" if ".csv" in name else "".join(json.dumps(row) + "\n" for row in ROWS)
    kind = name.rpartition(".")[2]
    packed = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.get(kind, pa.Codec("zstd").compress)
    content = bytes(packed(text.encode()))
    (tmp_path / name).write_bytes(content)
    assert values(tmp_path / name) == ROWS == values([str(tmp_path / name)])
    if ".json." not in name:
        assert values(tmp_path) == ROWS
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        values(tmp_path / name)


def test_tables_as_text(tmp_path):
    path = tmp_path / "rows.csv"
    long = "x" * 200_000
    path.write_text(f'\ufeffprompt,answer,\n"a, ""b""\nc",1.5,0\n\n{long},,1\nonly\n', encoding="utf-8")
    rows = list(rows_of(path))
    assert [row.value for row in rows[:2]] == [{"prompt": 'a, "b"\nc', "answer": "1.5"}, {"prompt": long}]
    assert (rows[2].line, rows[2].fault) == (6, "the row has 1 cells, the first line 3")
    for name, separator in (("rows.tsv", "\t"), ("other.csv", ";"), ("third.csv", "\t")):
        (tmp_path / name).write_text(f"prompt{separator}answer\na, b{separator}c\n")
        assert values(tmp_path / name) == [{"prompt": "a, b", "answer": "c"}]
    # Spreadsheets leave lines of empty cells behind.
    path.write_text("\n prompt , answer\na,b\n,\n , \nc,d\n,\n")
    assert [(row.line, row.value) for row in rows_of(path)] == [
        (3, {"prompt": "a", "answer": "b"}),
        (6, {"prompt": "c", "answer": "d"}),
    ]
    for text, reason in (
        ('prompt\n"a\nb\nc\n', "a text with quotation marks"),
        ('prompt\n"a" b\n', "a text with quotation marks"),
        ("prompt,prompt\n", "two columns have the same name"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=reason):
            values(path)
    path.write_bytes(b"prompt\ncaf\xe9\n")
    with pytest.raises(DataError, match="not UTF-8; save it as UTF-8"):
        values(path)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (b"PK\x03\x04", "an archive; unpack it"),
        (gzip.compress(b"{}", mtime=0), "compressed by gzip"),
        (b"PAR1", "a Parquet file"),
        ("{}".encode("utf-16"), "UTF-16; save it as UTF-8"),
    ],
)
def test_files_that_are_something_else_are_named(tmp_path, start, reason):
    for name in ("rows.jsonl", "rows.json", "rows.csv"):
        (tmp_path / name).write_bytes(start)
        with pytest.raises(DataError, match=rf"{name} is {reason}"):
            values(tmp_path / name)


def test_parquet(tmp_path):
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    assert values(tmp_path / "rows.parquet") == ROWS
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is not")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as Parquet"):
        values(tmp_path / "bad.parquet")


@pytest.mark.parametrize("keeps_dictionary", [True, False])
def test_a_parquet_file_of_rows_that_share_a_text_is_refused_before_all_are_read(tmp_path, keeps_dictionary):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), ["x" * 1_000_000])
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"prompt": texts}), path, compression="zstd", store_schema=keeps_dictionary)
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"bomb\.parquet has .* its first 512 rows 51.*, which is implausible"):
        values(path)


def test_a_folder_gives_its_train_split_else_everything(tmp_path):
    written(tmp_path / "split" / "train-00000-of-00002.jsonl", ROWS[:1])
    written(tmp_path / "split" / "train-00001-of-00002.jsonl", ROWS[1:])
    written(tmp_path / "split" / "test.jsonl", [{"prompt": "held out"}])
    (tmp_path / "split" / "dataset_infos.json").write_text("{}")
    assert values(tmp_path / "split") == ROWS
    assert values(f"{tmp_path / 'split'}:test") == [{"prompt": "held out"}]
    written(tmp_path / "all" / "one.jsonl", ROWS[:1])
    written(tmp_path / "all" / "two.jsonl", ROWS[1:])
    assert values(tmp_path / "all") == ROWS
    with pytest.raises(DataError, match="for the split 'dev'"):
        values(f"{tmp_path / 'all'}:dev")


def test_a_folder_of_several_splits_that_may_be_meant_is_refused(tmp_path):
    for names, reason in (
        (["train_sft-00000-of-00001", "train_gen-00000-of-00001"], r"\(train_gen, train_sft\); name one, e\.g\. .*:tr"),
        (["train", "train_more"], r"\(train, train_more\)"),
        (["test", "validation"], r"\(test, validation\)"),
        (["sft-00000-of-00001", "prefs-00000-of-00001"], r"\(prefs, sft\)"),
    ):
        folder = tmp_path / names[0]
        for name in names:
            written(folder / f"{name}.jsonl", [{"prompt": name}])
        with pytest.raises(DataError, match=f"has several splits {reason}"):
            values(folder)
        split = names[0].partition("-")[0]
        assert values(f"{folder}:{split}") == [{"prompt": names[0]}]
    with pytest.raises(DataError, match=r"holds no .* for the split 'dev' .*; it has prefs, sft"):
        values(f"{folder}:dev")


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["train/0.jsonl", "train/1.jsonl", "test/0.jsonl"], 2),
        (["gsm8k-train.jsonl", "gsm8k-test.jsonl"], 1),
        (["sft.jsonl", "test.jsonl"], 1),
        (["train_1.jsonl", "train_2.jsonl", "train-checkpoint.jsonl.bak"], 2),
        (["train.jsonl", ".ipynb_checkpoints/train.jsonl"], 1),
        (["base/train.jsonl", "online/train.jsonl"], 2),
        (["train-00000-of-00002-0123456789abcdef.jsonl", "train-00001-of-00002-fedcba9876543210.jsonl"], 2),
        (["one.jsonl", "notes.csv"], 1),
        (["test.jsonl"], 1),
    ],
)
def test_files_of_a_folder_that_are_read(tmp_path, names, read):
    for name in names:
        written(tmp_path / name, [{"prompt": name}])
    assert values(tmp_path) == [{"prompt": name} for name in names[:read]]


def test_configurations_of_a_folder_are_not_mixed(tmp_path):
    for name in ("main", "socratic"):
        written(tmp_path / name / "train-00000-of-00001.jsonl", [{"prompt": name}])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n- config_name: socratic\n---\n# Problems\n"
    )
    with pytest.raises(
        DataError, match=r"several configurations \(main, socratic\); name the folder of one, e\.g\. .*/main"
    ):
        values(tmp_path)
    assert values(tmp_path / "main") == [{"prompt": "main"}]


def test_lines_may_be_conversations(tmp_path):
    turns = [{"role": "user", "content": "a"}]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(turns)}\n{json.dumps(turns)}\n[1]\n")
    assert [(row.value, row.fault) for row in rows_of(tmp_path / "rows.jsonl")] == [
        *[(turns, None)] * 2,
        ([1], "not a JSON object"),
    ]
    (tmp_path / "one.jsonl").write_text(json.dumps(turns))
    assert values(tmp_path / "one.jsonl") == [turns]


def test_copies_in_a_folder_are_not_read_twice(tmp_path):
    written(tmp_path / "train.jsonl")
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "train.parquet"))
    with pytest.raises(DataError, match=r"has the same names as \.jsonl, \.parquet, which may be copies"):
        values(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ("prompts.jsonl", "prompts (1).jsonl", False),
        ("prompts.jsonl", "prompts(2).jsonl", False),
        ("train.csv", "train - Copy.csv", False),
        ("train.jsonl.gz", "train copy 2.jsonl.gz", False),
        ("data.jsonl", "data-checkpoint.jsonl", False),
        ("train.parquet", "train.bak.parquet", False),
        ("train.jsonl", "old/train.jsonl", True),
        ("data_v1.jsonl", "data_v2.jsonl", True),
        ("a.csv", "b.csv", True),
    ],
)
def test_files_that_look_like_copies_of_others_are_named(tmp_path, first, second, is_equal):
    (tmp_path / second).parent.mkdir(exist_ok=True)
    (tmp_path / first).write_text('{"prompt": "a"}\n')
    (tmp_path / second).write_text('{"prompt": "%s"}\n' % ("a" if is_equal else "b"))
    with pytest.raises(
        DataError, match=r": (.*) looks like a copy of (.*); remove it, or name the files to read$"
    ) as found:
        list(rows_of(tmp_path))
    assert str(tmp_path) in str(found.value)
    assert first in str(found.value)
    assert second in str(found.value)


def test_a_copy_is_found_beside_other_files_of_its_size(tmp_path):
    for name, text in (("a", "x"), ("b", "y"), ("c", "x")):
        written(tmp_path / f"{name}.jsonl", [{"prompt": text}])
    with pytest.raises(DataError, match=r": c\.jsonl looks like a copy of a\.jsonl;"):
        values(tmp_path)


def test_files_of_one_size_are_compared_only_if_they_begin_alike(tmp_path, monkeypatch):
    monkeypatch.setattr("filecmp.cmp", lambda *_, **__: pytest.fail("they begin differently"))
    for name in "abcd":
        written(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    assert len(values(tmp_path)) == 4


def test_files_of_one_size_are_no_copies(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "old/a.jsonl"):
        written(tmp_path / name, [{"prompt": name[:1] + name[-7:-6]}])
    (tmp_path / "old/a.jsonl").write_text('{"prompt": "zz"}\n')
    for name in ("c.jsonl", "d.jsonl"):
        (tmp_path / name).touch()
    assert len(values(tmp_path)) == 3


@pytest.mark.parametrize("end", ["jsonl", "json", "csv", "parquet"])
def test_prompts_know_their_place_among_rows_that_were_dropped(tmp_path, end):
    rows = [{"prompt": "a", "x": 1}, {"prompt": "", "x": 2}, {"prompt": "c", "x": 3}]
    path = tmp_path / f"rows.{end}"
    if end == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif end == "csv":
        path.write_text("prompt,x\na,1\n,2\nc,3\n")
    else:
        path.write_text(json.dumps(rows) if end == "json" else "".join(f"{json.dumps(row)}\n" for row in rows))
    table = read_rows(path, "prompts", tokenizer=tiny_tokenizer(), max_rejected_fraction=0.5)
    first = 2 if end == "csv" else 1  # the first line of a table names its columns
    assert [prompt.place for prompt in table.records] == [f"{path}:{first}", f"{path}:{first + 2}"]
    assert table.rejected[0].line == first + 1


def test_folders_that_datasets_saved(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": dataset, "dev": dataset.select([1])}).save_to_disk(str(tmp_path / "splits"))
    assert values(tmp_path / "plain") == ROWS == values(tmp_path / "splits")
    assert values(f"{tmp_path / 'splits'}:dev") == ROWS[1:]
    with pytest.raises(DataError, match="has no split 'test'; it has train, dev"):
        values(f"{tmp_path / 'splits'}:test")
    datasets.DatasetDict({"dev": dataset}).save_to_disk(str(tmp_path / "one"))
    assert values(tmp_path / "one") == ROWS
    with pytest.raises(DataError, match="without splits"):
        values(f"{tmp_path / 'plain'}:train")


def test_tables_from_python():
    dataset = datasets.Dataset.from_list(ROWS)
    assert values(dataset) == values(dataset.to_iterable_dataset()) == ROWS
    assert values(datasets.DatasetDict({"train": dataset, "dev": dataset.select([1])})) == ROWS
    assert values(datasets.DatasetDict({"dev": dataset})) == ROWS
    with pytest.raises(DataError, match=r"the data has several splits \(a, b\); pass one of them"):
        values(datasets.DatasetDict({"a": dataset, "b": dataset}))
    frame = datasets.Dataset.from_dict({"prompt": ["a", "b"], "margin": [1.5, None]}).to_pandas()
    assert values(frame) == [{"prompt": "a", "margin": 1.5}, {"prompt": "b"}]


def test_arrays_in_tables_from_python_are_lists(tmp_path):
    rows = [{"messages": [{"role": "user", "content": [{"text": "a"}]}], "ranks": [1, 2], "flags": [True]}]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(str(tmp_path / "rows.parquet"))
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert type(frame["messages"][0]) is np.ndarray
    table = pq.read_table(tmp_path / "rows.parquet")
    for data in (frame, table, frame.to_dict("records"), dataset.with_format("numpy"), dataset.with_format("torch")):
        assert values(data) == rows
    [row] = values([{"prompt": np.str_("a"), "rank": np.int64(2), "ok": np.bool_(True), "score": np.float32(0.5)}])
    assert row == {"prompt": "a", "rank": 2, "ok": True, "score": 0.5}
    assert {type(value) for value in row.values()} == {str, int, bool, float}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:test", ("org/name", None, "test")),
        ("org/name:main:test", ("org/name", "main", "test")),
        ("org/name:train[:10]", ("org/name", None, "train[:10]")),
        ("org/name:main:train[5:10]", ("org/name", "main", "train[5:10]")),
        ("name", ("name", None, "train")),
    ],
)
def test_hub_ids(monkeypatch, name, call):
    calls = []

    def load_dataset(repository, config, *, split):
        calls.append((repository, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "hub_fault", lambda name, kind: None)
    assert values(name) == ROWS
    assert calls == [call]


def test_an_unreachable_hub_id_is_one_clear_line(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "hub_fault", lambda name, kind: None)
    with pytest.raises(
        DataError, match=r"^'org/name' is not a local file and cannot be read .*: Couldn't reach the hub$"
    ):
        values("org/name")


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/folder", "a/b/c", "data/x.jsonl"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name):
    with pytest.raises(DataError, match="no such file or folder"):
        values(name)


def test_invalid_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.jsonl"):
        values(tmp_path / "empty")
    (tmp_path / "rows.xlsx").write_text("a,b")
    with pytest.raises(
        DataError,
        match=r"unsupported file type; supported: \.jsonl.*; texts also as \.gz, .* as a JSON line",
    ):
        values(tmp_path / "rows.xlsx")
    for source in (3, None, {"prompt": "a"}):
        with pytest.raises(DataError, match="the data must be a file, a hub id, a list of rows"):
            values(source)
    with pytest.raises(DataError, match=r"^python:in_memory is data that was passed from Python, or as text; pass it"):
        values("python:in_memory")
    for name in ("", "a:b:c:d", "::"):
        with pytest.raises(DataError, match="is not a data source"):
            values(name)


@pytest.mark.parametrize("text", ["Once upon a time", "Is 1/2 or 3/4 more?", "Q: why? A: so"])
def test_a_text_in_place_of_a_list_of_texts_is_answered(text):
    with pytest.raises(DataError, match=r"; for a text, pass a list, in Python: prompts=\[…\]$"):
        values(text)
    with pytest.raises(DataError, match=r"no such file or folder$"):
        values("./missing")


def test_lists_of_rows_of_texts_and_of_sources(tmp_path):
    one, two = written(tmp_path / "one.jsonl", ROWS[:1]), written(tmp_path / "two.jsonl", ROWS[1:])
    assert values(ROWS) == values(iter(ROWS)) == values([one, two]) == values([str(one), str(two)]) == ROWS
    assert values(Sources((str(one), str(two)))) == ROWS
    assert values(["Tell me a story.", "Why?"]) == ["Tell me a story.", "Why?"]
    assert values(["1/2", "3/4"]) == ["1/2", "3/4"]
    assert values([]) == []


def test_a_name_may_start_at_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "one.jsonl")
    (tmp_path / "rows").mkdir()
    written(tmp_path / "rows" / "train.jsonl")
    assert values("~/one.jsonl") == values("~/rows") == values("~/rows:train") == values(["~/rows"]) == ROWS
    assert values(Sources(("~/one.jsonl",))) == ROWS


def test_a_misspelled_file_in_a_list_is_not_taken_for_a_text(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        values([str(written(tmp_path / "one.jsonl")), "tow.jsonl"])
