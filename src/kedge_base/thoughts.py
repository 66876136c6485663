"""Finds where thoughts end and the answer starts in responses of reasoning models."""

from __future__ import annotations

import re

MARKS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM-4.5
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1, OpenThinker
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
"""The tags that open and close a thought."""
CHANNEL = "<|channel|>"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = re.compile(r"<\|channel\|>final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
ENDS = re.compile(r"<\|(?:end|return)\|>")
"""gpt-oss thinks and answers in channels."""


def answer_of(text: str) -> str | None:
    """Return the text after the last thought; None if that thought was not closed.

    Args:
        text: A response, or a turn of one, after the `opened_thought` of its prompt.
    """
    if CHANNEL in text:
        answers = FINAL.split(text)
        return None if len(answers) == 1 or CHANNEL in answers[-1] else ENDS.split(answers[-1])[0]
    answer = text[max((place + len(end) for _, end in MARKS if (place := text.rfind(end)) >= 0), default=0) :]
    return None if any(begin in answer for begin, _ in MARKS) else answer


def opened_thought(prompt: str) -> str:
    """Return the tag at a prompt's end that opens a thought, as some chat templates do; otherwise empty."""
    end = prompt.rstrip()
    return next((begin for begin in (*(begin for begin, _ in MARKS), ANALYSIS) if end.endswith(begin)), "")
