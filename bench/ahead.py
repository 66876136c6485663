"""One step off, measured: `python -m bench.ahead` prints the last tables of bench/cluster/RESULTS.md (ten minutes).

Seconds per update of a policy that keeps a core busy, and the score after equal updates of a smaller one that learns to
write vowels. Every run has one thread for training and, where it samples ahead, one for sampling; the synchronous runs
are measured with one thread and with two.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import kedge

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "initializer_range": 0.1,
}
BUSY: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1024,
}
SEEDS = (0, 1, 2)
TIMED_UPDATES = 8
UNTIMED = 3
LEARNING_UPDATES = 40
STALENESS = (0, 1, 2, 4)


def save_letters(folder: Path, **shape: Any) -> Path:
    """A random Llama with letters as tokens; `shape` is part of its configuration."""
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        **{"vocab_size": len(tokenizer), **shape},
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def vowels(completions: Sequence[str], **_: object) -> list[float]:
    """The share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def run(model: Path, out: Path, **settings: Any) -> list[dict[str, float]]:
    """The metrics of a PPO run."""
    shared: dict[str, Any] = {"num_fixed_prompts": 0, "report": False, "precision": "fp32"}
    prompts = [f"{one}{two}" for one in LETTERS for two in LETTERS]
    result = kedge.ppo(model=str(model), prompts=prompts, reward=vowels, out=str(out), **shared, **settings)
    return list(result.metrics)


def times(folder: Path) -> None:
    """Print seconds per update."""
    model = save_letters(folder / "busy", **BUSY)
    print(
        "| staleness | threads | s per update | rollout | training waits | sampling waits |\n|---|---|---|---|---|---|"
    )
    for staleness, threads, shown in ((0, 1, "1"), (0, 2, "2"), (1, 1, "1 + 1")):
        rows = run(
            model,
            folder / f"times-{staleness}-{threads}",
            max_staleness=staleness,
            num_threads=threads,
            num_updates=TIMED_UPDATES,
            num_prompts=32,
            max_new_tokens=48,
            num_epochs=1,
            num_minibatches=2,
        )[UNTIMED:]
        names = ("time/update", "time/rollout", "time/waiting_for_rollout", "time/rollout_waiting")
        cells = [f"{statistics.median(row.get(name, 0.0) for row in rows):.2f}" for name in names]
        print(f"| {staleness} | {shown} | {' | '.join(cells)} |", flush=True)


def learning(folder: Path) -> None:
    """Print the score after equal updates."""
    model = save_letters(folder / "tiny", **TINY)
    print("| staleness | importance weights | score of the last 5 updates, by seed | mean | k3 | share | truncated |")
    print("|---|---|---|---|---|---|---|")
    for staleness in STALENESS:
        for cap in ("auto", None)[: 2 if staleness else 1]:
            ends: list[float] = []
            seen: list[list[float]] = []
            for seed in SEEDS:
                rows = run(
                    model,
                    folder / f"learning-{staleness}-{cap}-{seed}",
                    max_staleness=staleness,
                    old_logprobs={"trainer": cap},
                    seed=seed,
                    num_threads=1,
                    num_updates=LEARNING_UPDATES,
                    num_prompts=32,
                    max_new_tokens=12,
                    learning_rate=1e-3,
                )
                ends.append(statistics.fmean(row["reward/score_mean"] for row in rows[-5:]))
                names = ("policy/sampler_k3", "policy/sampler_share", "policy/sampler_truncated")
                seen.append([statistics.fmean(row.get(name, 0.0) for row in rows) for name in names])
            k3, share, truncated = (statistics.fmean(column) for column in zip(*seen, strict=True))
            corrected = "none" if cap is None or not staleness else "at most 2"
            scores = ", ".join(f"{end:.3f}" for end in ends)
            rest = f"{k3:.3f} | {share:.2f} | {truncated:.3f}" if staleness else "– | – | –"
            print(f"| {staleness} | {corrected} | {scores} | {statistics.fmean(ends):.3f} | {rest} |", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        times(Path(scratch))
        learning(Path(scratch))
