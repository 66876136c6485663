"""Conversations rendered by the tokenizer's chat template, split where the answer begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedge.data.fields import Messages
from kedge.data.rejections import RowError
from kedge.data.rendering import apply_template
from kedge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "end_of_turn",
    "render_answer",
    "render_prompt",
    "shared_messages",
    "special_tokens",
]


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """A conversation rendered up to the next assistant turn; a trailing assistant message is left open to continue.

    Raises:
        DataError: The tokenizer has no chat template.
        RowError: The template rejects these messages.
    """
    unfinished = messages[-1]["role"] == "assistant"
    return _render(tokenizer, messages, add_generation_prompt=not unfinished, continue_final_message=unfinished)


def render_answer(tokenizer: PreTrainedTokenizerBase, prompt: Messages, answer: Messages) -> str:
    """The text that an answer adds to its rendered prompt, without the end-of-sequence token.

    Encoding adds that token once, as for plain text. Line breaks that a template writes after it are dropped: they
    belong to the next turn and must not be learned.

    Raises:
        DataError: The tokenizer has no chat template.
        RowError: The template rejects the messages, or renders the prompt differently once an answer follows.
    """
    start = render_prompt(tokenizer, prompt)
    whole = _render(tokenizer, [*prompt, *answer])
    if not whole.startswith(start):
        raise RowError("the chat template renders the prompt differently once an answer follows")
    text, end = whole[len(start) :], tokenizer.eos_token
    return text.rstrip().removesuffix(end) if isinstance(end, str) and text.rstrip().endswith(end) else text


def shared_messages(first: Messages, second: Messages) -> int:
    """Number of leading messages that two conversations have in common."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an assistant's message, such as `<end_of_turn>`.

    None if there is no template, it rejects a question with an answer, or it writes no special token there.
    """
    question, answer = "How deep is it?", "Nine fathoms."
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        text = apply_template(tokenizer, turns) if tokenizer.chat_template else ""
    except (DataError, RowError):
        return None
    _, rendered, rest = text.rpartition(answer)
    special = special_tokens(tokenizer) if rendered else {}
    following = [token for token in special if rest.lstrip().startswith(token)]
    return special[max(following, key=len)] if following else None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The tokenizer's special tokens: those with a role, such as EOS, and others that stand for no text."""
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {**added, **dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))}


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            "the row is a conversation, but the tokenizer has no chat template: use an instruction-tuned model's "
            "tokenizer, set tokenizer.chat_template, or write prompts and completions as plain text"
        )
    return apply_template(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
