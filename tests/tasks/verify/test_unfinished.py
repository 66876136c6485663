"""Responses without an end: thoughts that were never closed, and answers that were cut off."""

from __future__ import annotations

import pytest

from kedge_tasks.verify import (
    choice,
    exact,
    f1,
    gsm8k,
    gsm8k_strict,
    instructions,
    instructions_partial,
    json_schema,
    math,
    normalized,
    number,
    pattern,
    tags,
)

ROW = "so\n#### 7"
CITIES = ["London", "Paris"]
ANSWERED = (
    (gsm8k, ROW, r"#### 7"),
    (gsm8k, ROW, r"\boxed{7}"),
    (gsm8k_strict, ROW, "#### 7\n"),
    (number, 7, "the answer is 7"),
    (choice, "B", "The answer is B"),
    (choice, "B", r"\boxed{B}"),
    (exact, "7", "7"),
    (exact, "7", "<answer>7</answer>"),
    (normalized, "seven", "Seven."),
    (f1, "seven", "Seven."),
    (pattern, r"\d", "7"),
    (json_schema, {"type": "integer"}, "7"),
    (instructions, [{"kind": "max_words", "count": 5}], "seven"),
    (instructions_partial, [{"kind": "no_commas"}], "seven"),
)
OPENED = ("<think>", "<think>\n", "<thinking>", "[THINK]", "<reasoning>", "<|begin_of_thought|>")


def reason(verifier, text, column, **more):
    [verdict] = verifier([text], [column], **more)
    assert float(verdict) == (verdict.reason == "right")
    return verdict.reason


@pytest.mark.parametrize(("verifier", "column", "text"), ANSWERED)
def test_an_unfinished_thought_is_no_answer(verifier, column, text):
    assert reason(verifier, text, column) == "right"
    for mark in OPENED:
        assert reason(verifier, f"{mark}{text}", column) == "no answer found"
        assert reason(verifier, f"{mark}maybe {text}, but I have to check", column, stopped=[False]) == "cut off"
    assert reason(verifier, f"<think>no</think>{text}", column) == "right"
    assert reason(verifier, f"[THINK]{text}[/THINK]", column) != "right"
    assert reason(verifier, f"<think>a</think>{text}<think>or", column) == "no answer found"


def test_expressions_in_unfinished_thoughts_are_no_answers():
    pytest.importorskip("math_verify")
    assert reason(math, r"<think>maybe \boxed{7}, but I have to check", "7") == "no answer found"
    assert reason(math, r"<think>\boxed{7}</think>\boxed{8}", "7") == "wrong value"
    assert reason(math, "<think>x<answer>7</answer>", "7") == "no answer found"
    assert reason(math, "<answer>7</answer>", "7", stopped=[False]) == "right"
    assert reason(math, "The answer is 7", "7", stopped=[False]) == "cut off"


def test_only_the_final_channel_is_read():
    thought = "<|channel|>analysis<|message|>The answer is 7."
    final = "<|end|><|start|>assistant<|channel|>final<|message|>The answer is 8."
    assert reason(number, thought, 7) == "no answer found"
    assert reason(number, thought + final, 7) == "wrong value"
    assert reason(number, thought + final, 8) == "right"


def test_a_pattern_that_names_a_thought_reads_it():
    assert reason(pattern, "<think>a</think>b", r"\A<think>a</think>b\Z") == "right"
    assert reason(pattern, "[THINK]a[/THINK]b", r"\A\[THINK\]a") == "right"
    assert reason(pattern, "[THINK]a[/THINK]b", r"\Ab\Z") == "right"
    assert reason(pattern, "<think>a", "a") == "no answer found"


def test_a_thought_that_the_prompt_opened_counts_once():
    text = "because</think><answer>7</answer>"
    for response in (text, f"<think>{text}", f"<think>\n{text}"):
        [verdict] = tags([response], prompts=["Why?\n<think>\n"])
        assert verdict.reason == "right"


@pytest.mark.parametrize(
    ("verifier", "column", "text", "expected"),
    [
        (number, 7, "<answer>7</answer>", "right"),
        (number, 7, "The answer is 7", "cut off"),
        (number, 7, r"\boxed{7}", "right"),
        (number, 7, r"\boxed{7} or rather \boxed{7", "cut off"),
        (choice, "B", "B", "cut off"),
        (choice, "B", "The answer is B", "cut off"),
        (choice, "B", "(B)", "cut off"),
        (choice, "B", "Paris", "cut off"),
        (choice, "B", r"so \boxed{B}", "right"),
        (choice, "B", "<answer>B</answer>", "right"),
        (json_schema, {"type": "integer"}, "12", "cut off"),
        (json_schema, {"type": "object"}, '{"a": 1}', "cut off"),
        (json_schema, {"type": "object"}, '```json\n{"a": 1}', "cut off"),
        (json_schema, {"type": "object"}, '```json\n{"a": 1}\n```', "right"),
        (json_schema, {"type": "object"}, '<answer>{"a": 1}</answer>', "right"),
        (exact, "7", "7", "cut off"),
        (exact, "7", "<answer>7</answer>", "right"),
        (pattern, r"\A\d+\Z", "12", "cut off"),
        (pattern, r"\b12\b", "so 12", "cut off"),
        (pattern, r"\A[\w ]+\Z", "so it", "cut off"),
        (pattern, r"\AYes\b", "Yes, because", "right"),
        (instructions, [{"kind": "max_words", "count": 50}], "one two", "cut off"),
    ],
)
def test_of_a_response_that_was_cut_off_only_a_closed_answer_counts(verifier, column, text, expected):
    more = {"choices": [CITIES]} if verifier is choice else {}
    assert reason(verifier, text, column, stopped=[False], **more) == expected


def test_a_tag_with_nothing_visible_inside_is_empty():
    for inside in ("", " \n", "\u200b", "\ufeff\u2060"):
        [verdict] = tags([f"<think>{inside}</think><answer>7</answer>"])
        assert verdict.reason == "empty tag"
