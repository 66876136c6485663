"""Reward models in bf16 are sharded as others are."""

from __future__ import annotations

from pathlib import Path

import kedge
from kedge_base.run_folder.record_format import read_metrics
from tests.ranks.forked import forked_ranks
from tests.tiny import save_tiny_policy, save_tiny_reward_model


def train(models: Path, folder: Path) -> None:
    """An update with a reference and a reward model in fewer bits."""
    kedge.ppo(
        model=models / "policy",
        prompts=["The boat", "A sailor"],
        reward=models / "reward",
        out=folder,
        device="cpu",
        report=False,
        parallel="shard",
        frozen_dtype="bf16",
        num_updates=1,
        num_prompts=2,
        max_new_tokens=6,
    )


def test_a_sharded_run_holds_its_frozen_models_in_bf16(tmp_path: Path) -> None:
    """The error of the policy's reference is measured; that of the scores would need the whole reward model."""
    save_tiny_policy(tmp_path / "policy")
    save_tiny_reward_model(tmp_path / "reward")
    assert forked_ranks(train, tmp_path, tmp_path / "run") == [0, 0]
    [row] = read_metrics(tmp_path / "run")
    assert row["objective/reference_error"] > 0
    assert "reward/rounding_error" not in row
