"""Measures one run in this process: `python -m bench.plan.child CASE live|process`; prints one line of JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from bench.plan.cases import Case
from kedge.config import load_config
from kedge.models.live_bytes import LiveBytes
from kedge.pipelines.planning.plan import count_ppo, plan_ppo
from kedge.pipelines.ppo import run_ppo

KIB, MIB = 2**10, 2**20


def config_of(case: Case) -> PreTrainedConfig:
    """The architecture of a case."""
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if case.family == "gpt2":
        return GPT2Config(
            vocab_size=case.vocabulary, n_embd=case.hidden, n_layer=case.layers, n_head=4, n_positions=512, **tokens
        )
    kind = LlamaConfig if case.family == "llama" else Qwen2Config
    return kind(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=(4 if case.family == "llama" else 3) * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=case.family == "qwen2",
        **tokens,
    )


def make_models(case: Case, folder: Path) -> None:
    """A policy and a reward model with random weights, whose tokenizer has a word per row of the embedding."""
    torch.manual_seed(0)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{row}": row for row in range(3, case.vocabulary - 8)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    config = config_of(case)
    for name, kind in (("policy", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        config.num_labels = 1
        kind.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def any_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Scores that differ between responses."""
    return [float(sum(map(ord, text[:40])) % 97) for text in completions]


def main() -> None:
    """Plan the run, run it, and print both."""
    case, how = Case(**json.loads(sys.argv[1])), sys.argv[2]
    with TemporaryDirectory(prefix="kedge-bench-plan-") as scratch:
        folder = Path(scratch)
        make_models(case, folder)
        reward = {"reward": str(folder / "reward")} if case.reward else {}
        prompts = [" ".join(f"w{3 + (row * 31 + place) % 900}" for place in range(case.prompt)) for row in range(64)]
        rows = folder / "prompts.jsonl"
        rows.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
        flags = {"model": str(folder / "policy"), "data.prompts": [str(rows)], "out": str(folder / "out"), **reward}
        config = load_config(None, (), {**flags, **case.settings}, None, stage="ppo")
        given = None if case.reward else any_reward
        started = time.perf_counter()
        plan = plan_ppo(count_ppo(config))
        found: dict[str, Any] = {
            "planned": plan.peak.bytes / MIB, "phase": plan.peak.name, "planning": time.perf_counter() - started,
        }  # fmt: skip
        baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        counter = LiveBytes()
        if how == "live":
            with counter:
                result = run_ppo(config, reward=given)
            found["live"] = counter.peak / MIB
        else:
            result = run_ppo(config, reward=given)
            found["process"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB - baseline) / MIB
        found["seconds"] = result.metrics[-1]["time/update"]
        found["times"] = {name: each for name, each in result.metrics[-1].items() if name.startswith("time/")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
