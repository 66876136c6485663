import json
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kedge import hub
from kedge.data import Sources
from kedge.data.sources import rows_of
from kedge.errors import DataError

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
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"unsupported file type; supported: \.jsonl"):
        values(tmp_path / "rows.csv")
    for source in (3, None, {"prompt": "a"}):
        with pytest.raises(DataError, match="the data must be a file, a hub id, a list of rows"):
            values(source)
    for name in ("", "a:b:c:d", "::"):
        with pytest.raises(DataError, match="is not a data source"):
            values(name)


def test_lists_of_rows_of_texts_and_of_sources(tmp_path):
    one, two = written(tmp_path / "one.jsonl", ROWS[:1]), written(tmp_path / "two.jsonl", ROWS[1:])
    assert values(ROWS) == values(iter(ROWS)) == values([one, two]) == values([str(one), str(two)]) == ROWS
    assert values(Sources((str(one), str(two)))) == ROWS
    assert values(["Tell me a story.", "Why?"]) == ["Tell me a story.", "Why?"]
    assert values(["1/2", "3/4"]) == ["1/2", "3/4"]
    assert values([]) == []


def test_a_misspelled_file_in_a_list_is_not_taken_for_a_text(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        values([str(written(tmp_path / "one.jsonl")), "tow.jsonl"])
