"""Text to token ids and padded batches; decides BOS, EOS and padding.

Prompt and completion are encoded separately and their ids concatenated. The split between them is therefore a token
boundary, and a sampled response and a demonstration of the same text start at the same position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kedge.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EncodedExample", "Padded", "encode_completion", "encode_example", "encode_prompt", "pad_left", "pad_right"]

# The space character in SentencePiece ("▁") and in GPT-2's byte alphabet ("Ġ").
_SPACE_MARKS = ("▁", "Ġ")
_ANCHOR = "\n"


class Padded(NamedTuple):
    """Rows of different lengths as one padded batch.

    Attributes:
        ids: token ids; the padding id where `mask` is False.
        mask: True on real tokens.
    """

    ids: Int[Tensor, "batch width"]
    mask: Bool[Tensor, "batch width"]


class EncodedExample(NamedTuple):
    """Token ids of one example: prompt, then completion."""

    prompt: list[int]
    completion: list[int]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt: with BOS if the tokenizer adds one, never with EOS.

    BOS is not doubled if a chat template has already written it.

    Args:
        tokenizer: the policy's or the reward model's.
        text: any string that UTF-8 can encode; an empty one yields BOS or no tokens.

    Source: spec §2.
    """
    ids = _encode(tokenizer, text)
    bos = _added_bos(tokenizer)
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str, *, eos: bool = True) -> list[int]:
    """Token ids of a completion: no BOS, one EOS at the end.

    SentencePiece tokenizers prepend a space to every text. A completion continues a text, so that space is omitted:
    prompt ids + completion ids decode to exactly `prompt + completion`.

    Args:
        tokenizer: the policy's or the reward model's.
        text: the completion, with its leading space if it has one.
        eos: append the end-of-sequence token, unless the text already ends with it.

    Raises:
        ModelError: `eos` is set and the tokenizer has no EOS token.

    Source: spec §2.1, §2.5.
    """
    return _with_eos(tokenizer, _encode_middle(tokenizer, text), eos=eos)


def encode_example(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> EncodedExample:
    """Token ids of prompt and completion; without a prompt the completion is encoded as the start of a text."""
    start = encode_prompt(tokenizer, prompt)
    if prompt:
        return EncodedExample(start, encode_completion(tokenizer, completion))
    return EncodedExample(start, _with_eos(tokenizer, _encode(tokenizer, completion), eos=True))


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> Padded:
    """Pad rows on the left: prompts, so that sampling continues every row at the same column."""
    return _pad(rows, pad_id, left=True)


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> Padded:
    """Pad rows on the right: responses and supervised batches."""
    return _pad(rows, pad_id, left=False)


def _pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> Padded:
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, columns] = torch.tensor(row, dtype=torch.long)
        mask[index, columns] = True
    return Padded(ids, mask)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # `verbose=False`: the readers check lengths themselves, and report file and line.
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _added_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    bos = cast("int | None", tokenizer.bos_token_id)
    return bos if bos is not None and tokenizer.encode("a", add_special_tokens=True)[:1] == [bos] else None


def _encode_middle(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that continues another: encoded after an anchor, whose ids are then removed."""
    if not _adds_space(tokenizer):
        return _encode(tokenizer, text)
    anchor = _encode(tokenizer, _ANCHOR)
    ids = _encode(tokenizer, _ANCHOR + text)
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else _encode(tokenizer, text)


def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    first = tokenizer.convert_ids_to_tokens(_encode(tokenizer, "a")[:1])
    return bool(first) and str(first[0]).startswith(_SPACE_MARKS)


def _with_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, eos: bool) -> list[int]:
    end = cast("int | None", tokenizer.eos_token_id)
    if not eos or ids[-1:] == [end]:
        return ids
    if end is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token: set tokenizer.eos_token to the token that ends a response"
        )
    return [*ids, end]
