r"""Responses that are meant to harm: none ends a run, and each takes time in proportion to its length."""

from __future__ import annotations

import sys
import time

import pytest

from kedge_base.errors import RewardError
from kedge_tasks.verify import (
    choice,
    exact,
    f1,
    gsm8k,
    gsm8k_strict,
    instructions,
    json_schema,
    math,
    normalized,
    number,
    pattern,
    tags,
)

LENGTH = 50_000
PIECES = (
    *" \n\\{}[]()<`*_$#-.,:A1½٢",
    "\\{",
    "}{",
    r"\boxed{",
    r"\text{~",
    r"\frac{",
    "```\n",
    "<answer>",
    "<think>",
    "the answer is A ",
    "not A ",
    "B is ",
    "1\n1. ",
    "I cannot ",
    "x=",
    "\n1. ",
    "between 1 and ",
)
VERIFIERS = {
    gsm8k: "so\n#### 7",
    gsm8k_strict: "so\n#### 7",
    number: "7 cm",
    choice: "B",
    exact: "7",
    normalized: "seven",
    f1: "seven",
    json_schema: {"type": "number", "multipleOf": 0.01},
    tags: None,
    instructions: [{"kind": "json"}, {"kind": "sentences", "count": 2}, {"kind": "paragraphs", "count": 2}],
}


def verdict(verifier, text, column):
    [found] = verifier([text]) if column is None else verifier([text], [column])
    return found.reason


def seconds(verifier, text, column):
    started = time.process_time()
    assert verdict(verifier, text, column) != "right"
    return time.process_time() - started


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.__name__)
def test_a_long_response_takes_time_in_proportion_to_its_length(verifier):
    before = "```" if verifier is instructions else "\\"
    texts = [before + piece * (LENGTH // len(piece)) for piece in PIECES]
    # A tenth of a second at most; in proportion to the square of the length, three or more.
    assert max(seconds(verifier, text, VERIFIERS[verifier]) for text in [*texts, r"\frac{" + " " * LENGTH]) < 2


def test_a_long_answer_is_no_expression():
    pytest.importorskip("math_verify")
    texts = [piece * (LENGTH // len(piece)) for piece in PIECES]
    assert max(seconds(math, text, "x+1") for each in texts for text in (rf"\boxed{{{each}}}", "\\" + each)) < 2


@pytest.mark.parametrize("text", ["1e400", "-1e400", "[1e400]", "9" * 4000, "9" * 4301, "1e999999999", "[" * 50_000])
@pytest.mark.parametrize(
    "schema", [{"multipleOf": 0.01}, {"multipleOf": 3}, {"items": {"multipleOf": 0.1}}, {"type": "array"}]
)
def test_no_number_ends_a_run_by_its_size(text, schema):
    assert verdict(json_schema, text, schema) in ("right", "against the schema", "not JSON")


@pytest.mark.parametrize("text", ["9" * 4301, "#### " + "9" * 4301, r"\boxed{" + "9" * 1900 + "}", r"\boxed{9^{9999}}"])
def test_no_answer_ends_a_run_by_its_digits(text):
    pytest.importorskip("math_verify")
    for verifier, column in ((gsm8k, "so\n#### 7"), (number, 7), (math, "x+1"), (choice, "B"), (normalized, "7")):
        assert verdict(verifier, text, column) != "right"


def test_an_exception_is_the_verdict_on_its_response_alone(monkeypatch):
    from kedge_tasks.verify import answers

    def read(text, is_whole):
        raise OverflowError(text)

    monkeypatch.setattr(answers, "final_number", read)
    assert [each.reason for each in number(["7", "<think>"], [7, 7])] == ["wrong format", "no answer found"]


def test_a_row_that_python_cannot_write_is_named():
    with pytest.raises(RewardError, match="column 'answer', prompt 1: a number of thousands of digits is not usable"):
        number.check_rows(answer=[10**5000])


def test_an_expression_that_takes_long_to_compile_is_refused_before_the_run(monkeypatch):
    # The interruption may come in a callback of the garbage collector, such as hypothesis's, which can only report it;
    # and the next one in pytest's report, which fails then.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with pytest.raises(RewardError, match="expected a regular expression that compiles within a second"):
        pattern.check_rows(pattern=["(?i)" + "|".join(f"w{number}x" for number in range(100_000))])
