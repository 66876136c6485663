"""Callbacks run on the first rank alone, where a sharded model cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kedge
from kedge_base.errors import ConfigError
from tests.ranks.forked import forked_ranks
from tests.tiny import save_tiny_policy


def train(policy: Path, folder: Path) -> None:
    """A callback that samples from the model, which no other rank does."""
    sampled: list[int] = []

    def sample(update: kedge.Update) -> None:
        model: Any = update.model
        sampled.append(len(model.generate(torch.tensor([[40, 41]]), max_new_tokens=2)))

    settings: dict[str, Any] = {
        "num_updates": 1,
        "num_prompts": 2,
        "max_new_tokens": 6,
        "device": "cpu",
        "report": False,
    }
    common: dict[str, Any] = {
        "model": policy,
        "prompts": ["The boat", "A sailor"],
        "reward": lengths,
        "on_update": sample,
        **settings,
    }
    kedge.ppo(out=folder / "whole", **common)
    with pytest.raises(
        ConfigError, match=r"^update.model: with runtime.parallel=shard no rank has the whole weights; "
    ):
        kedge.ppo(out=folder / "parts", parallel="shard", **common)
    if torch.distributed.get_rank() == 0:
        assert sampled == [1]


def lengths(completions: list[str], **_: object) -> list[float]:
    """The number of letters."""
    return [float(len(text)) for text in completions]


def test_a_callback_is_told_that_a_sharded_model_cannot_be_used(tmp_path: Path) -> None:
    policy = save_tiny_policy(tmp_path / "policy")
    assert forked_ranks(train, policy, tmp_path) == [0, 0]
