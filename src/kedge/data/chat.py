"""Conversations as text: what the tokenizer's chat template makes of them, split where the answer begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedge.data.fields import Messages
from kedge.data.rejections import RowError
from kedge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["render_answer", "render_prompt", "shared_messages"]


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """A conversation up to the point where the assistant speaks next, or goes on with its unfinished last message.

    Raises:
        DataError: The tokenizer has no chat template.
        RowError: The template refuses these messages.
    """
    unfinished = messages[-1]["role"] == "assistant"
    return _render(tokenizer, messages, add_generation_prompt=not unfinished, continue_final_message=unfinished)


def render_answer(tokenizer: PreTrainedTokenizerBase, prompt: Messages, answer: Messages) -> str:
    """The text that an answer adds to its rendered prompt, without the end-of-sequence token.

    That token is added once when the text is encoded, as for plain text; line breaks that a template writes after it
    are what follows the answer, and nobody should learn to produce them.

    Raises:
        DataError: The tokenizer has no chat template.
        RowError: The template refuses the messages, or writes the prompt differently once an answer follows.
    """
    start = render_prompt(tokenizer, prompt)
    whole = _render(tokenizer, [*prompt, *answer])
    if not whole.startswith(start):
        raise RowError("the chat template writes the prompt differently once the answer follows it")
    text, end = whole[len(start) :], tokenizer.eos_token
    return text.rstrip().removesuffix(end) if isinstance(end, str) and text.rstrip().endswith(end) else text


def shared_messages(first: Messages, second: Messages) -> int:
    """How many messages two conversations begin with in common."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            "the row is a conversation and the tokenizer has no chat template: take an instruction-tuned model's "
            "tokenizer, set tokenizer.chat_template, or write prompts and completions as plain text"
        )
    from jinja2 import TemplateError  # transformers loads it with the first template only

    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise RowError(f"the chat template refuses the conversation: {' '.join(str(error).split())[:200]}") from error
    return str(text)
