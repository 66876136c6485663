"""The text of every token of a sequence, so that the pieces join to the text of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["token_pieces"]

# A token is decoded with the tokens before it: alone, SentencePiece drops its space, WordPiece its word boundary.
_CONTEXT = 4
_WINDOW = 16
_LONGEST_WINDOW = 64


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds: `"".join(token_pieces(tokenizer, ids)) == tokenizer.decode(ids)`.

    A character whose bytes are split over several tokens belongs to the last of them; the pieces of the others are
    empty. The cost is linear in the number of tokens: every token is decoded in a short window.

    Args:
        tokenizer: Any kind: SentencePiece, byte-level BPE, WordPiece.
        ids: The tokens, special tokens included.

    Returns:
        One piece per token, possibly empty.
    """
    text = _decode(tokenizer, ids)
    ends, whole = [0], [0]  # where each token's text ends; the tokens before which no character is left incomplete
    # The text of the window `ids[first:end]` is expected at `text[start:]`.
    first = start = retry = 0
    for end in range(1, len(ids)):
        if end - first > _LONGEST_WINDOW:
            # The windows have lost their place. The whole beginning finds it again; its decoding is linear in total
            # because it is tried at geometrically growing lengths only.
            if end < retry:
                ends.append(ends[-1])
                continue
            first, start, retry = 0, 0, end + end // 4
        window = _decode(tokenizer, ids[first:end])
        common = _common_length(window, text, start)
        ends.append(max(ends[-1], start + common))
        if common < len(window):
            continue
        whole.append(end)
        if end - first >= _WINDOW:
            begin = next(place for place in reversed(whole) if place <= end - _CONTEXT)
            context = _decode(tokenizer, ids[begin:end])
            if text.endswith(context, 0, ends[-1]):
                first, start = begin, ends[-1] - len(context)
    ends.append(len(text))
    return [text[begin:end] for begin, end in pairwise(ends)][: len(ids)]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _common_length(window: str, text: str, start: int) -> int:
    """The number of characters of `window` that `text[start:]` begins with: fewer if it ends within a character."""
    if text.startswith(window, start):
        return len(window)
    pairs = enumerate(zip(window, text[start : start + len(window)], strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(window), len(text) - start))
