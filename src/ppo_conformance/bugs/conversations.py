"""Bugs of the tokens of conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo_conformance.bugs import bug
from ppo_conformance.reference.conversations import Conversations


@bug(
    Conversations.encode,
    "tokens/bos_twice",
    "25 huggingface/trl/issues/3853",
    "27 vllm-project/vllm/issues/16976",
)
def bos_twice(encode: Any, tokenizer: Any, text: str) -> list[int]:
    """The tokenizer added a BOS to the one that the chat template had written."""
    return tokenizer.encode(text, add_special_tokens=True).ids


@bug(Conversations.render, "tokens/ordinary", "26 huggingface/trl/issues/3520")
def no_bos(render: Any, case: Mapping[str, Any], messages: Any) -> str:
    """The prompt had no BOS."""
    return render({**case, "bos": ""}, messages)


@bug(
    Conversations.kept,
    "tokens/retokenized",
    "28 huggingface/trl/issues/5224",
    "29 jingyaogong/minimind/issues/850",
)
def encoded_again(kept: Any, tokenizer: Any, sampled: list[int]) -> list[int]:
    """Turns were decoded and encoded again, which can give other tokens than the sampled ones."""
    return tokenizer.encode(tokenizer.decode(sampled, skip_special_tokens=False), add_special_tokens=False).ids
