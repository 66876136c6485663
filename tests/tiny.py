"""Tiny models for tests: a byte-level tokenizer and random models with a few thousand parameters."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

Family = Literal["llama", "gpt2", "gpt_neox"]
FAMILIES: tuple[Family, ...] = ("llama", "gpt2", "gpt_neox")

TEXTS = (
    "The boat lay at anchor while the tide went out.\n\nThen the crew hauled on the rope.",
    "Once upon a time there was a little sailor who loved the sea and the sun.",
    "SUBREDDIT: r/sailing\n\nTITLE: My rope broke\n\nPOST: I need help with it.\n\nTL;DR: rope broke, send help",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def tiny_tokenizer(
    *, vocab_size: int = 300, add_bos: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2 has it: every text survives a round trip; pad is 0, BOS 1, EOS 2, all three distinct."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return _wrap(backend, add_bos=add_bos, chat_template=chat_template)


def tiny_sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Llama's kind: a space before every text, BOS before every prompt, unknown characters as bytes."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<pad>", "<bos>", "<eos>", "<unk>"], show_progress=False
    )
    learner.train_from_iterator(TEXTS, trainer)
    learned = json.loads(learner.to_str())["model"]
    vocab = learned["vocab"]
    for value in range(256):
        vocab[f"<0x{value:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in learned["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(backend, add_bos=True, chat_template=None)


def _wrap(backend: Tokenizer, *, add_bos: bool, chat_template: str | None) -> PreTrainedTokenizerFast:
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(family: Family, vocab_size: int) -> PreTrainedConfig:
    """Two layers of 16 units. Dropout is on, as in the published GPT-2, so that forgetting to turn it off shows."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": vocab_size}
    # Weights far from zero: a wrong mask, position or slice then moves the outputs by more than rounding.
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "initializer_range": 0.2, **special}
    if family == "llama":
        return LlamaConfig(
            **sizes, intermediate_size=32, num_key_value_heads=1, max_position_embeddings=256, attention_dropout=0.1
        )
    if family == "gpt_neox":
        return GPTNeoXConfig(
            **sizes, intermediate_size=32, max_position_embeddings=256, hidden_dropout=0.1, attention_dropout=0.1
        )
    return GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=256, initializer_range=0.2, **special)


def tiny_causal_lm(family: Family = "llama", vocab_size: int = 300, seed: int = 0) -> PreTrainedModel:
    """A random language model; the same seed gives the same weights, and no other draw is disturbed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(family, vocab_size))


def tiny_reward_model(family: Family = "llama", vocab_size: int = 300, seed: int = 0) -> PreTrainedModel:
    """A random sequence classifier with one label."""
    config = tiny_config(family, vocab_size)
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(config)


def save_tiny_policy(
    folder: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    extra_rows: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """A model folder with its tokenizer; `extra_rows` makes the output matrix wider than the tokenizer."""
    if tokenizer is None:
        return _write(_policy_files(family, seed, extra_rows), folder)
    return _save(tiny_causal_lm(family, len(tokenizer) + extra_rows, seed), tokenizer, folder)


def save_tiny_reward_model(
    folder: Path, family: Family = "llama", *, seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """A reward-model folder with its tokenizer."""
    if tokenizer is None:
        return _write(_reward_model_files(family, seed), folder)
    return _save(tiny_reward_model(family, len(tokenizer), seed), tokenizer, folder)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Making and saving a model takes 10 ms, writing its files again takes 0.1 ms.
@cache
def _policy_files(family: Family, seed: int, extra_rows: int) -> dict[str, bytes]:
    tokenizer = tiny_tokenizer()
    return _files_of(tiny_causal_lm(family, len(tokenizer) + extra_rows, seed), tokenizer)


@cache
def _reward_model_files(family: Family, seed: int) -> dict[str, bytes]:
    tokenizer = tiny_tokenizer()
    return _files_of(tiny_reward_model(family, len(tokenizer), seed), tokenizer)


def _files_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return {path.name: path.read_bytes() for path in _save(model, tokenizer, Path(folder)).iterdir()}


def _write(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
