"""Truncation of plain-text prompts that are too long, at a token boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from kedge.data.rejections import RowError
from kedge.data.tokens import encode_prompt, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Truncate", "oversized_prefix", "reject_oversized", "truncate_prompt"]

Truncate: TypeAlias = Literal["never", "keep_start", "keep_end"]

# The decoder's replacement for a character whose bytes were cut apart.
_HALF_CHARACTER = "\ufffd"

# More than the average characters per token of any tokenizer.
_CHARACTERS_PER_TOKEN = 64


def oversized_prefix(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str | None:
    """A prefix that is already far over the limit, so that an oversized text need not be encoded in full.

    None if the text is not that long and has to be measured.
    """
    start = text[: _CHARACTERS_PER_TOKEN * max(max_tokens, 1)]
    return start if len(start) < len(text) and len(encode_prompt(tokenizer, start)) > 2 * max_tokens else None


def reject_oversized(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, name: str) -> None:
    """Reject a text that is certainly too long, without encoding all of it.

    Raises:
        RowError: The text is oversized.
    """
    if oversized_prefix(tokenizer, text, max_tokens) is not None:
        raise RowError(f"{name} is {len(text)} characters long, at most {max_tokens} tokens fit")


def truncate_prompt(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, truncate: Truncate) -> str:
    """A prompt cut to its first or last tokens, as text; unchanged if it fits.

    Args:
        tokenizer: measures the prompt.
        text: the prompt.
        max_tokens: the longest prompt, BOS included.
        truncate: which end to keep; `never` rejects a prompt that is too long.

    Raises:
        RowError: The prompt is too long and may not be cut, or is empty once cut.
    """
    if truncate == "never":
        reject_oversized(tokenizer, text, max_tokens, "the prompt")
    elif (start := oversized_prefix(tokenizer, text, max_tokens)) is not None:
        text = start if truncate == "keep_start" else text[-len(start) :]
    ids = encode_prompt(tokenizer, text)
    if len(ids) <= max_tokens:
        return text
    if truncate == "never":
        raise RowError(f"the prompt is {len(ids)} tokens long, at most {max_tokens} fit")
    # Without special tokens: encoding the cut prompt adds BOS back.
    plain = encode_text(tokenizer, text)
    for count in range(max_tokens, 0, -1):
        kept = plain[:count] if truncate == "keep_start" else plain[-count:]
        cut = str(tokenizer.decode(kept, clean_up_tokenization_spaces=False)).strip(_HALF_CHARACTER)
        # The cut text may encode to more tokens than it was cut to.
        if cut.strip() and len(encode_prompt(tokenizer, cut)) <= max_tokens:
            return cut
    raise RowError(f"the prompt is empty when cut to {max_tokens} tokens")
