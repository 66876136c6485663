"""Thoughts in responses."""

from __future__ import annotations

import pytest

from kedge_base.thoughts import MARKS, answer_of, opened_thought


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_the_answer_follows_a_closed_thought(begin: str, end: str) -> None:
    assert answer_of(f"{begin}maybe 7{end} It is 8.") == " It is 8."
    assert answer_of(f"{begin}one{end}{begin}two{end}8") == "8"


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_an_unfinished_thought_has_no_answer(begin: str, end: str) -> None:
    assert answer_of(f"{begin}maybe 7, but I have to check") is None
    assert answer_of(f"{begin}one{end}8? {begin}or 7") is None
    assert answer_of(f"Let me think. {begin}maybe 7") is None


def test_a_response_without_thoughts_is_its_answer() -> None:
    assert answer_of("It is 8.") == "It is 8."
    assert answer_of("") == ""


def test_gpt_oss_answers_in_its_final_channel() -> None:
    thought = "<|channel|>analysis<|message|>maybe 7"
    final = "<|start|>assistant<|channel|>final<|message|>It is 8."
    assert answer_of(f"{thought}<|end|>{final}<|return|>") == "It is 8."
    assert answer_of(f"{thought}<|end|>{final}") == "It is 8."
    assert answer_of('<|channel|>final <|constrain|>json<|message|>{"x": 1}<|return|>') == '{"x": 1}'
    assert answer_of(thought) is None
    assert answer_of(f"{thought}<|end|>{final}<|end|><|start|>assistant<|channel|>analysis<|message|>or 7") is None


@pytest.mark.parametrize("begin", [begin for begin, _ in MARKS] + ["<|channel|>analysis<|message|>"])
def test_a_prompt_may_open_a_thought(begin: str) -> None:
    assert opened_thought(f"<|im_start|>assistant\n{begin}\n") == begin
    assert opened_thought(f"Write {begin} first.\n<|im_start|>assistant\n") == ""
    assert answer_of(begin + "maybe 7, but") is None
