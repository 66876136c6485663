"""The benchmark of GSM8K: its rows, the harness's way to read an answer, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gsm8k import ARMS, demonstrations, flexible, read_rows, run_name, table
from bench.processes import BenchError

ANSWER = "She sold 48/2 = <<48/2=24>>24 in May.\n#### 1,024"


def test_rows_are_prompts_and_solutions_without_the_calculators_notes(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": ANSWER}) + "\n")
    rows = read_rows(file)
    assert rows == [{"prompt": [{"role": "user", "content": "How many?"}], "answer": ANSWER}]
    assert demonstrations(rows)[0]["completion"] == "She sold 48/2 = 24 in May.\n#### 1,024"
    file.write_text('{"problem": "How many?"}\n')
    with pytest.raises(BenchError, match="not GSM8K's rows of question and answer"):
        read_rows(file)


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        ("It is $1,024.", True),
        ("24, so 1024\nQuestion: What is 3?", True),
        ("1024 clips in 2 months", False),
        ("#### 1024.00", False),  # compared as text
        ("I do not know.", False),
    ],
)
def test_the_last_number_is_the_answer_as_text(response: str, is_right: bool) -> None:
    assert flexible(response, ANSWER) == is_right


def test_the_table_has_a_row_for_each_start_and_arm() -> None:
    solved = {"greedy": [0.0, 1.0], "bare": [0.0, 0.0], "pass": {"8": {"value": 0.5, "low": 0.1, "high": 0.9}}}
    arm = next(iter(ARMS))
    runs = {"start": solved, "sft": solved, run_name(arm, 0): {**solved, "arm": arm, "seed": 0, "seconds": 1800.0}}
    lines = table(runs, 40).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| as it is", "| fine-tuned", f"| {arm}, 40 updates"]
    assert lines[-1].split(" | ")[1:] == ["1", "50.0 %", "50.0 %", "0.0 %", "0.50 |"]
