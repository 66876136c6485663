"""Folders of shallow models of full width with random weights, and a tokenizer with a word per row of the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from kedge.models.sources import quiet_transformers

SPARE = 8
"""Rows of the embedding without a word, for tokens that transformers adds to the tokenizers of some architectures."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def save_shallow(config: PreTrainedConfig, folder: Path, *, scalar: bool = False) -> None:
    """Save a random model, a reward model if it is `scalar`, and its tokenizer."""
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        config.pad_token_id = 0
        config.bos_token_id = 1
        config.eos_token_id = 2
        if scalar:
            config.num_labels = 1
        kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
        kind.from_config(config, dtype=torch.float32).save_pretrained(folder)
    size = config.get_text_config().vocab_size
    tokens = ["<pad>", "<bos>", "<eos>", *LETTERS]
    tokens += [f"w{row}" for row in range(len(tokens), size - SPARE)]
    # Every letter is a token, also for the architectures whose tokenizers transformers rebuilds from the vocabulary.
    backend = Tokenizer(models.BPE({token: row for row, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)


def text_of(lengths: Sequence[int]) -> list[str]:
    """Different prompts of these lengths, in tokens."""
    count = len(LETTERS)
    return [
        "".join(LETTERS[(row // count**place if place < 3 else row + 7 * place) % count] for place in range(length))
        for row, length in enumerate(lengths)
    ]
