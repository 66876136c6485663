"""Reading the logs of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kedge_base.errors import DataError
from kedge_base.run_folder.record_format import read_json_lines


def test_the_last_row_may_be_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n{"a": ', encoding="utf-8")
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("line", ["{", "[1]", json.dumps("text"), "9" * 5000, "[" * 100_000])
def test_a_line_that_is_no_row_is_one_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.jsonl', line 2: not a JSON object"):
        read_json_lines(path)
