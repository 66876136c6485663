"""The measurement of the verifiers: corruptions change the answer, and the table says what was found."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.graders import (
    CORRECTED,
    EARLIER,
    HOSTILE,
    KINDS,
    NUMBERS,
    UNASKED_UNIT,
    WRONG_UNIT,
    Problem,
    Task,
    corrupt,
    gsm8k_problem,
    hostile,
    is_refused,
    main,
    mbpp_task,
    programs,
    read,
    svamp_pairs,
    svamp_problem,
    table,
)
from bench.processes import BenchError
from bench.tables import renewed
from kedge_tasks.sandbox import open_sandbox
from tests.tasks.verify.test_programs import needs_sandbox

IMPOSSIBLE = {0: ("other sign", "times ten", "permuted digits"), 5: ("permuted digits",), 99: ("permuted digits",)}
"""Kinds that cannot change a value."""

STEPS = "Half of 144 is 72.\n"


def last_number(text: str) -> int:
    return int(text.rstrip(".%").split()[-1].strip("$€%"))


@pytest.mark.parametrize("value", [72, -72, 0, 5, 10, 99, 12_345, 22_090_603])
@pytest.mark.parametrize("kind", [*NUMBERS, EARLIER, CORRECTED])
def test_a_corrupted_number_is_another(kind: str, value: int) -> None:
    for seed in range(50):
        pair = corrupt(kind, Problem(STEPS, value, None), random.Random(seed))
        if pair is None:
            assert kind in IMPOSSIBLE.get(value, ())
            continue
        response, answer = pair
        assert answer == str(value)
        assert last_number(response) != value


def test_each_kind_makes_its_own_mistake() -> None:
    def wrong(kind: str) -> set[str]:
        found = [corrupt(kind, Problem("", 21, None), random.Random(seed)) for seed in range(200)]
        return {pair[0].removeprefix("#### ") for pair in found if pair}

    assert wrong("off by one") == {"20", "22"}
    assert wrong("other sign") == {"-21"}
    assert wrong("times ten") == {"210"}
    assert wrong("permuted digits") == {"12"}
    inserted = {f"{digit}21" for digit in "123456789"} | {f"2{digit}1" for digit in "0123456789"}
    assert wrong("an extra digit") == inserted | {f"21{digit}" for digit in "0123456789"}
    assert wrong(EARLIER) == {f"It is 21, and then {other}." for other in range(22, 31)}


def test_a_wrong_unit_is_that_of_a_row_which_has_one() -> None:
    for seed in range(20):
        response, answer = corrupt(WRONG_UNIT, Problem(STEPS, 72, None), random.Random(seed)) or ("", "")
        assert (answer, response.removeprefix(f"{STEPS}#### ")) in {("72%", "$72"), ("$72", "72%"), ("$72", "€72")}
        _, answer = corrupt(UNASKED_UNIT, Problem(STEPS, 72, None), random.Random(seed)) or ("", "")
        assert answer == "72"


def test_rows_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "train.jsonl"
    lines.write_text(json.dumps({"question": "How many?", "answer": f"{STEPS}#### 1,024"}) + "\n")
    assert read(lines, gsm8k_problem) == [Problem(STEPS, 1024, f"{STEPS}#### 1,024")]
    array = tmp_path / "SVAMP.json"
    array.write_text(json.dumps([{"Answer": 51.0}]))
    [problem] = read(array, svamp_problem)
    assert problem == Problem("", 51, 51.0)
    assert {response for response, _ in svamp_pairs([problem])} == {
        "The answer is 51.0.", "The answer is 51.", "#### 51.0", "#### 51",
    }  # fmt: skip
    assert {answer for _, answer in svamp_pairs([problem])} == {51.0, "51"}
    lines.write_text(json.dumps({"code": "x = 1", "test_list": ["assert x == 1"], "test_setup_code": ""}))
    assert read(lines, mbpp_task) == [Task("```python\nx = 1\n```", ["assert x == 1"], (), "")]


@pytest.mark.parametrize(
    ("text", "parse", "expected"),
    [
        ('{"answer": "#### 7"}\n{"answer": "seven"}\n', gsm8k_problem, r"train\.jsonl, row 2: not as expected"),
        ('[{"Answer": 0.5}]', svamp_problem, "row 1: .* 0.5 is not a whole number"),
        ('{"text": "Sort."}', mbpp_task, "row 1: not as expected: KeyError"),
        ("answer", gsm8k_problem, "not a file of JSON rows"),
        ("", gsm8k_problem, "no rows"),
    ],
)
def test_another_file_is_named(tmp_path: Path, text: str, parse, expected: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(text)
    with pytest.raises(BenchError, match=expected):
        read(file, parse)


def test_a_missing_file_is_one_line_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gsm8k", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.startswith(f"bench: {tmp_path / 'none.jsonl'}: not a file of JSON rows")


RECORD = {
    "references": [
        {"answers": "GSM8K's solutions", "count": 7473, "accepted": 7472, "seconds": 0.601},
        {"answers": "MBPP's programs", "count": 370, "accepted": 370, "seconds": 5.8, "refused": 4},
    ],
    "corrupted": [{"answers": "off by one", "count": 2000, "accepted": 3, "seconds": 0.2}],
    "hostile": [
        {"expression": "9^9", "reference": "1+x", "verdict": "took too long", "seconds": 1.25},
        {"expression": "9^9", "reference": "12", "verdict": "took too long", "seconds": 1.5},
        {"expression": "x!", "reference": "12", "verdict": "right", "seconds": 0.25},
    ],
}


def test_the_table_says_what_was_accepted_how_fast_and_which_expressions_took_long() -> None:
    assert table(RECORD).splitlines()[2:] == [
        "| GSM8K's solutions | 7,472 of 7,473 | 12,000 |",
        "| MBPP's programs, 4 refused | 370 of 370 | 64 |",
        "| off by one | 3 of 2,000 | |",
        "| `math`, took too long: `9^9` 1.50 s | 0 of 1 | |",
        "| `math`, right: `x!` 0.25 s | 1 of 1 | |",
    ]


def test_the_page_keeps_what_is_around_the_table() -> None:
    page = "before\n<!-- graders:begin -->\nold\n<!-- graders:end -->\nafter\n"
    expected = "before\n<!-- graders:begin -->\nnew\n<!-- graders:end -->\nafter\n"
    assert renewed(page, "graders", "new") == expected
    for broken in ("before\n", "<!-- graders:begin -->\n", "<!-- graders:end -->"):
        with pytest.raises(BenchError, match="lacks the markers <!-- graders:begin --> and <!-- graders:end -->"):
            renewed(broken, "graders", "new")


def test_the_hostile_expressions_are_timed_against_an_expression_and_a_number() -> None:
    pytest.importorskip("math_verify")
    name = r"\{0,…,2999\}"
    rows = hostile({name: HOSTILE[name], "x+1": "x+1"})
    assert [(row["expression"], row["reference"], row["verdict"]) for row in rows] == [
        (name, "1+x", "no answer found"),
        (name, "12", "no answer found"),
        ("x+1", "1+x", "right"),
        ("x+1", "12", "wrong value"),
    ]
    assert all(0 <= row["seconds"] < 1 for row in rows)


@needs_sandbox
def test_a_row_that_code_refuses_is_told_apart() -> None:
    assert [is_refused(Task("", [test], (), "")) for test in ("assert f(2) == 4", "check(f)")] == [False, True]
    assert is_refused(Task("", ["assert f(2) == 4"], ["import no_such_module"], ""))


@needs_sandbox
def test_programs_are_judged_without_the_rows_that_are_refused() -> None:
    double = "```python\ndef f(x): return 2 * x\n```"
    tests = ["assert f(2) == 4", "assert f(2) == 5", "check(f)"]
    found = programs([Task(double, [test], (), "") for test in tests])
    assert (found["count"], found["accepted"], found["refused"]) == (2, 1, 1)
    assert found["answers"].endswith(open_sandbox("auto").name)


def test_every_kind_makes_a_pair() -> None:
    assert all(corrupt(kind, Problem(STEPS, 72, None), random.Random(0)) for kind in KINDS)
