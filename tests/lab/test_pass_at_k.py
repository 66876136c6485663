"""pass@k and maj@k of real responses, against an enumeration of all subsets of those in judgments.jsonl."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import kedge
from kedge.config import Config, load_config
from kedge.rewards import Verdict
from kedge_base.errors import ConfigError, DataError, RewardError
from kedge_base.run_folder.record_format import read_json_lines
from kedge_inspect.diagnosis import diagnose_run
from kedge_lab.evaluate import evaluate_or_check, run_evaluate, run_pass_at_k
from kedge_lab.generate import run_generate
from tests.forking import forked_kedge
from tests.lab.evaluation.speakers import save_speaker
from tests.tiny import save_tiny_policy, save_tiny_reward_model

ROWS = [{"prompt": f"Deck {number}:"} for number in range(6)]
SAMPLES = 6


def last_letter(completions: list[str]) -> list[Verdict | None]:
    """The answer is the last character's class: right in about a third of random texts, not found without letters."""
    found: list[Verdict | None] = []
    for text in completions:
        kind = ord(text[-1]) % 3 if text else -1
        answer = None if kind < 0 or text[-1].isdigit() else "abc"[kind]
        found.append(Verdict(float(answer == "a"), "no answer found" if answer is None else "found", answer))
    return found


def nothing(completions: list[str]) -> list[None]:
    return [None] * len(completions)


def config_for(tmp_path: Path, *more: str, model: Path | None = None, out: str = "run") -> Config:
    flags = {"model": str(model or save_tiny_policy(tmp_path / "policy")), "out": str(tmp_path / out)}
    settings = ["generate.max_new_tokens=3", "generate.num_responses=6", "runtime.report=false", *more]
    return load_config(None, settings, flags)


def vote(drawn: tuple[dict[str, Any], ...]) -> float:
    counts = Counter(row["answer"] for row in drawn if row["answer"] is not None)
    most = [answer for answer, count in counts.items() if count == max(counts.values())]
    return ("a" in most) / max(1, len(most))


def expected(rows: list[dict[str, Any]], figure: Any, k: int) -> float:
    prompts = [rows[start : start + SAMPLES] for start in range(0, len(rows), SAMPLES)]
    return mean(mean(figure(drawn) for drawn in itertools.combinations(prompt, k)) for prompt in prompts)


def test_a_judge_that_scores_nothing_is_an_error(tmp_path):
    """Else a policy would solve none of the prompts, in a run that counts as finished."""
    with pytest.raises(RewardError, match=r"^nothing scored none of 36 responses of .*policy$"):
        run_pass_at_k(config_for(tmp_path), prompts=ROWS, judge=nothing)
    assert not (tmp_path / "run").exists()  # the corrected command may use the same folder


def test_another_policy_without_a_score_leaves_the_rest(tmp_path, capsys):
    calls = []

    def silent_once(completions, **columns):
        calls.append(completions)
        return [None if len(calls) == 2 else 1.0 for _ in completions]

    policy = save_tiny_policy(tmp_path / "policy")
    config = config_for(tmp_path, f"evaluate.frontier=[{policy}, {policy}]", model=policy)
    result = run_pass_at_k(config, prompts=ROWS, judge=silent_once)
    assert [each["pass@k"] == {} for each in result.summary["others"]] == [True, False]
    assert capsys.readouterr().out.count("no response has a score") == 1


def test_pass_and_majority_are_those_of_the_responses_in_the_file(tmp_path, capsys):
    result = evaluate_or_check(config_for(tmp_path), prompts=ROWS, judge=last_letter)
    rows = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS for _ in range(SAMPLES)]
    assert len({row["completion"] for row in rows}) > SAMPLES
    for k in (1, 2, 4, 6):
        passed = expected(rows, lambda drawn: any(row["score"] == 1 for row in drawn), k)
        assert passed > 0
        assert result.pass_at[k].value == pytest.approx(passed)
        assert result.maj_at[k].value == pytest.approx(expected(rows, vote, k))
        assert result.pass_at[k].low < result.pass_at[k].value
        assert result.summary["pass@k"][str(k)] == result.pass_at[k].as_json()
    assert list(result.pass_at) == list(result.maj_at) == [1, 2, 4, 6]
    assert result.pass_at[1].value == pytest.approx(result.maj_at[1].value)
    assert result.summary["score"]["value"] == pytest.approx(result.pass_at[1].value)
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8")) == result.summary
    printed = capsys.readouterr().out
    assert "6 responses to each of 6 prompts at temperature 1, judged by last_letter" in printed
    assert "maj@k" in printed
    assert f"mean score {result.pass_at[1].value:.2f} (" in printed
    assert "pass@k means little" not in printed
    assert not [finding.rule for finding in diagnose_run(tmp_path / "run") if "win_rate" in finding.rule]


def test_the_responses_are_those_of_generate(tmp_path):
    # The same prompts, seed and temperature: what one stage scores, the other counts.
    policy = save_tiny_policy(tmp_path / "policy")
    generated = run_generate(config_for(tmp_path, model=policy, out="a"), prompts=ROWS)
    evaluate_or_check(config_for(tmp_path, model=policy, out="b"), prompts=ROWS, judge=last_letter)
    judged = read_json_lines(tmp_path / "b" / "judgments.jsonl")
    assert [row["completion"] for row in judged] == [row["completion"] for row in generated.responses]


def test_other_policies_are_measured_on_the_same_prompts(tmp_path):
    mute = save_speaker(tmp_path / "mute", "<eos>")
    more = [f"evaluate.against={mute}", f"evaluate.frontier=[{tmp_path / 'policy'}]"]
    result = evaluate_or_check(config_for(tmp_path, *more), prompts=ROWS, judge=last_letter)
    silent, itself = result.summary["others"]
    assert silent["pass@k"]["6"]["value"] == 0
    # None of six prompts: exactly 0, up to 1 − 0.025^(1/6).
    assert silent["pass@k"]["6"]["high"] == pytest.approx(1 - 0.025 ** (1 / 6))
    assert silent["difference"]["pass@k"]["4"]["value"] == pytest.approx(result.pass_at[4].value)
    assert itself["pass@k"] == result.summary["pass@k"]
    assert itself["difference"]["pass@k"]["2"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    rows = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    assert [row["model"] for row in rows[::36]] == [str(tmp_path / "policy"), str(mute), str(tmp_path / "policy")]


def test_responses_without_a_score_are_not_drawn(tmp_path):
    def forgetful(completions: list[str]) -> list[float | None]:
        return [None if row % SAMPLES == 0 else float(row % SAMPLES == 1) for row in range(len(completions))]

    result = evaluate_or_check(config_for(tmp_path), prompts=ROWS, judge=forgetful)
    assert result.pass_at[1].value == pytest.approx(1 / 5)
    assert result.pass_at[4].value == pytest.approx(4 / 5)
    assert list(result.pass_at) == [1, 2, 4]  # no prompt has six scored responses
    assert result.maj_at == {}
    assert "maj@k" not in result.summary
    assert (result.summary["num_responses"], result.summary["num_scored"]) == (36, 30)


def test_partly_right_is_not_right(tmp_path):
    result = evaluate_or_check(config_for(tmp_path), prompts=ROWS, judge=lambda completions: [0.9] * len(completions))
    assert result.pass_at[6].value == 0
    assert result.summary["score"]["value"] == pytest.approx(0.9)


def test_scores_that_are_no_verdicts_are_named(tmp_path, capsys):
    judge = save_tiny_reward_model(tmp_path / "judge")
    config = config_for(tmp_path, "runtime.report=true", "generate.num_responses=2")
    evaluate_or_check(config, prompts=ROWS, judge=str(judge))
    scores = [row["score"] for row in read_json_lines(tmp_path / "run" / "judgments.jsonl")]
    low, high = (f"{score:.3g}".replace("-", "−") for score in (min(scores), max(scores)))
    line = f"Right is a score of 1 or more, and judge gives {low} to {high}: unless these are verdicts"
    assert line in capsys.readouterr().out
    assert line in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_what_does_not_fit_is_said_before_any_sampling(tmp_path):
    with pytest.raises(ConfigError, match=r"judge_mode=pairwise compares two responses, but pass@6 counts right ones"):
        evaluate_or_check(config_for(tmp_path, "evaluate.judge_mode=pairwise"), prompts=ROWS, judge=last_letter)
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match=r"prompts have no reference.* kedge.pass_at_k"):
        run_evaluate(config_for(tmp_path, "generate.num_responses=1"), prompts=ROWS, judge=last_letter)
    with pytest.raises(ConfigError, match="num_responses must be a whole number of 2 or more; it is 1"):
        kedge.pass_at_k(model=tmp_path / "policy", prompts=ROWS, judge=last_letter, num_responses=1)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no process groups")
def test_the_command_with_a_verifier(tmp_path):
    policy = save_speaker(tmp_path / "policy", "7")
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "Seven?", "answer": "#### 7777"}, {"prompt": "Eight?", "answer": "#### 8"}]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    arguments = ["evaluate", "--model", policy, "--prompts", prompts, "--judge", "kedge_tasks.verify:gsm8k_strict"]
    done = forked_kedge(*arguments, "--samples", "2", "--out", tmp_path / "run", "max_new_tokens=4")
    assert done.returncode == 0, done.stderr
    assert "gsm8k_strict: 100% cut off" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["pass@k"]["2"]["value"] == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "solves 0% (0% to 84%) of 2 prompts" in page  # 1 − 0.025^(1/2)
