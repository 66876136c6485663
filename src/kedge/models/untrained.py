"""Trains a tokenizer on texts and creates a randomly initialized model for it, as in the demo."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge.models.sources import quiet_transformers
from kedge.models.tokenizers import save_tokenizer
from kedge_base.machine.durable import share_as_usual

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the texts, with a pad and an end token.

    Args:
        texts: The training texts.
        vocab_size: Maximum number of tokens, ≥ 258: 256 bytes and the two special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD_TOKEN, eos_token=END_TOKEN, padding_side="left"
    )


def save_untrained_llama(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    context_length: int,
    initializer_range: float,
    seed: int,
) -> None:
    """Save a Llama with random weights, tied embeddings and a feed-forward width of twice the hidden size.

    Args:
        folder: Receives the model and the tokenizer.
        tokenizer: Sets the vocabulary size.
        hidden_size: Width of the residual stream, a multiple of twice the number of heads.
        num_layers: Transformer blocks.
        num_heads: Attention heads.
        context_length: Longest text, tokens.
        initializer_range: Standard deviation of the weights. Narrow models learn to copy much sooner with values well
            above the usual 0.02, which suits widths around 1,000.
        seed: Seed of the weights; torch's global generator is not affected.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=cast("int", tokenizer.eos_token_id),
        pad_token_id=cast("int", tokenizer.pad_token_id),
    )
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    save_tokenizer(tokenizer, folder)
    with quiet_transformers():
        model.save_pretrained(folder)
    share_as_usual(folder)
