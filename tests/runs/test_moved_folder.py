"""A run whose folder is moved or deleted while it trains still leaves its logs, a checkpoint and the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge_base.run_folder.record_format import read_metrics
from tests.stages.ppo.test_ppo import PROMPTS, configure
from tests.tiny import save_tiny_policy


@pytest.mark.parametrize("moved_in", [1, 2])
def test_what_a_run_makes_is_not_lost_with_its_folder(tmp_path: Path, capsys, moved_in: int) -> None:
    config = configure(save_tiny_policy(tmp_path / "policy"), tmp_path / "run", num_updates=2, num_fixed_prompts=1)
    calls = 0

    def moving(completions, **_):
        nonlocal calls
        calls += 1
        if calls == moved_in:
            (tmp_path / "run").rename(tmp_path / "moved")
        return [float(len(text)) for text in completions]

    run_ppo(config, prompts=PROMPTS, reward=moving)
    assert "was moved or deleted during the run" in capsys.readouterr().err.replace("\n", " ")
    run = tmp_path / "run"
    assert [row["update"] for row in read_metrics(run)] == [1, 2]
    assert {"config.yaml", "model", "checkpoints", "finished.json", "samples.jsonl"} <= {p.name for p in run.iterdir()}
    longer = configure(tmp_path / "policy", run, num_updates=3, num_fixed_prompts=1)
    assert len(run_ppo(longer, prompts=PROMPTS, reward=moving, resume=Resume()).metrics) == 3
