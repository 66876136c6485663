"""From text to token ids and padded batches: where BOS, EOS and padding are decided.

A prompt and its completion are encoded apart and their ids concatenated, so the split between them is a token boundary
by construction and a sampled response and a demonstration of the same text start at the same place.
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

# What SentencePiece ("▁") and GPT-2's byte alphabet ("Ġ") write for a space.
_SPACE_MARKS = ("▁", "Ġ")
_ANCHOR = "\n"


class Padded(NamedTuple):
    """Rows of different lengths as one rectangle.

    Attributes:
        ids: token ids, the padding id in the slots that do not count.
        mask: True on real tokens.
    """

    ids: Int[Tensor, "batch width"]
    mask: Bool[Tensor, "batch width"]


class EncodedExample(NamedTuple):
    """The two halves of one example as token ids; the model reads them one after the other."""

    prompt: list[int]
    completion: list[int]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt: BOS in front where the tokenizer itself puts one, never EOS behind.

    A chat template may have written the BOS text already; it is not doubled.

    Args:
        tokenizer: the policy's or the reward model's.
        text: any string that UTF-8 can encode; an empty one gives BOS alone, or nothing.

    Source: spec §2.
    """
    ids = _encode(tokenizer, text)
    bos = _added_bos(tokenizer)
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str, *, eos: bool = True) -> list[int]:
    """Token ids of what follows a prompt: no BOS, one EOS behind.

    Tokenizers of the SentencePiece family put a space before every text they see. A completion is the middle of a text,
    so that space is left out: prompt ids + completion ids decode to exactly `prompt + completion`.

    Args:
        tokenizer: the policy's or the reward model's.
        text: the completion, with its leading space where it has one.
        eos: whether the end-of-sequence token follows. A text that ends with it gets no second one.

    Raises:
        ModelError: EOS is asked for and the tokenizer has none.

    Source: spec §2.1, §2.5.
    """
    return _with_eos(tokenizer, _encode_middle(tokenizer, text), eos=eos)


def encode_example(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> EncodedExample:
    """Both halves of an example; without a prompt the completion is encoded as the start of a text, not its middle."""
    start = encode_prompt(tokenizer, prompt)
    if prompt:
        return EncodedExample(start, encode_completion(tokenizer, completion))
    return EncodedExample(start, _with_eos(tokenizer, _encode(tokenizer, completion), eos=True))


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> Padded:
    """Rows that end together: prompts, so that sampling continues every row at the same column."""
    return _pad(rows, pad_id, left=True)


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> Padded:
    """Rows that start together: responses and supervised batches."""
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
    # `verbose=False`: texts beyond the model's length are the readers' business, which say so with file and line.
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _added_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    bos = cast("int | None", tokenizer.bos_token_id)
    return bos if bos is not None and tokenizer.encode("a", add_special_tokens=True)[:1] == [bos] else None


def _encode_middle(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that does not start anything: encoded behind an anchor, which is then cut off."""
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
        raise ModelError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token to what ends an answer")
    return [*ids, end]
