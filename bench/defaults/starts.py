"""Starting points of the runs: a model, its prompts and a reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bench.faults.base import QUIET, make_base
from kedge.models.untrained import train_tokenizer
from kedge_lab.demo import recipe
from kedge_lab.demo.world import World

NUM_TEXTS: Final = 512
SEED: Final = 0
"""Seed of the models; the runs have their own."""

SETTINGS: Final[Mapping[str, Any]] = {**QUIET, "runtime.num_fixed_prompts": 0, "runtime.num_samples": 0}
"""Of every run: one thread, and no output that the table does not need."""


@dataclass(frozen=True)
class Start:
    """A task of PPO.

    Attributes:
        name: Its name in the table.
        model: Folder of the policy's model.
        reward: A reward source by name, or a function.
        prompts: A file, or rows.
        settings: Further settings, by dotted name.
    """

    name: str
    model: Path
    reward: str | Callable[..., Sequence[float]]
    prompts: str | Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)


def built_in(work: Path) -> list[Start]:
    """Two starts that need no data: the demo's SFT policy with its reward model, and a random GPT-2.

    Args:
        work: Folder of the models, which are made unless they exist.
    """
    base = make_base(work, SEED)
    texts = [record.prompt for record in World(SEED).demonstrations(NUM_TEXTS)]
    random = work / "random-gpt2"
    if not random.is_dir():
        _save_random_gpt2(random, texts)
    return [
        Start(
            "demo's SFT policy, its reward model",
            base.policy,
            str(base.reward),
            base.prompts(),
            {"rollout.temperature": recipe.TEMPERATURE, "rollout.max_new_tokens": recipe.MAX_NEW_TOKENS},
        ),
        Start("random GPT-2, share of vowels", random, vowels, [{"prompt": text[:60]} for text in texts]),
    ]


def vowels(completions: Sequence[str], **columns: Any) -> list[float]:
    """The share of vowels, a reward that a policy can raise token by token."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def _save_random_gpt2(folder: Path, texts: Sequence[str]) -> None:
    """GPT-2 with two blocks of 64 units, and weights as far from 0 as the demo's."""
    tokenizer = train_tokenizer(texts, vocab_size=512)
    end = cast("int", tokenizer.eos_token_id)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_layer=2, n_head=4, n_embd=64, n_positions=256,
        initializer_range=recipe.MODEL["initializer_range"], bos_token_id=end, eos_token_id=end,
        pad_token_id=cast("int", tokenizer.pad_token_id),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
