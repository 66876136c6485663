"""Sampling ahead of training: which weights sample, and that runs repeat and resume bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kedge.config import config_from_settings
from kedge.rewards import Verdict
from kedge.runs.run import Resume
from kedge.runs.training import Callback, Update
from kedge.stages.ppo import run_ppo
from kedge.training.checkpoint.store import newest_valid
from kedge_base.errors import ConfigError, RewardError
from kedge_base.run_folder.output import CHECKPOINTS
from kedge_base.run_folder.record_format import read_samples
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times, varied
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

CONVERSATIONS = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def sampled(folder: Path) -> dict[int, list[list[int]]]:
    """The tokens of each update's responses."""
    found: dict[int, list[list[int]]] = {}
    for row in read_samples(folder):
        found.setdefault(row["update"], []).append(row["tokens"])
    return found


def interrupting(after: int) -> Callback:
    """A callback that interrupts a run once an update is complete."""

    def interrupt(update: Update) -> None:
        if update.number == after:
            raise KeyboardInterrupt

    return interrupt


def under_way(folder: Path) -> list[int]:
    """The updates with batches in the newest checkpoint."""
    checkpoint = newest_valid(folder / CHECKPOINTS, on_rejected=print)
    assert checkpoint is not None
    return [row["update"] for row in checkpoint.state["ahead"]["batches"]]


def drawing(completions: list[str], seed: int, **_: Any) -> list[Verdict]:
    """Scores with noise of their own, reasons, and answers that are not plain texts."""
    scores = [score + random.Random(seed).random() for score in varied(completions)]
    return [Verdict(score, "high" if score > 1 else "low", np.str_(score)) for score in scores]


@pytest.mark.parametrize("staleness", [1, 2])
def test_an_update_is_sampled_by_the_weights_of_as_many_updates_ago(tmp_path, policy, staleness):
    settings: dict[str, Any] = {"num_updates": 4, "learning_rate": 0.05}
    stale = configure(policy, tmp_path / "stale", max_staleness=staleness, **settings)
    rows = run_ppo(stale, prompts=PROMPTS, reward=varied).metrics
    assert [row["policy/staleness"] for row in rows] == [min(n, staleness) for n in range(4)]
    for row in rows:
        assert min(row["time/waiting_for_rollout"], row["time/rollout_waiting"]) >= 0
        assert (row["policy/sampler_k3"] > 1e-6) == (row["policy/staleness"] > 0)
        assert 0 <= row["policy/sampler_truncated"] <= 1
    assert not (tmp_path / "stale" / "incidents.jsonl").exists()  # other weights are not a mismatch

    # Weights that a run does not change are those of its start.
    run_ppo(configure(policy, tmp_path / "start", **settings | {"learning_rate": 0.0}), prompts=PROMPTS, reward=varied)
    found, start = sampled(tmp_path / "stale"), sampled(tmp_path / "start")
    for update in range(1, staleness + 2):
        assert found[update] == start[update]
    assert found[staleness + 2] != start[staleness + 2]


@pytest.mark.parametrize("prompts", [PROMPTS, CONVERSATIONS], ids=["texts", "conversations"])
def test_a_run_that_samples_ahead_repeats_and_resumes_to_the_bit(tmp_path, prompts):
    template = None if prompts is PROMPTS else CHAT_TEMPLATE
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tiny_tokenizer(chat_template=template))

    def configured(name: str):
        return configure(
            policy, tmp_path / name, num_updates=5, max_staleness=2, num_responses=2, constant_groups="drop",
            eval_every=2, learning_rate=0.01, num_fixed_prompts=1,
        )  # fmt: skip

    given: dict[str, Any] = {"prompts": prompts, "eval_prompts": prompts[:2], "reward": drawing}
    whole = run_ppo(configured("whole"), **given)
    with pytest.raises(KeyboardInterrupt):
        run_ppo(configured("split"), **given, callback=interrupting(3))
    assert under_way(tmp_path / "split") == [4, 5]
    split = run_ppo(configured("split"), **given, resume=Resume())
    assert metrics_without_times(tmp_path / "split") == metrics_without_times(tmp_path / "whole")
    weights, expected = (load_file(run.model / "model.safetensors") for run in (split, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_tokens_that_old_weights_saw_differently_are_masked_and_the_run_resumes_to_the_bit(tmp_path, policy):
    def configured(name: str, **settings: Any):
        return configure(
            policy, tmp_path / name, num_updates=4, max_staleness=2, learning_rate=0.05, num_samples=100, **settings
        )

    band = {"importance_mask": {"token": [0.9, 1.1]}}
    given: dict[str, Any] = {"prompts": PROMPTS, "reward": varied}
    whole = run_ppo(configured("whole", **band), **given)
    rows = whole.metrics
    assert rows[0]["policy/sampler_masked"] == 0  # the same weights
    assert [rows[0][f"policy/sampler_ratio_p{percent}"] for percent in ("01", "50", "99")] == pytest.approx([1, 1, 1])
    for row in rows[1:]:
        ratios = [row[f"policy/sampler_ratio_p{percent}"] for percent in ("01", "50", "99")]
        assert ratios == sorted(ratios)
        # If a hundredth of the tokens is below the band, or above it, at least that is masked.
        assert (row["policy/sampler_masked"] > 0) == (ratios[0] < 0.9 or ratios[2] > 1.1)
        assert row["policy/sampler_response_p01"] <= row["policy/sampler_response_p50"]
    assert 0 < rows[-1]["policy/sampler_masked"] < 1
    plain = run_ppo(configured("plain"), **given)
    assert "policy/sampler_masked" not in plain.metrics[-1]
    same, other = (load_file(run.model / "model.safetensors") for run in (whole, plain))
    assert not all(torch.equal(same[name], other[name]) for name in other)

    with pytest.raises(KeyboardInterrupt):
        run_ppo(configured("split", **band), **given, callback=interrupting(2))
    assert under_way(tmp_path / "split") == [3, 4]
    split = run_ppo(configured("split", **band), **given, resume=Resume())
    assert metrics_without_times(tmp_path / "split") == metrics_without_times(tmp_path / "whole")
    again = load_file(split.model / "model.safetensors")
    assert all(torch.equal(again[name], same[name]) for name in same)


def test_prompts_of_a_batch_that_failed_are_drawn_again(tmp_path, policy):
    calls: list[list[str]] = []
    is_away = True

    def judge(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
        calls.append(list(prompts))
        if is_away and len(calls) > 2:
            raise RuntimeError("the judge is away")
        return varied(completions)

    config = configure(policy, tmp_path / "run", num_updates=4, max_staleness=1)
    with pytest.raises(RewardError):
        run_ppo(config, prompts=PROMPTS, reward=judge)
    failed, is_away = len(calls), False
    rows = run_ppo(config, prompts=PROMPTS, reward=judge, resume=Resume()).metrics
    assert [row["update"] for row in rows] == [1, 2, 3, 4]
    assert calls[failed] == calls[2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"constant_groups": "resample", "num_responses": 2}, "ppo.constant_groups=resample"),
        ({"data": {"rest": 1}, "num_responses": 2}, "data.draw={evenly: 1}"),
        ({"data": {"draw": "by_spread"}, "num_responses": 2}, "data.draw=by_spread"),
        ({"on_nonfinite": "rollback"}, "ppo.on_nonfinite=rollback"),
        ({"on_spike": "rollback"}, "ppo.on_spike=rollback"),
        (
            {
                "constant_groups": "drop",
                "num_responses": 2,
                "ppo.value_warmup_updates.until": 0.5,
                "value_warmup_updates": 1,
            },
            "ppo.value_warmup_updates.until",
        ),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused_in_one_line(settings, said):
    with pytest.raises(ConfigError, match=said):
        config_from_settings("ppo", {"model": "m", "max_staleness": 1, **settings})
