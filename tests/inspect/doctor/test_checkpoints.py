"""The doctor points at a checkpoint that exists, or at the fields that keep one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kedge_inspect.doctor.hacking import earlier_policy, proxy_up_judge_down
from kedge_inspect.doctor.series import Series
from tests.inspect.doctor.synthetic import synthetic_run

JUDGE = Series(range(1, 41), [*(update / 20 for update in range(1, 21)), *(1 - update / 20 for update in range(1, 21))])
"""Rises to 1 in update 20, whose responses the policy after update 19 sampled, and falls to 0 in update 40."""


def advice(folder: Path, *kept: int, best: int | None = None, name: str = "score/judge") -> str:
    for update in kept:
        (folder / f"checkpoints/update-{update:06d}").mkdir(parents=True)
    if best is not None:
        (folder / "checkpoints/best.json").write_text(f'{{"update": {best}}}')
    return earlier_policy(replace(synthetic_run(), folder=folder), name, JUDGE)


@pytest.mark.parametrize(("kept", "named"), [((19, 20), 19), ((4, 24, 39, 40), 24), ((16,), 16)])
def test_the_kept_checkpoint_where_the_judge_was_highest(tmp_path, kept, named):
    assert advice(tmp_path, *kept) == f"use the policy after update {named}: --model {tmp_path}@{named}"


def test_the_best_one_by_its_name(tmp_path):
    assert advice(tmp_path, 21, 40, best=21) == f"use the policy after update 21: --model {tmp_path}@best"


@pytest.mark.parametrize("kept", [(), (4, 39, 40)])
def test_one_that_is_as_bad_as_the_end_is_not_advised(tmp_path, kept):
    said = advice(tmp_path, *kept)
    assert "no checkpoint near update 20 was kept" in said
    assert "ppo.eval_every=4 with checkpoint.keep_best=eval/score/judge keeps the best one" in said


def test_a_held_out_metric_belongs_to_the_policy_after_the_update(tmp_path):
    assert advice(tmp_path, 19, 20, name="eval/win_rate").endswith("@20")


def test_a_falling_win_rate_on_held_out_prompts_is_found(tmp_path):
    rate = [0.5, *(0.5 + 0.04 * step for step in range(1, 8)), *(0.78 - 0.05 * step for step in range(1, 9))]
    run = replace(synthetic_run(metrics={"reward/score_mean": lambda done: 1 + done, "eval/win_rate": rate}),
                  folder=tmp_path)  # fmt: skip
    symptom = proxy_up_judge_down.find(run)
    assert symptom is not None
    assert "eval/win_rate, measured on held-out prompts, falls from 0.740" in symptom.seen
    assert "ppo.eval_every=1 with checkpoint.keep_best=eval/win_rate" in symptom.advice
