"""Applies length limits: rejects or cuts prompts that are too long, texts at a token, conversations at a turn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from kedge.data.chat import render_prompt
from kedge.data.fields import Messages
from kedge.data.records import RowError
from kedge.data.tokens import encode_completion, encode_prompt, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncate: TypeAlias = Literal["never", "keep_start", "keep_end"]

# The decoder's replacement for a character whose bytes a cut has separated.
_HALF_CHARACTER = "\ufffd"

# More than the average characters per token of any tokenizer.
_CHARACTERS_PER_TOKEN = 64


def num_tokens(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    limit: int | None,
    encode: Callable[[PreTrainedTokenizerBase, str], Sequence[int]] = encode_prompt,
) -> int:
    """Count a text's tokens; if it is far over the limit, only those of its start, so that not all of it is encoded.

    Args:
        tokenizer: measures the text.
        text: the text.
        limit: the maximum number of tokens; None for no limit.
        encode: encodes the text, by default as a prompt.
    """
    if limit is not None and len(text) > _CHARACTERS_PER_TOKEN * limit:
        count = len(encode(tokenizer, text[: _CHARACTERS_PER_TOKEN * limit]))
        if count > 2 * limit:
            return count
    return len(encode(tokenizer, text))


def too_long(subject: str, text: str, length: int, limit: int, kind: str) -> RowError:
    """The error for a text whose length, from `num_tokens`, is over a limit.

    Args:
        subject: the text's name, and the verb.
        text: the text.
        length: its tokens.
        limit: the most that fit.
        kind: see `RowError`; ends with the name of the limit.
    """
    over = "over " if len(text) > _CHARACTERS_PER_TOKEN * limit else ""
    return RowError(f"{subject} {over}{length} tokens long, at most {limit} fit", f"{kind}={limit}")


def truncate_prompt(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, truncate: Truncate) -> str:
    """Cut a prompt to its first or last tokens; return it as text, unchanged if it fits.

    Args:
        tokenizer: measures the prompt.
        text: the prompt.
        max_tokens: the longest prompt, BOS included.
        truncate: which end to keep.

    Raises:
        RowError: The prompt is empty once cut.
    """
    length = num_tokens(tokenizer, text, max_tokens)
    if length <= max_tokens:
        return text
    keeps_start = truncate == "keep_start"
    if length > 2 * max_tokens:  # so that not all of it is encoded
        size = _CHARACTERS_PER_TOKEN * max_tokens
        text = text[:size] if keeps_start else text[-size:]
    # Without special tokens: encoding the cut prompt adds BOS back.
    plain = encode_text(tokenizer, text)
    for count in range(max_tokens, 0, -1):
        kept = plain[:count] if keeps_start else plain[-count:]
        cut = str(tokenizer.decode(kept, clean_up_tokenization_spaces=False)).strip(_HALF_CHARACTER)
        # When encoded again, the cut text may have more tokens than before.
        if cut.strip() and len(encode_prompt(tokenizer, cut)) <= max_tokens:
            return cut
    raise RowError(f"the prompt is empty when cut to {max_tokens} tokens")


def truncate_answer(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str:
    """Cut the end of an answer to `max_tokens` with EOS; unchanged if it fits."""
    if num_tokens(tokenizer, text, max_tokens, encode_completion) <= max_tokens:
        return text
    start = text[: _CHARACTERS_PER_TOKEN * max_tokens]

    def length(num_characters: int) -> int:
        return len(encode_completion(tokenizer, start[:num_characters]))

    return start[: bisect_right(range(1, len(start) + 1), max_tokens, key=length)]


def truncate_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, max_tokens: int, truncate: Truncate
) -> Messages:
    """Drop as many of a conversation's oldest turns as necessary; unchanged if it fits.

    Cutting the rendered text would break the template's format. So `keep_end` drops whole turns after the system
    message, up to one of the user's messages. `keep_start` changes nothing, since it would drop the question.

    Args:
        tokenizer: renders and measures the conversation.
        messages: the conversation.
        max_tokens: the longest prompt, BOS included.
        truncate: see above.

    Returns:
        The longest conversation that fits, or else the shortest.

    Raises:
        RowError: The template rejects the conversation, or leaves out a part of it.
        DataError: The tokenizer has no chat template.
    """
    num_system = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    later = range(num_system + 1, len(messages)) if truncate == "keep_end" else ()
    starts = [start for start in later if messages[start]["role"] == "user"]
    *longer, shortest = [messages, *([*messages[:num_system], *messages[start:]] for start in starts)]
    fitting = (
        kept for kept in longer if num_tokens(tokenizer, render_prompt(tokenizer, kept), max_tokens) <= max_tokens
    )
    return next(fitting, shortest)


def render_tldr(
    subreddit: str, title: str, post: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> str:
    """The prompt of a post, cut at a line break if it is too long.

    Whole lines are dropped from the end of the post until the prompt fits; words are never cut.

    Args:
        subreddit: with or without its `r/`.
        title: title of the post.
        post: text of the post.
        tokenizer: measures the prompt.
        max_tokens: the longest prompt, BOS included; None for no limit.

    Raises:
        RowError: Even the first paragraph is too long.

    Source: Stiennon app. B; N+; spec §2.5.
    """
    post = post.strip()
    size = _CHARACTERS_PER_TOKEN * (max_tokens or len(post))
    if max_tokens is not None and len(post) > size and num_tokens(tokenizer, post[:size], None) > 2 * max_tokens:
        # Only the start of an oversized post can fit; its last line may be broken, but is dropped in any case.
        post = post[:size]
    lines = post.split("\n")

    def prompt(num_lines: int) -> str:
        body = "\n".join(lines[:num_lines]).rstrip()
        return f"SUBREDDIT: r/{subreddit.removeprefix('r/')}\n\nTITLE: {title}\n\nPOST: {body}\n\nTL;DR:"

    def length(num_lines: int) -> int:
        return len(encode_prompt(tokenizer, prompt(num_lines)))

    if max_tokens is None or length(len(lines)) <= max_tokens:
        return prompt(len(lines))
    # Bisection finds the same cut as dropping line by line, without encoding a long post once per line.
    kept = bisect_right(range(1, len(lines)), max_tokens, key=length)
    if kept == 0:
        raise RowError(
            f"the post is too long: at most {max_tokens} tokens fit, and its first paragraph alone has more",
            "post whose first paragraph is too long",
        )
    return prompt(kept)


def tldr_response(summary: str) -> str:
    """Format a summary as the continuation of the prompt: one space, then the text."""
    return " " + summary.strip()
