"""Plain-text prompts that are too long, cut at a token where the user asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from kedge.data.rejections import RowError
from kedge.data.tokens import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Truncate", "beginning_over", "refuse_giant", "truncate_prompt"]

Truncate: TypeAlias = Literal["never", "keep_start", "keep_end"]

# What decoding writes for the half of a character whose other bytes were cut off.
_HALF_CHARACTER = "\ufffd"

# More than any tokenizer packs into a token on average.
_CHARACTERS_PER_TOKEN = 64


def beginning_over(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str | None:
    """A beginning of the text that alone is far over the limit: a giant need not be encoded whole to be refused.

    None where the text is no giant, and has to be measured.
    """
    start = text[: _CHARACTERS_PER_TOKEN * max(max_tokens, 1)]
    return start if len(start) < len(text) and len(encode_prompt(tokenizer, start)) > 2 * max_tokens else None


def refuse_giant(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, name: str) -> None:
    """Stop at a text that would take long to measure and is certainly too long.

    Raises:
        RowError: It is.
    """
    if beginning_over(tokenizer, text, max_tokens) is not None:
        raise RowError(f"{name} is {len(text)} characters long, at most {max_tokens} tokens fit")


def truncate_prompt(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, truncate: Truncate) -> str:
    """The first or last tokens of a text, as text.

    Args:
        tokenizer: measures the prompt.
        text: the prompt.
        max_tokens: the longest prompt, BOS included.
        truncate: which end is kept; `never` refuses a prompt that is too long.

    Raises:
        RowError: It is too long and may not be cut, or nothing is left of it.
    """
    if truncate == "never":
        refuse_giant(tokenizer, text, max_tokens, "the prompt")
    elif (start := beginning_over(tokenizer, text, max_tokens)) is not None:
        text = start if truncate == "keep_start" else text[-len(start) :]
    ids = encode_prompt(tokenizer, text)
    if len(ids) <= max_tokens:
        return text
    if truncate == "never":
        raise RowError(f"the prompt is {len(ids)} tokens long, at most {max_tokens} fit")
    # The text without its special tokens: BOS comes back when the cut prompt is encoded.
    plain = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    for count in range(max_tokens, 0, -1):
        kept = plain[:count] if truncate == "keep_start" else plain[-count:]
        cut = str(tokenizer.decode(kept, clean_up_tokenization_spaces=False)).strip(_HALF_CHARACTER)
        # A cut text may split into more tokens than it was cut from.
        if cut.strip() and len(encode_prompt(tokenizer, cut)) <= max_tokens:
            return cut
    raise RowError(f"nothing is left of the prompt when it is cut to {max_tokens} tokens")
