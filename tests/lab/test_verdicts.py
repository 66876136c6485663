"""A verifier's reasons in the results of the stages, and mistakes in rows before any sampling."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kedge.config import load_config
from kedge.rewards import Verdict
from kedge.stages.ppo import run_ppo
from kedge_base.errors import RewardError
from kedge_base.run_folder.record_format import read_samples
from kedge_inspect.page.responses import shown_responses
from kedge_inspect.record import read_run
from kedge_lab.evaluate import run_evaluate
from kedge_lab.generate import run_generate
from tests.lab.evaluation.speakers import save_speaker
from tests.stages.ppo.test_ppo import configure
from tests.tiny import save_tiny_policy

ROWS = [{"prompt": f"Deck {number}:", "answer": f"#### {number}"} for number in range(4)]
GSM8K = "kedge_tasks.verify:gsm8k"

by_name = pytest.mark.skipif(os.name != "posix", reason="Windows has no process groups")


def spoken(completions: list[str], **_: Any) -> list[Verdict]:
    return [Verdict(float("e" in text), "has an e" if "e" in text else "has none") for text in completions]


@by_name
def test_a_run_has_the_reasons_in_metrics_and_samples(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy")
    config = configure(policy, tmp_path / "run", num_updates=2, eval_every=1, num_fixed_prompts=1, reward=GSM8K)
    result = run_ppo(config, prompts=ROWS, eval_prompts=ROWS[:2])
    for row in result.metrics:
        for start in ("verdict/gsm8k/", "eval/verdict/gsm8k/"):
            shares = {name: share for name, share in row.items() if name.startswith(start)}
            assert sum(shares.values()) == pytest.approx(1)
    samples = read_samples(tmp_path / "run")
    assert {row["fixed"] for row in samples} == {None, 0}
    known = {"right", "wrong value", "wrong format", "no answer found", "cut off"}
    assert {row["reason"] for row in samples} <= known
    shown = shown_responses(read_run(tmp_path / "run"), most_bytes=10**6)
    assert [row["reason"] for prompt in shown["prompts"] for row in prompt["responses"] if row["update"] == 1]


def test_a_run_without_reasons_has_none_in_its_files(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy")
    run_ppo(
        configure(policy, tmp_path / "run", num_updates=1),
        prompts=ROWS,
        reward=lambda completions, answer: [float(len(text)) for text in completions],
    )
    assert "reason" not in (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8")
    assert "verdict/" not in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")


@by_name
@pytest.mark.parametrize("stage", ["ppo", "generate"])
def test_a_mistake_in_a_row_ends_the_run_before_any_sampling(tmp_path, stage):
    policy = save_tiny_policy(tmp_path / "policy")
    rows = [*ROWS, {"prompt": ""}, {"prompt": "Deck?", "answer": "four"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n" + "".join(f"{json.dumps(row)}\n" for row in rows))
    number = len(rows) + 2  # of the file's lines, not of the rows that can be used
    message = (
        rf"^gsm8k: column 'answer', {path}:{number}: 'four' is not usable; expected a solution that ends with its "
    )
    source = [f"data.prompts=[{path}]", "data.max_rejected_fraction=0.5"]
    run, config = {
        "ppo": (
            run_ppo,
            configure(policy, tmp_path / "run", reward=GSM8K, prompts=[str(path)], max_rejected_fraction=0.5),
        ),
        "generate": (run_generate, evaluated(policy, tmp_path, f"reward=[{GSM8K}]", *source)),
    }[stage]
    with pytest.raises(RewardError, match=message):
        run(config)
    assert not (tmp_path / "run" / "samples.jsonl").exists()
    assert not (tmp_path / "run" / "responses.jsonl").exists()


def evaluated(model: Path, tmp_path: Path, *more: str) -> Any:
    return load_config(None, ["generate.max_new_tokens=4", *more], {"model": str(model), "out": str(tmp_path / "run")})


def test_generated_responses_have_their_reasons(tmp_path, capsys):
    speaker = save_speaker(tmp_path / "policy")
    result = run_generate(evaluated(speaker, tmp_path), prompts=[{"prompt": "A", "reason": "own"}], reward=spoken)
    assert result.responses[0]["reason"] == "has an e"
    assert result.responses[0]["given_reason"] == "own"
    assert result.summary["verdicts"] == {"verdict/spoken/has_an_e": 1.0}
    assert "spoken: 100% has an e\n" in capsys.readouterr().err


def test_judged_responses_have_their_reasons(tmp_path):
    speaker = save_speaker(tmp_path / "policy")
    rows = [{"prompt": "A", "completion": "two"}, {"prompt": "B", "completion": "three"}]
    result = run_evaluate(evaluated(speaker, tmp_path), prompts=rows, judge=spoken)
    assert result.summary["verdicts"] == {"verdict/spoken/has_an_e": 1.0}
    assert result.summary["verdicts_against"] == {"verdict/spoken/has_an_e": 0.5, "verdict/spoken/has_none": 0.5}
    written = (tmp_path / "run" / "judgments.jsonl").read_text(encoding="utf-8").splitlines()
    assert '"reason": "has an e", "reason_against": "has none"' in written[0]
