"""Converts text to token ids and padded batches, including BOS and other prefix tokens, EOS and padding.

Prompt and completion are encoded separately and their ids concatenated. The split between them is therefore a token
boundary, and a sampled response and a demonstration of the same text start at the same position.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kedge.data.records import RowError
from kedge_base.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The space character in SentencePiece ("▁") and in GPT-2's byte alphabet ("Ġ").
_SPACE_MARKS = ("▁", "Ġ")
_ANCHORS = ("\n", ".")
"""Texts to put before one that continues another; several, since a tokenizer may merge one of them with the text."""


class Rendered(str):
    """Text from a chat template, which contains all of its special tokens: encoding adds none.

    `apply_chat_template(tokenize=True)` and servers also add none. Slices and concatenations are plain text.
    """

    __slots__ = ()


class EncodedExample(NamedTuple):
    """Token ids of one example: prompt, then completion.

    Attributes:
        prompt: tokens that are read but not learned.
        completion: tokens that are learned, except for `read`.
        read: ranges of `completion` that are only read, such as the user's later messages: (first, end) positions.
    """

    prompt: list[int]
    completion: list[int]
    read: tuple[tuple[int, int], ...] = ()

    def learned(self) -> Sequence[int]:
        """Positions of the learned tokens in prompt + completion; a row's first token has no context."""
        start = len(self.prompt)
        places = range(max(start, 1), start + len(self.completion))
        if not self.read:
            return places
        skipped = {start + place for span in self.read for place in range(*span)}
        return [place for place in places if place not in skipped]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a prompt, with the special tokens that the tokenizer puts before a text, and never with EOS.

    Usually this is BOS, or a prefix such as `[gMASK] <sop>`. It is not doubled if the text starts with it, and not
    added to a rendered conversation, where the template decides.

    Args:
        tokenizer: the policy's or the reward model's.
        text: any string that UTF-8 can encode; an empty one yields the prefix or no tokens.

    Source: spec §2.
    """
    ids = encode_text(tokenizer, text)
    if isinstance(text, Rendered):
        return ids
    start, _ = special_wrapping(tokenizer)
    return ids if ids[: len(start)] == start else [*start, *ids]


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str, *, eos: bool = True) -> list[int]:
    """Encode a completion: no BOS, one EOS at the end.

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
    ids = encode_text(tokenizer, text, continues=True)
    return end_with_eos(tokenizer, ids) if eos else ids


def encode_example(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    completion: str,
    *,
    eos: bool = True,
    read: Sequence[tuple[int, int]] = (),
) -> EncodedExample:
    """Encode prompt and completion; without a prompt, the completion is encoded as the start of a text.

    Args:
        tokenizer: the policy's or the reward model's.
        prompt: the text before the completion.
        completion: the text after it.
        eos: append the end-of-sequence token, unless the completion already ends with it.
        read: ranges of `completion`, in characters, that are not learned. Their ends are token boundaries.

    Raises:
        ModelError: `eos` is set and the tokenizer has no EOS token.
    """
    start = encode_prompt(tokenizer, prompt)
    ids = list[int]()
    spans = list[tuple[int, int]]()
    done = 0
    for first, end in (*read, (len(completion), len(completion))):
        ids += encode_text(tokenizer, completion[done:first], continues=bool(prompt))
        learned = len(ids)
        ids += encode_text(tokenizer, completion[first:end], continues=True)
        spans.append((learned, len(ids)))
        done = end
    return EncodedExample(start, end_with_eos(tokenizer, ids) if eos else ids, tuple(spans[:-1]))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, continues: bool = False) -> list[int]:
    """Encode a text, without BOS and EOS.

    The string of a special token becomes this token, which is how chat templates write them. Padding is the exception:
    it is never sampled, so a text that contains it would have probability 0. Its string becomes ordinary characters.

    Args:
        tokenizer: the policy's or the reward model's.
        text: any string that UTF-8 can encode.
        continues: the text continues another.

    Raises:
        RowError: The tokenizer still reads a part of the text as padding.
    """
    parts = enumerate(_split_padding(tokenizer, text))
    ids = [token for index, part in parts for token in _encode(tokenizer, part, continues=continues or index > 0)]
    if tokenizer.pad_token_id in ids:
        raise RowError(f"the tokenizer reads a part of the text as its padding token {str(tokenizer.pad_token)[:40]!r}")
    return ids


def end_with_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Append the end-of-sequence token to ids; `ModelError` if the tokenizer lacks one."""
    end = cast("int | None", tokenizer.eos_token_id if tokenizer.eos_token else None)  # "" maps to the unknown token
    if end is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token: set eos_token in its tokenizer_config.json to the token that "
            "ends a response"
        )
    return ids if ids[-1:] == [end] else [*ids, end]


def special_wrapping(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text, such as BOS, or [CLS] and [SEP]."""
    bare, whole = (list(tokenizer.encode("a", add_special_tokens=special)) for special in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def pad_left(
    rows: Sequence[Sequence[int]], pad_id: int
) -> tuple[Int[Tensor, "batch width"], Bool[Tensor, "batch width"]]:
    """Pad rows on the left: prompts, so that sampling continues every row at the same column.

    Returns:
        The ids, and a mask that is True on real tokens.
    """
    width = max(map(len, rows), default=0)
    ids = [[pad_id] * (width - len(row)) + list(row) for row in rows]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    mask = torch.arange(width) >= width - lengths[:, None]
    return torch.tensor(ids, dtype=torch.long).reshape(mask.shape), mask


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, continues: bool = False) -> list[int]:
    """Encode a text; if it continues another, without the space that SentencePiece puts before a text."""
    if continues and _adds_space(tokenizer):
        for before in _ANCHORS:
            anchor = _encode(tokenizer, before)
            ids = _encode(tokenizer, before + text)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
    # `verbose=False`: the readers check lengths themselves, and report file and line.
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _split_padding(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Split a text inside every padding token, after its first character, so that none is recognized as one."""
    pad = tokenizer.pad_token
    if not isinstance(pad, str) or pad not in text:
        return [text]
    return re.split(f"(?<={re.escape(pad[:1])})(?={re.escape(pad[1:])})", text)


def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    first = tokenizer.convert_ids_to_tokens(_encode(tokenizer, "a")[:1])
    return bool(first) and str(first[0]).startswith(_SPACE_MARKS)


# Tokens are decoded with those before them: alone, SentencePiece drops a token's space, WordPiece its word boundary.
_CONTEXT = 4
_WINDOW = 16
_LONGEST_WINDOW = 64


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds: `"".join(token_pieces(tokenizer, ids)) == tokenizer.decode(ids)`.

    A character whose bytes are split over several tokens belongs to the last of them; the other pieces are empty. The
    cost is linear in the number of tokens: every token is decoded in a short window.

    Args:
        tokenizer: Any kind: SentencePiece, byte-level BPE, WordPiece.
        ids: The tokens, special tokens included.

    Returns:
        One piece per token, possibly empty.
    """
    text = _decode(tokenizer, ids)
    ends, whole = [0], [0]  # where each token's text ends; the numbers of tokens that end in a complete character
    # The text of the window `ids[first:end]` is expected at `text[start:]`.
    first = start = retry = 0
    for end in range(1, len(ids)):
        if end - first > _LONGEST_WINDOW:
            # The windows no longer match the text. Decoding from the beginning realigns them; the total cost is linear
            # because this is only tried at geometrically growing lengths.
            if end < retry:
                ends.append(ends[-1])
                continue
            first = 0
            start = 0
            retry = end + end // 4
        window = _decode(tokenizer, ids[first:end])
        common = num_shared(window, text[start : start + len(window)])
        ends.append(max(ends[-1], start + common))
        if common < len(window):
            continue
        whole.append(end)
        if end - first >= _WINDOW:
            begin = next(place for place in reversed(whole) if place <= end - _CONTEXT)
            context = _decode(tokenizer, ids[begin:end])
            if text.endswith(context, 0, ends[-1]):
                first = begin
                start = ends[-1] - len(context)
    ends.append(len(text))
    return [text[begin:end] for begin, end in pairwise(ends)][: len(ids)]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Number of leading entries that two texts or lists have in common."""
    if first == second[: len(first)]:  # a fast path
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


END = 0x110000
"""The id of EOS, one above that of the last character."""


class _Characters:
    """The part of a tokenizer's interface that reading data needs."""

    bos_token = pad_token_id = pad_token = None
    eos_token_id = END
    eos_token = "<end>"
    chat_template = "{{ messages }}"
    all_special_tokens = ("<end>",)
    all_special_ids = (END,)
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(self.convert_ids_to_tokens(ids))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.eos_token if index == END else chr(index) for index in ids]

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **settings: object) -> str:
        text = "\n".join(f"[{message['role']}] {message['content']}" for message in messages)
        return f"{text}\n[assistant] " if settings.get("add_generation_prompt") else text


def character_tokenizer() -> PreTrainedTokenizerBase:
    """Return the stand-in for a tokenizer. Conversations are shown as `[role] text`; rows of token ids need a model and
    are rejected.
    """
    return cast("PreTrainedTokenizerBase", _Characters())


def is_character_tokenizer(tokenizer: object) -> bool:
    """True for the stand-in, which cannot read token ids."""
    return isinstance(tokenizer, _Characters)


def turn_pieces(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], own: Sequence[bool], contexts: Sequence[int] = ()
) -> tuple[list[str], list[tuple[int, str]]]:
    """Decode the tokens that the policy chose one by one, and the text in between that it only read.

    Args:
        tokenizer: See `token_pieces`.
        ids: The tokens of both sides, in order.
        own: For each token, True if the policy chose it.
        contexts: For each token, the number of its context; stretches of different contexts are separate. Empty for a
            single context.

    Returns:
        One piece per chosen token; and for each stretch of other tokens, the number of chosen tokens before it and its
        text.
    """
    pieces: list[str] = []
    foreign: list[tuple[int, str]] = []
    said = zip(own, contexts or [0] * len(own), token_pieces(tokenizer, ids), strict=True)
    for (is_own, _), stretch in groupby(said, key=lambda token: token[:2]):
        texts = [text for *_, text in stretch]
        if is_own:
            pieces += texts
        else:
            foreign.append((len(pieces), "".join(texts)))
    return pieces, foreign
