"""In a loop of the caller's own, every rank works with what the first one was given."""

from __future__ import annotations

import json
import os
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kedge
from kedge.stages.ppo import result
from kedge_base.errors import DataError
from tests.ranks.forked import forked_ranks
from tests.tiny import save_tiny_policy

IDS = [[40, 41, 42, 43], [50, 51, 52, 53]]
RESPONSES = [[60, 61, 62, 2], [70, 71, 2]]
LOGPROBS = [[-1.0] * 4, [-2.0] * 3]


def loop(policy: Path, folder: Path) -> None:
    """A loop whose ranks are given different things; each writes what it saw."""
    number = int(os.environ["RANK"])
    seen: dict[str, Any] = {}
    save = result._save

    def slow_save(*arguments: Any) -> None:
        time.sleep(0.5)
        save(*arguments)

    result._save = slow_save
    with kedge.PpoTrainer(model=policy, out=folder / "run", num_updates=2, max_new_tokens=6, device="cpu") as trainer:
        sampled = trainer.sample([torch.tensor(ids) + number for ids in IDS])
        seen["sampled"] = sampled.prompt_ids
        trainer.update(sampled, [np.float32(0.5), np.array([1.0] * len(sampled.response_ids[1]))])
        batch = trainer.batch(
            [np.array(IDS[0]), list(np.array(IDS[0]))],
            [torch.tensor(ids) for ids in RESPONSES] if number == 0 else [[80, 2], [81, 2]],
            logprobs=[np.array(row) for row in LOGPROBS] if number == 0 else [[-4.0] * 2] * 2,
            stopped=[True, True] if number == 0 else [False, False],
            groups=[0, 1] if number == 0 else [0, 0],
            policy_version=number,
        )
        seen |= {"responses": batch.response_ids, "logprobs": batch.logprobs, "stopped": batch.stopped}
        seen |= {"groups": batch.groups, "version": batch.rollout.policy_version.tolist()}
        trainer.update(batch, [1.0, 0.0])
        seen["saved"] = (trainer.save() / "model.safetensors").exists()
        with pytest.raises(DataError, match="an object of type date cannot be sent to the other ranks"):
            trainer.generate([{"prompt": "The boat", "day": date(2026, 1, 1)}])
    (folder / f"{number}.json").write_text(json.dumps(seen), encoding="utf-8")


def test_all_ranks_work_with_what_the_first_one_was_given(tmp_path: Path) -> None:
    policy = save_tiny_policy(tmp_path / "policy")
    assert forked_ranks(loop, policy, tmp_path) == [0, 0]
    for number in range(2):
        assert json.loads((tmp_path / f"{number}.json").read_text(encoding="utf-8")) == {
            "sampled": IDS,
            "responses": RESPONSES,
            "logprobs": LOGPROBS,
            "stopped": [True, True],
            "groups": [0, 1],
            "version": [0, 0],
            "saved": True,
        }
