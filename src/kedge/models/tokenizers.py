"""Tokenizers whose padding token can never be mistaken for the end of a response."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kedge.errors import ModelError
from kedge.models.pretrained import check_source, loading_reason, quiet_transformers

__all__ = ["load_tokenizer", "stop_token_id"]

PAD_TOKEN = "<|pad|>"


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id, padding on the left, with a pad token of its own.

    With pad = EOS the end of a response is masked as padding, and the model never learns to stop. A tokenizer without
    a pad token, or with that one, gets a fresh token; the embedding grows by it when the model is loaded.

    Raises:
        ModelError: The source holds no tokenizer that transformers can load and use.
    Source: spec §2.1 (S3, N+).
    """
    name = check_source(source)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            ensure_pad_token(tokenizer)
            tokenizer.decode(tokenizer.encode("Some settings show only now that they are wrong."))
    except Exception as error:  # a stranger's files: tokenizers raises plain exceptions for whatever is wrong
        raise ModelError(f"tokenizer of {name!r} cannot be loaded: {loading_reason(error)}") from error
    tokenizer.padding_side = "left"
    return tokenizer


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a pad token that is neither EOS nor BOS, if it lacks one."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})


def stop_token_id(tokenizer: PreTrainedTokenizerBase, stop_token: str | int | None = None) -> int:
    """The id of the token that ends a response: the configured one, else the tokenizer's EOS.

    Raises:
        ModelError: The configured token is not a single token of the vocabulary, or there is no EOS to fall back on.
    """
    if stop_token is None:
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no EOS token; name the token that ends a response: rollout.stop_token")
        return cast(int, tokenizer.eos_token_id)
    if isinstance(stop_token, int):
        token_id, known = stop_token, 0 <= stop_token < len(tokenizer)
    else:
        # A token as it stands in the vocabulary, or a text such as a newline that is written by exactly one token.
        ids = tokenizer.encode(stop_token, add_special_tokens=False)
        token_id = tokenizer.get_vocab().get(stop_token, ids[0] if len(ids) == 1 else -1)
        known = token_id >= 0
    if not known or token_id == tokenizer.pad_token_id:
        raise ModelError(f"rollout.stop_token {stop_token!r} is not a token of the vocabulary that can end a response")
    return token_id
