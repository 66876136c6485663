"""The whole chain on tiny models: folders, rounds, labeling, interruptions and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kedge
from kedge.config import Config, check_stage, load_config, with_values
from kedge.stages import rlhf
from kedge.stages.policy import SamplingSettings
from kedge.stages.rlhf import run_rlhf
from kedge_base.errors import ConfigError, KedgeError
from kedge_base.run_folder.record_format import read_json_lines
from kedge_plan.report import MachinePlan, PlannedPhase
from tests.forking import forked_kedge
from tests.lab.evaluation.speakers import run_kedge
from tests.tiny import save_tiny_policy

PROMPTS = [{"prompt": f"Deck {number}:", "topic": number} for number in range(6)]
DEMONSTRATIONS = [{"prompt": row["prompt"], "completion": " the sea"} for row in PROMPTS]
COMPARISONS = [{"prompt": row["prompt"], "chosen": " the sea", "rejected": " rope rope"} for row in PROMPTS]
SETTINGS = [
    "sft.batch_size=4",
    "sft.learning_rate=0.01",
    "reward_model.batch_size=4",
    "data.eval_fraction=0.2",
    "rollout.num_prompts=4",
    "rollout.max_new_tokens=6",
    "ppo.num_updates=2",
    "ppo.num_epochs=1",
    "ppo.num_minibatches=2",
    "ppo.critic=separate",
    "rlhf.num_prompts=4",
    "rlhf.num_responses=3",
    "runtime.report=false",
]
ROWS: dict[str, Any] = {"demonstrations": DEMONSTRATIONS, "comparisons": COMPARISONS, "prompts": PROMPTS}


def config_for(tmp_path: Path, *more: str) -> Config:
    model = tmp_path / "base"
    if not model.exists():
        save_tiny_policy(model)
    return load_config(None, [*SETTINGS, *more], {"model": str(model), "out": str(tmp_path / "run")})


def like_vowels(completions: list[str], topic: list[int]) -> list[float]:
    return [sum(text.count(vowel) for vowel in "aeiou") for text in completions]


def stage(folder: Path) -> Config:
    return load_config(folder / "config.yaml")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_one_round_is_the_three_stages_in_a_chain(tmp_path, capsys):
    with_critic = ["rlhf.train_critic=true", "critic.num_responses=1", "critic.batch_size=4"]
    stages = ("sft", "reward", "critic", "ppo")
    planned = {
        name: MachinePlan(name, "step", (PlannedPhase("train", {("weights", "policy"): 2.0**30}),)) for name in stages
    }
    result = run_rlhf(config_for(tmp_path, *with_critic), **ROWS, planned=planned)
    run = tmp_path / "run"
    for name in stages:
        assert json.loads((run / name / "finished.json").read_text())["memory"]["planned_bytes"] == 2**30
    assert stage(run / "reward").reward_model.base == str(run / "sft" / "model")
    critic = stage(run / "critic")
    assert (critic.model, [term.source for term in critic.reward]) == (
        str(run / "sft" / "model"),
        [str(run / "reward/model")],
    )
    assert stage(run / "ppo").ppo.critic_init == str(run / "critic" / "model")
    ppo = stage(run / "ppo")
    assert (ppo.model, [term.source for term in ppo.reward]) == (
        str(run / "sft" / "model"),
        [str(run / "reward/model")],
    )
    assert len(result.rounds) == 1
    assert [row["update"] for row in result.rounds[0].ppo.metrics] == [1, 2]

    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary == result.summary
    assert summary["sft"]["num_steps"] == 1
    assert summary["rounds"][0]["reward_model"]["num_comparisons"] == 4
    assert summary["rounds"][0]["ppo"]["score_last"] == result.rounds[0].ppo.metrics[-1]["reward/score_mean"]
    assert summary["rounds"][0]["critic"]["kind"] == "separate"
    printed = capsys.readouterr().out
    assert "round 1" in printed
    assert "explained by" in printed

    assert AutoTokenizer.from_pretrained(result.model).pad_token_id == 0
    final, last, first = (weights(folder) for folder in (result.model, run / "ppo" / "model", tmp_path / "base"))
    assert all(torch.equal(final[name], last[name]) for name in last)
    assert any(not torch.equal(final[name], first[name]) for name in first)


def test_a_second_round_learns_from_the_labelers_rankings(tmp_path):
    run = tmp_path / "run"
    own = tmp_path / "link" / "run" / "sft" / "model"
    (tmp_path / "link").symlink_to(tmp_path)
    config = config_for(tmp_path, "rlhf.num_rounds=2", f"ppo.reference={own}")
    result = run_rlhf(config, **ROWS, labeler=like_vowels)
    rankings = read_json_lines(run / "comparisons-2.jsonl")
    assert 1 <= len(rankings) <= 4
    for row in rankings:
        scores = like_vowels(row["responses"], [])
        ordered = [score for _, score in sorted(zip(row["ranks"], scores, strict=True))]
        assert ordered == sorted(scores, reverse=True)
    assert stage(run / "reward-2").data.comparisons == [
        str(run / "comparisons.jsonl"),
        str(run / "comparisons-2.jsonl"),
    ]
    assert stage(run / "reward-2").reward_model.base == str(run / "sft" / "model")
    assert stage(run / "ppo-2").model == str(run / "ppo" / "model")
    assert [term.source for term in stage(run / "ppo-2").reward] == [str(run / "reward-2" / "model")]
    counts = [each["reward_model"]["num_comparisons"] for each in result.summary["rounds"]]
    assert counts[1] > counts[0] == 4
    final, last = weights(result.model), weights(run / "ppo-2" / "model")
    assert all(torch.equal(final[name], last[name]) for name in last)


def test_without_comparisons_the_labeler_ranks_responses_of_the_sft_policy_first(tmp_path, monkeypatch):
    run = tmp_path / "run"
    config = config_for(tmp_path, "schedules={rollout.temperature: {1: 1.1, 2: 0.9}}")
    given: dict[str, Any] = {"demonstrations": DEMONSTRATIONS, "prompts": PROMPTS}
    sampled: list[SamplingSettings] = []
    monkeypatch.setattr(rlhf, "SamplingSettings", lambda **of: sampled.append(SamplingSettings(**of)) or sampled[-1])
    result = run_rlhf(config, **given, labeler=like_vowels)
    assert [each.temperature for each in sampled] == [1.1]  # as in PPO's first update
    assert stage(run / "reward").data.comparisons == [str(run / "comparisons.jsonl")]
    rows = read_json_lines(run / "comparisons.jsonl")
    assert 1 <= len(rows) <= 4
    for row in rows:
        scores = like_vowels(row["responses"], [])
        assert [score for _, score in sorted(zip(row["ranks"], scores, strict=True))] == sorted(scores, reverse=True)
    assert len(result.rounds) == 1
    with pytest.raises(KedgeError, match=r"needs data\.comparisons: pass comparisons=, or rlhf\.labeler to compare"):
        kedge.rlhf(model=str(tmp_path / "base"), **given)


def test_a_round_may_start_afresh_and_rewards_and_judges_may_be_added(tmp_path, capsys):
    more = [
        "preset=[small-cpu,s2-defaults]",
        "rlhf.num_rounds=2",
        "rlhf.keep_comparisons=false",
        "rlhf.restart_policy=true",
        "data.eval_fraction=0",
    ]
    more.append(f"reward_model.base={tmp_path / 'base'}")
    penalty = "reward={source: 'kedge.rewards.penalties:too_long', weight: 0}"
    result = run_rlhf(config_for(tmp_path, *more, penalty, "ppo.num_updates=1"), **ROWS, labeler=like_vowels)
    run = tmp_path / "run"
    assert capsys.readouterr().err.count("presets differ, and the later one counts: ppo.learning_rate=1e-05") == 1
    assert stage(run / "ppo-2").preset == ["small-cpu", "s2-defaults"]
    assert stage(run / "reward-2").data.comparisons == [str(run / "comparisons-2.jsonl")]
    assert stage(run / "ppo-2").model == str(run / "sft" / "model")
    assert [term.weight for term in stage(run / "ppo-2").reward] == [1.0, 0.0]
    assert "score/too_long" in result.rounds[1].ppo.metrics[0]


def test_what_is_interrupted_leaves_the_newest_policy(tmp_path, monkeypatch):
    def interrupted(config, **rows):
        raise KeyboardInterrupt

    monkeypatch.setattr(rlhf, "run_ppo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_rlhf(config_for(tmp_path), **ROWS)
    saved, newest = weights(tmp_path / "run" / "model"), weights(tmp_path / "run" / "sft" / "model")
    assert all(torch.equal(saved[name], newest[name]) for name in newest)


@pytest.mark.parametrize(
    ("changed", "more", "said"),
    [
        ({"prompts": [{"topic": 1}]}, [], "field 'prompt' is missing"),
        ({"comparisons": [{"prompt": "a", "chosen": "b"}]}, [], "field 'rejected' is missing"),
        ({"comparisons": ["a", "b"]}, [], "the row is text"),
        ({"demonstrations": [{"prompt": "a"}]}, [], "field 'completion' is missing"),
        ({"labeler": lambda words: []}, ["rlhf.num_rounds=2"], "does not take `completions`"),
        ({"labeler": lambda completions, mood: []}, ["rlhf.num_rounds=2"], "takes 'mood', but no column"),
        ({}, ["rlhf.num_rounds=2"], "needs rlhf.labeler"),
        (
            {"labeler": lambda completions: [0.0] * len(completions)},
            ["rlhf.num_rounds=2", "data.columns.comparisons.prompt=question"],
            "data.columns.comparisons.prompt does not fit the comparisons that rlhf.labeler makes",
        ),
        ({}, ["rlhf.train_critic=true", "ppo.critic=auto", "ppo.advantage=to_go"], "ppo.advantage=to_go needs none"),
        ({}, ["rlhf.train_critic=true", "critic.kind=shared"], "ppo.critic=separate does not fit critic.kind=shared"),
        (
            {},
            ["rlhf.train_critic=true", "ppo.critic_init=policy"],
            "starts from is critic.base",
        ),
        ({}, ["reward=nowhere.py:f"], "reward file 'nowhere.py' does not exist"),
        ({}, ["reward={tmp_path}/base", "ppo.critic_init=reward"], "exactly one reward model"),
        ({}, ["rollout.max_new_tokens=256"], "no room for a prompt"),
        *(
            ({}, settings.split(), said)
            for settings, said in {
                "ppo.policy_loss=nowhere.py:f": "ppo.policy_loss file 'nowhere.py' does not exist",
                "ppo.advantage=nowhere.py:f": "ppo.advantage file 'nowhere.py' does not exist",
                "ppo.eval_every=1 evaluate.judge=nowhere.py:f": "'nowhere.py' does not exist",
                "ppo.eval_every=1 data.eval_prompts=nowhere.jsonl": "nowhere.jsonl: no such file",
                "ppo.eval_every=1 data.eval_fraction=0": "set data.eval_prompts, or data.eval_fraction > 0",
                "ppo.critic_check=1 data.eval_fraction=0": "ppo.critic_check needs held-out prompts",
                "data.eval_prompts=nowhere.jsonl": "only read with ppo.eval_every",
                "data.curriculum=mood": "every prompt needs a number in this column",
                "ppo.ptx_coef=1 data.pretraining=nowhere.jsonl": "nowhere.jsonl: no such file",
                "ppo.reference=/nowhere": "model '/nowhere': no such folder",
                "reward_model.base=/nowhere": "model '/nowhere': no such folder",
                "rlhf.train_critic=true ppo.reference=/nowhere": "use ppo.kl_in=loss or ppo.kl_coef=0",
                "rlhf.train_critic=true critic.base=/nowhere": "model '/nowhere': no such folder",
                "environment.source=nowhere.py:Game": "environment file 'nowhere.py' does not exist",
                "rollout.engine=vllm rollout.engine.servers=http://localhost:1": "http://localhost:1 does not answer",
                "ppo.eval_patience=2": "set ppo.eval_every",
                "checkpoint.keep_best=eval/score": "is measured in evaluations: set ppo.eval_every",
                "checkpoint.keep_best=eval/accuracy data.eval_fraction=0": "set data.eval_fraction above 0",
            }.items()
        ),
    ],
)
def test_mistakes_show_before_any_training(tmp_path, changed, more, said):
    more = [each.replace("{tmp_path}", str(tmp_path)) for each in more]
    with pytest.raises(KedgeError, match=said) as caught:
        run_rlhf(config_for(tmp_path, *more), **{**ROWS, **changed})
    assert "\n" not in str(caught.value)
    assert {path.name for path in (tmp_path / "run").glob("*")} <= {"rejected.jsonl", "reward.log"}


def test_a_further_round_has_no_share_of_mixed_comparisons():
    given = ["model=m", "data.demonstrations=d.jsonl", "data.prompts=p.jsonl", "data.comparisons=[a.jsonl,b.jsonl]"]
    given += ["rlhf.num_rounds=2", "rlhf.labeler=a.py:f"]
    config = load_config(overrides=[*given, "data.mix=[0.5,0.5]"])
    check_stage(load_config(overrides=[*given, "data.comparisons=c.jsonl", "data.columns.completion=answer"]), "rlhf")
    with pytest.raises(ConfigError, match=r"data\.mix has no share for the comparisons of a further round"):
        check_stage(config, "rlhf")
    given += ["data.comparisons=c.jsonl", "data.demonstrations=[d.jsonl,e.jsonl]"]
    with pytest.raises(ConfigError, match="would also be that of the comparisons in a further round"):
        check_stage(load_config(overrides=[*given, "data.mix=[9,1]"]), "rlhf")
    named = load_config(overrides=[*given, "data.mix={d.jsonl: 9, e.jsonl: 1}"])
    later = with_values(named, {"data.comparisons": ["c.jsonl", "comparisons-2.jsonl"]})
    check_stage(named, "rlhf")
    assert (later.data.shares("demonstrations"), later.data.shares("comparisons")) == ((9, 1), None)
    check_stage(load_config(overrides=[*given, "data.mix=[9,1]", "rlhf.keep_comparisons=false"]), "rlhf")


def test_rejected_rows_of_every_source_are_written_before_the_start(tmp_path):
    bad: dict[str, Any] = {name: [*rows, {"unusable": name}] for name, rows in ROWS.items()}
    with pytest.raises(KedgeError, match="1 of 7 rows"):
        run_rlhf(config_for(tmp_path), **{**bad, "prompts": PROMPTS, "demonstrations": DEMONSTRATIONS})
    [row] = read_json_lines(tmp_path / "run" / "rejected.jsonl")
    assert "comparisons" in row["preview"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rejected.jsonl"]
    (tmp_path / "mine.py").write_text("f = 1 / 0")
    with pytest.raises(KedgeError, match="reward file"):
        run_rlhf(config_for(tmp_path, "data.max_rejected_fraction=0.2", f"reward={tmp_path}/mine.py:f"), **bad)
    previews = [row["preview"] for row in read_json_lines(tmp_path / "run" / "rejected.jsonl")]
    assert [next(name for name in ROWS if name in preview) for preview in previews] == list(ROWS)


def test_the_command_runs_and_reports_errors(tmp_path):
    save_tiny_policy(tmp_path / "base")
    command: list[str | Path] = ["rlhf", "--model", tmp_path / "base"]
    for name, rows in ROWS.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        command += [f"--{name}", path]
    done = run_kedge(*command, "--out", tmp_path / "run", *SETTINGS, "ppo.num_updates=1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    wrong = forked_kedge(*command, "--out", tmp_path / "run", *SETTINGS)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert wrong.stderr.count("\n") == 1
