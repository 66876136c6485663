"""Conversations as text: what the tokenizer's chat template makes of them, split where the answer begins."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kedge.data.deadline import deadline
from kedge.data.fields import Messages
from kedge.data.memory_limit import memory_limit, own_memory
from kedge.data.rejections import RowError
from kedge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["apply_template", "render_answer", "render_prompt", "shared_messages"]

TEMPLATE_SECONDS = 10.0
TEMPLATE_MEMORY = 2**30
LONGEST_TEXT = 2**27
"""Characters of one conversation, as many as a line of a file may have bytes."""


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
    return apply_template(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Messages, **settings: Any) -> str:
    """A conversation as the tokenizer's chat template writes it, in jinja's sandbox.

    Args:
        tokenizer: Has a template, unless the settings bring one.
        messages: The conversation.
        settings: Handed to `apply_chat_template`.

    Raises:
        DataError: The template does not come to an end, or need not, or takes all memory.
        RowError: It refuses these messages, or makes too much of them.
    """
    try:
        if _takes_powers(str(settings.get("chat_template") or tokenizer.chat_template)):
            raise DataError("the chat template takes powers of numbers, which may have no end")
        with memory_limit(own_memory() + TEMPLATE_MEMORY), deadline(TEMPLATE_SECONDS):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))
    except DataError:
        raise
    except MemoryError as error:
        room = f"{TEMPLATE_MEMORY / 2**30:g} GiB of memory"
        raise DataError(f"the chat template takes over {room} for one conversation") from error
    except TimeoutError as error:
        raise DataError(f"the chat template takes over {TEMPLATE_SECONDS:g} s for one conversation") from error
    except Exception as error:  # a template is a stranger's program, which may raise whatever it likes
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RowError(f"the chat template refuses the conversation: {reason}") from error
    if len(text) > LONGEST_TEXT:
        raise RowError(f"the chat template makes {len(text):,} characters of the conversation")
    return text


@lru_cache
def _takes_powers(template: str) -> bool:
    """Whether a template computes such as 9**9**9: one step of Python code, which no deadline interrupts."""
    from jinja2 import Environment  # transformers loads it with the first template only

    tokens = [text for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    # Behind a parenthesis or a comma, two stars unpack arguments.
    return any(here == "**" and before not in ("(", ",") for before, here in pairwise(tokens))
