"""A tokenizer with one token per word."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.registry.sizes import BOS, EOS, PAD, WORDS


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w4, w5, … with the ids 0, 4, 5, …"""
    words = [{BOS: "<bos>", EOS: "<eos>", PAD: "<pad>"}.get(index, f"w{index}") for index in range(WORDS)]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
