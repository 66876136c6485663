"""Limits of length: prompts that are too long are cut, texts at a token and conversations at a turn, or rejected."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Literal, TypeAlias

from kedge.data.chat import render_prompt
from kedge.data.fields import Messages
from kedge.data.records import RowError
from kedge.data.tokens import encode_completion, encode_prompt, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Truncate",
    "oversized_prefix",
    "reject_oversized",
    "render_tldr",
    "tldr_response",
    "truncate_answer",
    "truncate_conversation",
    "truncate_prompt",
]


Truncate: TypeAlias = Literal["never", "keep_start", "keep_end"]

# The decoder's replacement for a character with bytes on both sides of a cut.
_HALF_CHARACTER = "\ufffd"

# More than the average characters per token of any tokenizer.
_CHARACTERS_PER_TOKEN = 64


def oversized_prefix(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str | None:
    """A prefix that is already far over the limit, so that an oversized text need not be encoded in full.

    None if the text is not that long and has to be measured.
    """
    start = text[: _CHARACTERS_PER_TOKEN * max(max_tokens, 1)]
    return start if len(start) < len(text) and len(encode_prompt(tokenizer, start)) > 2 * max_tokens else None


def reject_oversized(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, name: str, kind: str) -> None:
    """Reject a text that is certainly too long, without encoding all of it.

    Args:
        tokenizer: measures the text.
        text: the text.
        max_tokens: the limit.
        name: the text's name in the reason.
        kind: see `RowError`.

    Raises:
        RowError: The text is oversized.
    """
    if oversized_prefix(tokenizer, text, max_tokens) is not None:
        raise RowError(f"{name} is {len(text)} characters long, at most {max_tokens} tokens fit", kind)


def truncate_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, truncate: Truncate, kind: str = ""
) -> str:
    """A prompt cut to its first or last tokens, as text; unchanged if it fits.

    Args:
        tokenizer: measures the prompt.
        text: the prompt.
        max_tokens: the longest prompt, BOS included.
        truncate: which end to keep; `never` rejects a prompt that is too long.
        kind: of the rejection, see `RowError`.

    Raises:
        RowError: The prompt is too long and may not be cut, or is empty once cut.
    """
    if truncate == "never":
        reject_oversized(tokenizer, text, max_tokens, "the prompt", kind)
    elif (start := oversized_prefix(tokenizer, text, max_tokens)) is not None:
        text = start if truncate == "keep_start" else text[-len(start) :]
    ids = encode_prompt(tokenizer, text)
    if len(ids) <= max_tokens:
        return text
    if truncate == "never":
        raise RowError(f"the prompt is {len(ids)} tokens long, at most {max_tokens} fit", kind)
    # Without special tokens: encoding the cut prompt adds BOS back.
    plain = encode_text(tokenizer, text)
    for count in range(max_tokens, 0, -1):
        kept = plain[:count] if truncate == "keep_start" else plain[-count:]
        cut = str(tokenizer.decode(kept, clean_up_tokenization_spaces=False)).strip(_HALF_CHARACTER)
        # The cut text may encode to more tokens than it was cut to.
        if cut.strip() and len(encode_prompt(tokenizer, cut)) <= max_tokens:
            return cut
    raise RowError(f"the prompt is empty when cut to {max_tokens} tokens")


def truncate_answer(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str:
    """An answer without its end, at most `max_tokens` long with EOS; unchanged if it fits."""
    start = text[: _CHARACTERS_PER_TOKEN * max_tokens]
    if start == text and len(encode_completion(tokenizer, text)) <= max_tokens:
        return text

    def num_tokens(num_characters: int) -> int:
        return len(encode_completion(tokenizer, start[:num_characters]))

    return start[: bisect_right(range(1, len(start) + 1), max_tokens, key=num_tokens)]


def truncate_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, max_tokens: int, truncate: Truncate, kind: str = ""
) -> Messages:
    """A conversation without its oldest turns, as many as necessary; unchanged if it fits.

    A cut inside the rendered text would cut into the template. So `keep_end` drops whole turns, after the system
    message and up to a message of the user. `keep_start` would drop the question, so that it rejects like `never`.

    Args:
        tokenizer: renders and measures the conversation.
        messages: the conversation.
        max_tokens: the longest prompt, BOS included.
        truncate: see above.
        kind: of the rejection, see `RowError`.

    Raises:
        RowError: The conversation is too long, and may not be cut or its last turn alone is too long.
        DataError: The tokenizer has no chat template.
    """
    text = render_prompt(tokenizer, messages)
    if _fits(tokenizer, text, max_tokens):
        return messages
    num_system = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    for start in range(num_system + 1, len(messages)) if truncate == "keep_end" else ():
        kept = [*messages[:num_system], *messages[start:]]
        if messages[start]["role"] == "user" and _fits(tokenizer, render_prompt(tokenizer, kept), max_tokens):
            return kept
    reject_oversized(tokenizer, text, max_tokens, "the prompt", kind)
    length = len(encode_prompt(tokenizer, text))
    alone = ", and so is its last turn" if truncate == "keep_end" else ""
    raise RowError(f"the prompt is {length} tokens long, at most {max_tokens} fit{alone}", kind)


def _fits(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> bool:
    return oversized_prefix(tokenizer, text, max_tokens) is None and len(encode_prompt(tokenizer, text)) <= max_tokens


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
    if max_tokens is not None:
        # Only the start of an oversized post can fit; its last line may be broken, but is dropped in any case.
        post = oversized_prefix(tokenizer, post, max_tokens) or post
    lines = post.split("\n")

    def prompt(num_lines: int) -> str:
        body = "\n".join(lines[:num_lines]).rstrip()
        return f"SUBREDDIT: r/{subreddit.removeprefix('r/')}\n\nTITLE: {title}\n\nPOST: {body}\n\nTL;DR:"

    def num_tokens(num_lines: int) -> int:
        return len(encode_prompt(tokenizer, prompt(num_lines)))

    if max_tokens is None or num_tokens(len(lines)) <= max_tokens:
        return prompt(len(lines))
    # Bisection finds the same cut as dropping line by line, without encoding a long post once per line.
    kept = bisect_right(range(1, len(lines)), max_tokens, key=num_tokens)
    if kept == 0:
        raise RowError(
            f"the post is too long: at most {max_tokens} tokens fit, and its first paragraph alone has more",
            "post whose first paragraph is too long",
        )
    return prompt(kept)


def tldr_response(summary: str) -> str:
    """A summary as the continuation of the prompt: one space, then the text."""
    return " " + summary.strip()
