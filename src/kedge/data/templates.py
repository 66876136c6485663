"""The TL;DR prompt format: a forum post followed by `TL;DR:`."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from kedge.data.rejections import RowError
from kedge.data.tokens import encode_prompt
from kedge.data.truncation import oversized_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["render_tldr", "tldr_response"]


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
