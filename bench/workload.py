"""Creates a workload: model folders of policy and reward model, prompts and demonstrations as JSON lines.

    python -m bench.workload FOLDER RECIPE     (the recipe as a JSON object)

The weights are random. The policy is a Phi, with a bias in its output layer: EOS gets the bias that makes its
probability 1/hazard. So lengths vary as in practice, with the same distribution in every system, without changes to its
sampler.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PhiConfig,
    PhiForCausalLM,
    PhiForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from bench.recipe import DEMONSTRATIONS_FILE, FACTS_FILE, PROMPTS_FILE, Workload
from kedge.data import encode_completion, encode_prompt

SHAPES: dict[str, dict[str, int]] = {
    "XS": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "S": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4},
    "M": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6},
    "L": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "0.5B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}
VOCAB_SIZES = {"XS": 300, "S": 2048, "M": 8192, "L": 16384, "0.5B": 32000}
PAD = 0
EOS = 1
BOS = 2
NEVER = -30.0
"""A logit low enough never to be sampled."""
MAX_TRAINED = 8192
"""Larger vocabularies are filled with unused tokens, because merges are slow to train."""


def make_workload(recipe: Workload, folder: Path) -> None:
    """Write the workload to `folder`; `facts.json` comes last and marks it as complete."""
    texts = source_texts()
    tokenizer = build_tokenizer(texts, recipe.vocab_size or VOCAB_SIZES[recipe.size])
    policy, reward = build_models(recipe, len(tokenizer))
    for name, model in (("policy", policy), ("reward", reward)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = list(draw_rows(recipe, tokenizer, texts))
    _write_lines(folder / PROMPTS_FILE, rows, ("prompt", "input_ids"))
    _write_lines(folder / DEMONSTRATIONS_FILE, rows, ("prompt", "completion"))
    lengths = [len(row["input_ids"]) for row in rows]
    facts = {"parameters": policy.num_parameters(), "vocab_size": len(tokenizer), "longest_prompt": max(lengths)}
    (folder / FACTS_FILE).write_text(json.dumps({**facts, "recipe": asdict(recipe)}), encoding="utf-8")


def source_texts(count: int = 40) -> list[str]:
    """The first modules of the standard library: text available wherever the benchmark runs."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def build_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `vocab_size` tokens, of which at most `MAX_TRAINED` are trained on the texts."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, MAX_TRAINED),
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    vocab = trained["vocab"]
    vocab |= {f"unused{index}": index for index in range(len(vocab), vocab_size)}
    backend = _byte_level(models.BPE(vocab=vocab, merges=[tuple(pair) for pair in trained["merges"]]))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_models(recipe: Workload, vocab_size: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Policy and reward model of a size, with weights drawn from the seed.

    The policy's EOS has the logit b with e^b / (e^b + vocabulary − 2) = 1/hazard, given other logits near 0.
    """
    torch.manual_seed(recipe.seed)
    settings: dict[str, Any] = {
        **SHAPES[recipe.size],
        "vocab_size": vocab_size,
        "max_position_embeddings": recipe.context_length,
        **{"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS},
    }
    if recipe.size == "0.5B":
        # A Llama has no output bias, and EOS is practically never sampled among 32,000 random tokens.
        assert not recipe.hazard, "a random Llama has no hazard: its responses do not end"
        llama = LlamaConfig(**settings)
        return LlamaForCausalLM(llama), _scalar(LlamaForSequenceClassification, llama)
    phi = PhiConfig(**settings)
    policy = PhiForCausalLM(phi)
    with torch.no_grad():
        policy.lm_head.bias.zero_()
        policy.lm_head.bias[PAD] = NEVER
        policy.lm_head.bias[EOS] = math.log((vocab_size - 2) / (recipe.hazard - 1)) if recipe.hazard else NEVER
    return policy, _scalar(PhiForSequenceClassification, phi)


def _scalar(kind: Callable[[PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A sequence classifier with one label."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    return kind(config)


def draw_rows(recipe: Workload, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Iterator[dict[str, Any]]:
    """Prompts with their ids, and completions as long as responses, from random places in the texts.

    TRL gets the ids and kedge the text, so only texts that encode to exactly the same ids are used.
    """
    rng = random.Random(recipe.seed)
    stream = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False, verbose=False)]
    for _ in range(recipe.num_prompts):
        prompt, ids = _draw_text(rng, stream, _prompt_length(rng, recipe), tokenizer)
        completion, _ = _draw_text(rng, stream, _response_length(rng, recipe) - 1, tokenizer)
        yield {"prompt": prompt, "input_ids": ids, "completion": completion}


def _prompt_length(rng: random.Random, recipe: Workload) -> int:
    return recipe.min_prompt + round((recipe.max_prompt - recipe.min_prompt) * rng.random() ** recipe.prompt_skew)


def _response_length(rng: random.Random, recipe: Workload) -> int:
    """Tokens including EOS, at least 2, because completions without text are refused in training."""
    if not recipe.hazard:
        return recipe.max_response
    return max(2, min(recipe.max_response, math.ceil(rng.expovariate(1 / recipe.hazard))))


def _draw_text(
    rng: random.Random, stream: list[int], length: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[str, list[int]]:
    while True:
        start = rng.randrange(len(stream) - length)
        ids = stream[start : start + length]
        text = str(tokenizer.decode(ids))
        same = encode_prompt(tokenizer, text) == ids == encode_completion(tokenizer, text, eos=False)
        if same and text.strip():
            return text, ids


def _write_lines(path: Path, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    lines = (json.dumps({name: row[name] for name in names}) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    make_workload(Workload(**json.loads(sys.argv[2])), Path(sys.argv[1]))
