"""A stand-in for a tokenizer whose tokens are characters, to look at data without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["character_tokenizer", "is_character_tokenizer"]

END = 0x110000
"""The id of the end, one above the last character's."""


class _Characters:
    """The part of a tokenizer's interface that reading data needs."""

    bos_token_id = pad_token_id = pad_token = None
    eos_token_id, eos_token = END, "<end>"
    chat_template = "{{ messages }}"
    all_special_tokens, all_special_ids = ("<end>",), (END,)
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __len__(self) -> int:
        return END + 1

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
    """The stand-in. Conversations are shown as `[role] text`; rows of token ids need a model and are refused."""
    return cast("PreTrainedTokenizerBase", _Characters())


def is_character_tokenizer(tokenizer: object) -> bool:
    """Whether it is the stand-in, which can read no token ids."""
    return isinstance(tokenizer, _Characters)
