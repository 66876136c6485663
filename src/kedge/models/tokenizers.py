"""Tokenizers with a pad token distinct from the end-of-response token."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kedge.errors import ModelError
from kedge.models.pretrained import check_source, loading_reason, quiet_transformers

__all__ = ["load_tokenizer", "stop_token_id"]

PAD_TOKEN = "<|pad|>"


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id, left-padding, with a pad token of its own.

    If pad = EOS, the end of a response is masked as padding and the model never learns to stop. A tokenizer without
    a pad token, or with pad = EOS, gets a new token; loading the model grows the embedding by one row for it.

    Raises:
        ModelError: transformers cannot load or use the source's tokenizer.
    Source: spec §2.1 (S3, N+).
    """
    name = check_source(source)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            ensure_pad_token(tokenizer)
            tokenizer.decode(tokenizer.encode("Some bad settings only show up on use."))
    except Exception as error:  # untrusted files: tokenizers raises plain Exception for any problem
        raise ModelError(f"tokenizer of {name!r} cannot be loaded: {loading_reason(error)}") from error
    tokenizer.padding_side = "left"
    return tokenizer


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add a pad token unless the tokenizer has one that is neither EOS nor BOS."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})


def stop_token_id(tokenizer: PreTrainedTokenizerBase, stop_token: str | int | None = None) -> int:
    """The id of the token that ends a response: the configured token, or the tokenizer's EOS.

    Raises:
        ModelError: The configured token is not one token of the vocabulary, or none is configured and there is no EOS.
    """
    if stop_token is None:
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no EOS token; set rollout.stop_token to the token that ends a response")
        return cast(int, tokenizer.eos_token_id)
    if isinstance(stop_token, int):
        token_id, known = stop_token, 0 <= stop_token < len(tokenizer)
    else:
        # A vocabulary entry, or text (such as a newline) that encodes to exactly one token.
        ids = tokenizer.encode(stop_token, add_special_tokens=False)
        token_id = tokenizer.get_vocab().get(stop_token, ids[0] if len(ids) == 1 else -1)
        known = token_id >= 0
    if not known or token_id == tokenizer.pad_token_id:
        raise ModelError(f"rollout.stop_token {stop_token!r} is not a single non-padding token of the vocabulary")
    return token_id
