"""The form of the prompts that a model was trained on: conversations, plain text, or TL;DR posts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeAlias

from kedge.data.chat import render_prompt
from kedge.data.rejections import RowError
from kedge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TLDR_ENDING", "PromptForm", "prompt_form"]

PromptForm: TypeAlias = Literal["conversation", "text", "tldr"]

TLDR_ENDING = "\n\nTL;DR:"
"""How the prompt of a post ends."""

NUM_READ = 20
"""Prompts that the form is read off."""

_QUESTION = "How deep is it?"


def prompt_form(prompts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, template: str = "none") -> PromptForm:
    """The form that most of the first prompts have.

    Records hold rendered texts, so a conversation is recognized by what the chat template writes around a question.

    Args:
        prompts: Prompts as text, as the model reads them.
        tokenizer: The model's.
        template: The template of the data: `none` or `tldr`.
    """
    if template == "tldr":
        return "tldr"
    around = _around_a_question(tokenizer)
    if around is None:
        return "text"
    start, end = around
    read = list(islice(prompts, NUM_READ))
    rendered = sum(prompt.startswith(start) and prompt.endswith(end) for prompt in read)
    return "conversation" if 2 * rendered > len(read) else "text"


def _around_a_question(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """What the chat template writes before and after a user's message; None if it writes nothing there.

    Of what comes before, only the first character counts: a system message changes the rest.
    """
    try:
        text = render_prompt(tokenizer, [{"role": "user", "content": _QUESTION}]) if tokenizer.chat_template else ""
    except (DataError, RowError):
        return None
    start, found, end = text.partition(_QUESTION)
    return (start[:1], end) if found and (start or end).strip() else None
