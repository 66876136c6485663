"""The plan of a critic's training: sums by hand, the live bytes of a real run, and its place in the chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from kedge.config import Config, load_config
from kedge.models.live_bytes import LiveBytes
from kedge.plan.critic_memory import CriticWork, critic_phases
from kedge.plan.ppo_memory import PpoWork
from kedge.stages.critic import run_critic
from kedge.stages.planning.plan import count_stage, plan_of
from kedge.stages.planning.shallow import save_shallow, text_of
from kedge.stages.planning.stages import rlhf_stages
from tests.plan.test_machine import memory_of, scores


def critic_config(tmp_path: Path, **settings: Any) -> Config:
    """A model of 3 layers, 16 prompts and 2 responses to each."""
    size = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    save_shallow(LlamaConfig(**size, num_hidden_layers=3), tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in text_of([28] * 16)))
    flags = {"model": str(tmp_path / "model"), "out": str(tmp_path / "out"), "data.prompts": [str(rows)]}
    shape = {"rollout.num_prompts": 8, "rollout.max_new_tokens": 16, "critic.num_responses": 2, "critic.batch_size": 8}
    fixed = {"runtime.device": "cpu", "runtime.precision": "fp32", "data.eval_fraction": 0.25}
    return load_config(None, (), {**flags, **shape, **fixed, **settings}, None, stage="critic")


@pytest.mark.parametrize(
    "settings",
    [
        {"critic.kind": "separate", "runtime.micro_batch_tokens": 128},
        {"critic.kind": "shared", "ppo.score_at": "after_last"},
    ],
    ids=["separate", "shared"],
)
def test_the_planned_peak_of_a_critics_training_is_that_of_a_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Within 5 %, as above. 12 prompts are trained on, 4 held out: two parts and one, of 8 prompts at most."""
    config = critic_config(tmp_path, **settings)
    planned = plan_of(count_stage(config, "critic"))
    counter = LiveBytes()
    with counter:
        run_critic(config, reward=scores, planned=planned)
    assert memory_of(tmp_path / "out")["planned_bytes"] == round(planned.needed)
    assert planned.peak.bytes == pytest.approx(counter.peak, rel=0.05)
    assert planned.updates == 3


def test_the_sums_of_a_critics_training_by_hand() -> None:
    """A policy and a critic of 100 bytes each; states of 40 bytes, and sums of their squares of 1000."""
    figures = {
        "policy.weights": 100, "policy.trained": 0, "critic.weights": 100, "critic.trained": 100,
        "prefill.peak": 30, "prefill.kept": 80, "prefill.cache": 72, "prefill.layer cache": 36, "draw.peak": 7,
        "decode.peak": 5, "fit.peak": 50, "fit.kept": 40, "fit.square": 1000, "values.peak": 45,
        "train.trunk": 70, "train.gradients": 100, "train.flops": 1,
        "train.fresh.0.peak": 95, "train.fresh.0.gradients": 10,
        "train.fresh.1.peak": 130, "train.fresh.1.gradients": 100,
    }  # fmt: skip
    sampling = PpoWork(("policy", "critic"), 4, 36, 2, 2, 1, 1, 1.0, 1.0, accumulates=False, reuses_pass=False)
    work = CriticWork(sampling, "critic", 7.0, 1.0, 1.0, 1.0, accumulates=False)
    held, tables = 200 + 7.0, 2 * (9 * 4 + 36 * (11 + 32 + 8))
    assert {phase.name: phase.bytes for phase in critic_phases(figures, work)} == {
        "rollout": held + tables + 72 * 40 / 36 + 18 + 8 + 7,
        "experience": held + tables,
        "fit": held + 6 * 1000,
        "train": held + 200 + 130,
        "step": held + 200 + 100,
        "evaluation": held + 200 + 45,
    }
    wide = critic_phases({**figures, "fit.square": 1, "fit.peak": 120}, work)
    assert wide[2].bytes == held + 120 + 2


def test_a_chain_is_planned_stage_by_stage_with_its_critic() -> None:
    settings = {"model": "m", "critic.kind": "shared", "rlhf.train_critic": True}
    stages = list(rlhf_stages(load_config(None, (), settings, None, stage="rlhf")))
    assert [name for name, _ in stages] == ["sft", "reward", "critic", "ppo"]
    for _, config in stages[2:]:
        assert [term.source for term in config.reward] == ["m"]
    assert stages[3][1].ppo.resolved_critic == "shared"
