"""Rows are in the file whole, or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kedge.logs.json_lines import JsonLines, read_json_lines
from kedge_base.errors import OutputError


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE")
def test_a_full_disk_is_one_line_and_leaves_no_half_row(tmp_path: Path) -> None:
    import resource

    lines = JsonLines(tmp_path / "log.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        lines.write({"update": 1})
        with pytest.raises(OutputError, match=r"log\.jsonl cannot be written: File too large"):
            lines.write({"update": 2, "text": "x" * 200})
        lines.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_json_lines(tmp_path / "log.jsonl") == [{"update": 1}]


def test_half_a_row_that_a_killed_process_left_is_removed_before_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    row = b'{"update": 1}\n'
    for left, kept in ((b'{"upd', 0), (row + b'{"update": 2, "te', 1), (row + b"x" * 70_000, 1)):
        path.write_bytes(left)
        lines = JsonLines(path)
        lines.write({"update": 9})
        lines.close()
        assert [row["update"] for row in read_json_lines(path)] == [*range(1, kept + 1), 9]
