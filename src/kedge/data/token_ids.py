"""Rows that hold token ids: read as the texts that they encode, if the tokenizer writes exactly these ids again.

Records are texts, since reward models may have another tokenizer. So that the ids are used as they are, a row is
refused if its texts would be encoded to other ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kedge.data.characters import is_character_tokenizer
from kedge.data.fields import Fields, entries_of
from kedge.data.rejections import RowError
from kedge.data.tokens import encode_example, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["texts_of_ids"]

_UNTRAINED = -100
_MASKS = ("completion_mask", "assistant_masks")


def texts_of_ids(fields: Fields, role: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The row with `prompt`, `prompt` and `completion`, or `text` in place of `input_ids`.

    Padding is left out where `attention_mask` is 0. `labels` (−100 on the prompt) or `completion_mask` (1 on the
    completion) split prompt and completion; a prompt is the part before. A missing prefix (BOS) or EOS is added, as for
    texts.

    Raises:
        RowError: The ids are not the tokenizer's, or their texts would be encoded to other ids.
    """
    if is_character_tokenizer(tokenizer):
        raise RowError("token ids need a model: --model")
    ids = [_token(entry, len(tokenizer)) for entry in entries_of(fields["input_ids"], "input_ids")]
    read = _flags(fields, "attention_mask", len(ids)) or [True] * len(ids)
    trained = _trained(fields, len(ids))
    used = [index for index, flag in enumerate(read) if flag]
    ids, trained = [ids[index] for index in used], trained and [trained[index] for index in used]
    rest = {name: value for name, value in fields.items() if name not in ("input_ids", "attention_mask")}
    start = len(prefix := encode_prompt(tokenizer, ""))
    if ids[:start] == prefix:
        # Encoding adds it again. SentencePiece would read a text that starts with it as a space and the text.
        ids, trained = ids[start:], trained and trained[start:]
    if role == "prompts":
        ids = ids[: trained.index(True)] if trained and True in trained else ids
        text = _decoded(tokenizer, ids)
        _check(encode_prompt(tokenizer, text), ids, tokenizer)
        return {**rest, "prompt": text}
    ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    start = trained.index(True) if trained and True in trained else 0
    if trained and not all(trained[start:]):
        raise RowError("'labels' or the mask train on tokens that other tokens follow; only the end can be trained on")
    prompt = _decoded(tokenizer, ids[:start])
    completion = _decoded(tokenizer, ids)[len(prompt) :]
    example = encode_example(tokenizer, prompt, completion)
    _check([*example.prompt, *example.completion[:-1]], ids, tokenizer)
    return {**rest, "prompt": prompt, "completion": completion} if prompt else {**rest, "text": completion}


def _token(entry: object, num_tokens: int) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise RowError("field 'input_ids' must hold whole numbers")
    if not 0 <= entry < num_tokens:
        raise RowError(
            f"token id {entry} is not in the vocabulary, which has {num_tokens} tokens",
            "token id not in the vocabulary",
        )
    return entry


def _trained(fields: Fields, length: int) -> list[bool] | None:
    if "labels" in fields:
        labels = entries_of(fields["labels"], "labels")
        _check_length(labels, length, "labels")
        return [label != _UNTRAINED for label in labels]
    return next((flags for name in _MASKS if (flags := _flags(fields, name, length)) is not None), None)


def _flags(fields: Fields, name: str, length: int) -> list[bool] | None:
    if fields.get(name) is None:
        return None
    entries = entries_of(fields[name], name)
    _check_length(entries, length, name)
    return [bool(entry) for entry in entries]


def _check_length(entries: Sequence[Any], length: int, name: str) -> None:
    if len(entries) != length:
        raise RowError(f"field {name!r} has {len(entries)} entries, 'input_ids' has {length}")


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _check(encoded: list[int], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    if encoded not in (ids, [*encode_prompt(tokenizer, ""), *ids]):
        raise RowError(
            "the tokenizer would encode the text of 'input_ids' to other ids; give the text, or ids of this tokenizer"
        )
