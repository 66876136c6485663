"""Thoughts in the responses of reasoning models: where they end, and the answer begins."""

from __future__ import annotations

MARKS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM-4.5
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
"""What opens a thought, and what closes it."""
CHANNEL = "<|channel|>"
FINAL = "<|channel|>final<|message|>"
"""gpt-oss thinks and answers in channels."""
CHANNEL_ENDS = ("<|end|>", "<|return|>")


def answer_of(text: str, *, is_open: bool = False) -> str | None:
    """Return the text after the last thought; None if that thought was not closed.

    Args:
        text: A response, or a turn of one.
        is_open: The prompt ended within a thought; see `opens_thought`.
    """
    if CHANNEL in text:
        _, final, answer = text.rpartition(FINAL)
        if not final or CHANNEL in answer:
            return None
        return answer[: min((place for end in CHANNEL_ENDS if (place := answer.find(end)) >= 0), default=None)]
    closed = max((place + len(end) for _, end in MARKS if (place := text.rfind(end)) >= 0), default=0)
    answer = text[closed:]
    if (is_open and not closed) or any(begin in answer for begin, _ in MARKS):
        return None
    return answer


def opens_thought(prompt: str) -> bool:
    """Return True if a prompt ends by opening a thought, as the chat templates of some reasoning models do."""
    end = prompt.rstrip()
    return end.endswith((*(begin for begin, _ in MARKS), f"{CHANNEL}analysis<|message|>"))
