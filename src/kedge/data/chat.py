"""Conversations rendered by the tokenizer's chat template, split where the answer begins."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kedge.data.deadline import deadline
from kedge.data.fields import Messages
from kedge.data.rejections import RowError
from kedge.errors import DataError
from kedge.memory import memory_limit, private_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "apply_template",
    "end_of_turn",
    "render_answer",
    "render_prompt",
    "shared_messages",
    "special_tokens",
]

TEMPLATE_SECONDS = 10.0
TEMPLATE_MEMORY = 2**30
LONGEST_TEXT = 2**27
"""Characters of one rendered conversation; equals the byte limit of one line of a file."""


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


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Messages, **settings: Any) -> str:
    """Render a conversation with the tokenizer's chat template, in jinja's sandbox, with limits on time and memory.

    Args:
        tokenizer: Must have a chat template unless `settings` has one.
        messages: The conversation.
        settings: Passed to `apply_chat_template`.

    Raises:
        DataError: The template exceeds its time or memory limit, or uses the power operator.
        RowError: The template rejects these messages, or its output is too long.
    """
    try:
        template = settings.get("chat_template") or tokenizer.chat_template
        named: dict[str, Any] = template if isinstance(template, dict) else {"": template}
        if any(_takes_powers(str(each)) for each in named.values()):
            raise DataError("the chat template uses the power operator (**), which may never finish")
        with memory_limit(private_memory() + TEMPLATE_MEMORY), deadline(TEMPLATE_SECONDS):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))
        text.encode()  # not half of a surrogate pair, which no tokenizer takes
    except DataError:
        raise
    except MemoryError as error:
        room = f"{TEMPLATE_MEMORY / 2**30:g} GiB of memory"
        raise DataError(f"the chat template needs over {room} for one conversation") from error
    except TimeoutError as error:
        raise DataError(f"the chat template needs over {TEMPLATE_SECONDS:g} s for one conversation") from error
    except Exception as error:  # template code comes with the model and may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RowError(f"the chat template rejects the conversation: {reason}") from error
    if len(text) > LONGEST_TEXT:
        raise RowError(f"the chat template renders {len(text):,} characters, at most {LONGEST_TEXT:,} are allowed")
    return text


@lru_cache
def _takes_powers(template: str) -> bool:
    """Whether a template can compute e.g. 9**9**9: a single bytecode instruction, which no deadline interrupts."""
    from jinja2 import Environment  # slow to import; transformers imports it with the first template

    tokens = [text for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    # After a parenthesis or a comma, ** unpacks arguments.
    return any(here == "**" and before not in ("(", ",") for before, here in pairwise(tokens))
