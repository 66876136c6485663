"""The TL;DR prompt: a forum post and the cue for its summary."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from kedge.data.rejections import RowError
from kedge.data.tokens import encode_prompt
from kedge.data.truncation import beginning_over

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["render_tldr", "tldr_response"]


def render_tldr(
    subreddit: str, title: str, post: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> str:
    """The prompt of a post, cut at a paragraph where it is too long.

    The post loses whole lines from its end until the prompt fits; a word is never cut.

    Args:
        subreddit: with or without its `r/`.
        title: the post's title.
        post: its text.
        tokenizer: measures the prompt.
        max_tokens: the longest prompt, BOS included; None for no limit.

    Raises:
        RowError: Even the first paragraph is too long.

    Source: Stiennon app. B; N+; spec §2.5.
    """
    post = post.strip()
    if max_tokens is not None:
        # Only a giant's beginning can be kept. Its last line may be broken and is cut, since the whole does not fit.
        post = beginning_over(tokenizer, post, max_tokens) or post
    lines = post.split("\n")

    def prompt(num_lines: int) -> str:
        body = "\n".join(lines[:num_lines]).rstrip()
        return f"SUBREDDIT: r/{subreddit.removeprefix('r/')}\n\nTITLE: {title}\n\nPOST: {body}\n\nTL;DR:"

    def num_tokens(num_lines: int) -> int:
        return len(encode_prompt(tokenizer, prompt(num_lines)))

    if max_tokens is None or num_tokens(len(lines)) <= max_tokens:
        return prompt(len(lines))
    # Halving finds the last cut that fits as line-by-line cutting does, without encoding a long post once per line.
    kept = bisect_right(range(1, len(lines)), max_tokens, key=num_tokens)
    if kept == 0:
        raise RowError(f"the post is too long: at most {max_tokens} tokens fit, its first paragraph alone is over them")
    return prompt(kept)


def tldr_response(summary: str) -> str:
    """A summary as the prompt's continuation: one space, then the text."""
    return " " + summary.strip()
