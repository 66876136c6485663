"""Win rates computed by hand, judges with known biases, and KL in closed form."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from kedge.config import Config, load_config
from kedge_base.errors import ConfigError, DataError, KedgeError, ModelError, RewardError
from kedge_base.run_folder.record_format import read_json_lines
from kedge_lab.evaluate import evaluate_or_check, run_evaluate
from tests.forking import forked_kedge
from tests.lab.evaluation.speakers import run_kedge, save_speaker
from tests.tiny import (
    CHAT_TEMPLATE,
    save_tiny_policy,
    save_tiny_reward_model,
    tiny_sentencepiece_tokenizer,
    tiny_tokenizer,
)

# The policy writes "eeee": against ten references it wins five, ties two and loses three.
REFERENCES = ["x", "e", "ee", "eee", "xe", "eeee", "xexexexe", "eeeee", "eeeeee", "eeeeeeee"]
ROWS = [{"prompt": f"Deck {number}:", "completion": text} for number, text in enumerate(REFERENCES)]


def count_letters(completions: list[str], **columns: Any) -> list[float]:
    return [float(text.count("e")) for text in completions]


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        (["generate.num_responses=1"], True),
        ([], False),
        (["generate.num_responses=1", "evaluate.against={tmp_path}/policy"], False),
        ([f"generate.{name}" for name in ("num_responses=1", "temperature=1", "best_of=null", "batch_size=8")], False),
    ],
    ids=["one", "default", "another policy", "the settings of a run"],
)
def test_a_single_sample_is_told_from_pass_at_1(tmp_path, capsys, settings, is_said):
    config = config_for(tmp_path, *(each.format(tmp_path=tmp_path) for each in settings))
    evaluate_or_check(config, prompts=ROWS, judge=count_letters)
    said = capsys.readouterr().err
    assert ("pass@1 is measured with several: kedge.pass_at_k" in said) == is_said


def prefer_letters(prompts: list[str], first: list[str], second: list[str], **columns: Any) -> list[float]:
    ours, theirs = count_letters(first), count_letters(second)
    return [0.5 if one == two else float(one > two) for one, two in zip(ours, theirs, strict=True)]


def config_for(tmp_path: Path, *more: str, model: Path | None = None, **flags: Any) -> Config:
    flags = {"model": str(model or save_speaker(tmp_path / "policy")), "out": str(tmp_path / "run"), **flags}
    settings = [
        "generate.max_new_tokens=4",
        "runtime.report=false",
        *more,
    ]
    return load_config(None, settings, flags)


def test_the_win_rate_against_references_computed_by_hand(tmp_path, capsys):
    result = run_evaluate(config_for(tmp_path), prompts=ROWS, judge=count_letters)
    assert result.win_rate.value == pytest.approx((5 + 2 / 2) / 10)
    assert result.win_rate.low <= 0.6 <= result.win_rate.high
    assert 0.25 < result.win_rate.low < 0.5 < result.win_rate.high < 0.95
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary == result.summary
    assert [summary[name] for name in ("won", "tied", "lost", "num_judged")] == [5, 2, 3, 10]
    assert summary["score"]["value"] == 4.0
    assert summary["score_against"]["value"] == pytest.approx(sum(text.count("e") for text in REFERENCES) / 10)
    assert (summary["eos_rate"], summary["eos_rate_against"]) == (0.0, 1.0)
    assert summary["kl"] is None
    assert summary["position_bias"] is None
    printed = capsys.readouterr()
    assert "0.60" in printed.out
    assert f"{tmp_path / 'policy'}: responses end with <eos>" in printed.err.splitlines()

    rows = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    assert [row["completion"] for row in rows] == ["eeee"] * 10
    assert [row["completion_against"] for row in rows] == REFERENCES
    assert [row["winner"] for row in rows] == ["model"] * 5 + ["tie"] * 2 + ["against"] * 3
    assert [row["score"] - row["score_against"] for row in rows] == [4 - text.count("e") for text in REFERENCES]


def test_a_pairwise_judge_finds_the_same(tmp_path):
    config = config_for(tmp_path, "evaluate.judge_mode=pairwise")
    result = run_evaluate(config, prompts=ROWS, judge=prefer_letters)
    assert result.win_rate.value == pytest.approx(0.6)
    assert result.summary["position_bias"] == {"first_rate": 0.5, "contradicted": 0.0}
    assert result.summary["score"] is None


@pytest.mark.parametrize(("verdict", "first_rate"), [(1.0, 1.0), (0.0, 0.0)])
def test_a_judge_that_only_looks_at_the_position_decides_nothing(tmp_path, verdict, first_rate):
    def biased(first, second, **columns):
        return [verdict] * len(first)

    result = run_evaluate(config_for(tmp_path, "evaluate.judge_mode=pairwise"), prompts=ROWS, judge=biased)
    assert result.win_rate.low < result.win_rate.value == 0.5 < result.win_rate.high
    assert result.summary["position_bias"] == {"first_rate": first_rate, "contradicted": 1.0}
    row = read_json_lines(tmp_path / "run" / "judgments.jsonl")[0]
    assert {row["winner_shown_first"], row["winner_shown_second"]} == {"model", "against"}
    assert row["winner"] == "tie"


def test_a_judge_of_pairs_may_be_async_and_see_columns(tmp_path):
    seen = []

    async def judge(first, second, topic, **columns):
        seen.append(topic)
        return prefer_letters([], first, second)

    rows = [{**row, "topic": number} for number, row in enumerate(ROWS)]
    result = run_evaluate(config_for(tmp_path, "evaluate.judge_mode=pairwise"), prompts=rows, judge=judge)
    assert result.win_rate.value == pytest.approx(0.6)
    assert seen == [list(range(10))] * 2


def test_undecided_pairs_do_not_count(tmp_path):
    def silent_about_ties(completions, **columns):
        return [None if text.count("e") == 4 and text != "eeee" else float(text.count("e")) for text in completions]

    result = run_evaluate(config_for(tmp_path), prompts=ROWS, judge=silent_about_ties)
    assert result.summary["num_judged"] == 9
    assert result.win_rate.value == pytest.approx((5 + 1 / 2) / 9)
    assert [row["winner"] for row in read_json_lines(tmp_path / "run" / "judgments.jsonl")].count(None) == 1
    with pytest.raises(RewardError, match="decided none of 10 pairs"):
        run_evaluate(config_for(tmp_path, out=str(tmp_path / "b")), prompts=ROWS, judge=lambda completions: [None] * 10)
    assert not (tmp_path / "b").exists()  # the corrected command may use the same folder


def test_length_bias_shows(tmp_path):
    def longest(completions, **columns):
        return [len(text) for text in completions]

    rows = [{"prompt": "Deck:", "completion": "x" * count} for count in (1, 2, 9)]
    result = run_evaluate(config_for(tmp_path), prompts=rows, judge=longest)
    assert result.summary["longer_wins"]["value"] == 1.0
    assert result.summary["length"] == 4.0
    assert result.summary["length_against"] == pytest.approx(4.0 + 1)  # the stop token counts


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
def test_a_policy_against_itself_is_even(tmp_path, template):
    """Plain prompts are read alike whatever the chat template."""
    policy = save_tiny_policy(tmp_path / "a")
    against = Path(shutil.copytree(policy, tmp_path / "b"))
    if template is not None:
        tiny_tokenizer(chat_template=template).save_pretrained(against)
    flags = {"evaluate.against": str(against), "evaluate.judge": str(save_tiny_reward_model(tmp_path / "judge"))}
    config = config_for(tmp_path, "generate.temperature=1", "generate.batch_size=3", model=policy, **flags)
    result = run_evaluate(config, prompts=ROWS)
    assert result.summary["tied"] == 10
    assert result.win_rate.value == 0.5
    assert result.summary["length"] == result.summary["length_against"]
    assert result.summary["kl"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert len({row["completion"] for row in read_json_lines(tmp_path / "run" / "judgments.jsonl")}) > 1


def test_kl_matches_the_closed_form(tmp_path):
    # One certain token against a uniform choice among all but the pad token: log(vocabulary − 1) nats per token.
    uniform = save_speaker(tmp_path / "uniform", lead=0.0)
    config = config_for(tmp_path, **{"evaluate.against": str(uniform)})
    result = run_evaluate(config, prompts=ROWS, judge=count_letters)
    assert result.summary["kl"]["value"] == pytest.approx(4 * math.log(len(tiny_tokenizer()) - 1), rel=1e-5)


def test_kl_is_measured_at_the_temperature_of_training(tmp_path):
    temperature, length = 0.8, 30
    policy, uniform = save_speaker(tmp_path / "mild", lead=4.0), save_speaker(tmp_path / "uniform", lead=0.0)
    more = [f"rollout.temperature={temperature}", f"generate.max_new_tokens={length}"]
    config = config_for(tmp_path, *more, model=policy, **{"evaluate.against": str(uniform)})
    kl = run_evaluate(config, prompts=ROWS * 20, judge=count_letters).summary["kl"]
    # Per token Σ p log(p·n) over the n possible tokens; a position is reached if no earlier token was the stop token.
    count, odds = len(tiny_tokenizer()) - 1, math.exp(4.0 / temperature)
    letter, other = odds / (odds + count - 1), 1 / (odds + count - 1)
    per_token = letter * math.log(letter * count) + (count - 1) * other * math.log(other * count)
    expected = per_token * sum((1 - other) ** reached for reached in range(length))
    assert kl["value"] == pytest.approx(expected, abs=kl["high"] - kl["low"])  # four standard errors
    assert kl["high"] - kl["low"] < 0.1 * expected


def test_the_frontier_places_further_policies(tmp_path):
    start = save_speaker(tmp_path / "start", lead=0.0)
    between = save_speaker(tmp_path / "between", lead=6.0)
    config = config_for(
        tmp_path,
        "generate.temperature=1",
        **{"evaluate.against": str(start), "evaluate.frontier": [str(between)]},
    )
    result = run_evaluate(config, prompts=ROWS * 4, judge=count_letters)
    [point] = result.summary["frontier"]
    assert point["model"] == str(between)
    assert 0 < point["kl"]["value"] < result.summary["kl"]["value"]
    assert result.summary["score_against"]["value"] < point["score"]["value"] < result.summary["score"]["value"]


def test_a_policy_of_the_frontier_without_a_decided_pair_leaves_the_rest(tmp_path, capsys):
    start, blank = save_speaker(tmp_path / "start", lead=0.0), save_speaker(tmp_path / "blank", lead=6.0)
    given = {"evaluate.against": str(start), "evaluate.frontier": [str(blank), str(start)]}
    calls = []

    def silent_once(completions, **columns):
        calls.append(completions)
        return [None if len(calls) == 3 else float(text.count("e")) for text in completions]

    result = run_evaluate(config_for(tmp_path, "generate.temperature=1", **given), prompts=ROWS, judge=silent_once)
    undecided, even = result.summary["frontier"]
    assert (undecided["win_rate"], undecided["won"], undecided["score"]) == (None, 0, None)
    assert undecided["kl"]["value"] > 0
    assert even["win_rate"]["value"] == 0.5
    assert "0 / 0 / 0" in capsys.readouterr().out


def test_a_frontier_that_cannot_be_sampled_is_refused_before_anything_is(tmp_path, capsys):
    start = save_tiny_policy(tmp_path / "start")
    reward = save_tiny_reward_model(tmp_path / "reward")
    short = save_tiny_policy(tmp_path / "short")
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 8}))
    for other, error in ((reward, ModelError), (short, DataError)):
        given = {"evaluate.against": str(start), "evaluate.frontier": [str(start), str(other)]}
        with pytest.raises(error, match=other.name):
            run_evaluate(config_for(tmp_path, **given), prompts=ROWS, judge=count_letters)
    assert "sample" not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_frontier_needs_a_reference_policy(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluate\.frontier needs evaluate\.against"):
        run_evaluate(config_for(tmp_path, "evaluate.frontier=[x]"), prompts=ROWS, judge=count_letters)
    assert not (tmp_path / "run").exists()


def test_a_policy_of_another_family_is_compared_by_its_texts(tmp_path):
    other = save_speaker(tmp_path / "other", "o", tokenizer=tiny_sentencepiece_tokenizer())
    judge = save_tiny_reward_model(tmp_path / "judge")
    config = config_for(tmp_path, **{"evaluate.against": str(other), "evaluate.judge": str(judge)})
    summary = run_evaluate(config, prompts=ROWS).summary
    assert summary["kl"] is None
    rows = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    assert {row["completion_against"] for row in rows} == {"oooo"}
    # Given the same texts as references, the judge gives the same scores.
    references = [{"prompt": row["prompt"], "completion": "oooo"} for row in ROWS]
    config = config_for(tmp_path, out=str(tmp_path / "b"), **{"evaluate.judge": str(judge)})
    assert run_evaluate(config, prompts=references).summary["score"] == summary["score"]


def test_a_judge_may_read_the_length_limit_of_responses_that_were_not_sampled_in_its_tokens(tmp_path):
    def share(completions: list[str], max_new_tokens: int) -> list[float]:
        return [text.count("e") / max_new_tokens for text in completions]

    result = run_evaluate(config_for(tmp_path), prompts=ROWS, judge=share)
    assert result.summary["score_against"]["value"] == pytest.approx(sum(text.count("e") for text in REFERENCES) / 40)
    other = save_speaker(tmp_path / "other", "e", tokenizer=tiny_sentencepiece_tokenizer())
    config = config_for(tmp_path, out=str(tmp_path / "b"), **{"evaluate.against": str(other)})
    assert run_evaluate(config, prompts=ROWS, judge=share).summary["score_against"]["value"] == 1.0


def test_conversations_are_rendered_in_each_policys_own_template(tmp_path):
    templates = [CHAT_TEMPLATE, CHAT_TEMPLATE.replace("assistant|>", "bot|>")]
    ours, theirs = (
        save_speaker(tmp_path / name, tokenizer=tiny_tokenizer(chat_template=template))
        for name, template in zip(("ours", "theirs"), templates, strict=True)
    )
    rows = [
        {"prompt": [{"role": "user", "content": "Ready?"}], "completion": [{"role": "assistant", "content": text}]}
        for text in REFERENCES
    ]
    result = run_evaluate(config_for(tmp_path, model=ours), prompts=rows, judge=count_letters)
    assert result.win_rate.value == pytest.approx(0.6)
    config = config_for(tmp_path, out=str(tmp_path / "b"), model=ours, **{"evaluate.against": str(theirs)})
    assert run_evaluate(config, prompts=rows, judge=count_letters).win_rate.value == 0.5


def test_tldr_summaries_are_references(tmp_path):
    rows = [{"subreddit": "sailing", "title": "Rope", "post": "It broke.", "summary": text} for text in REFERENCES]
    result = run_evaluate(config_for(tmp_path, "data.template=tldr"), prompts=rows, judge=count_letters)
    assert result.win_rate.value == pytest.approx(0.6)
    row = read_json_lines(tmp_path / "run" / "judgments.jsonl")[0]
    assert row["completion_against"] == " x"
    assert row["prompt"].endswith("TL;DR:")


def test_the_first_prompts_are_enough(tmp_path):
    result = run_evaluate(config_for(tmp_path, "evaluate.num_prompts=5"), prompts=ROWS, judge=count_letters)
    assert (result.win_rate.value, result.summary["num_prompts"]) == (1.0, 5)


@pytest.mark.parametrize(
    ("rows", "judge", "more", "kind", "said"),
    [
        ([{"prompt": "a", "completion": "b"}, {"prompt": "c"}], count_letters, [], DataError, "1 of 2 prompts have no"),
        (
            ROWS,
            "judge",
            ["evaluate.judge_mode=pairwise"],
            ConfigError,
            "needs a function as judge; 'judge' is",
        ),
        (ROWS, lambda first, second: [], ["evaluate.judge_mode=pairwise"], RewardError, "cannot judge pairs; expected"),
        (
            ROWS,
            lambda **pairs: [2] * 10,
            ["evaluate.judge_mode=pairwise"],
            RewardError,
            r"returned 2\.0 for pair 0; exp",
        ),
        (ROWS, lambda topic, **pairs: [], ["evaluate.judge_mode=pairwise"], RewardError, "takes 'topic', but no"),
        (ROWS, count_letters, ["evaluate.against=no/such/folder"], ModelError, "no/such/folder"),
        (ROWS, count_letters, ["generate.max_new_tokens=256"], ConfigError, "no room for a prompt"),
    ],
)
def test_mistakes_are_one_line(tmp_path, rows, judge, more, kind, said):
    with pytest.raises(kind, match=said) as caught:
        run_evaluate(config_for(tmp_path, *more), prompts=rows, judge=judge)
    assert isinstance(caught.value, KedgeError)
    assert "\n" not in str(caught.value)


def test_the_command_runs_and_reports_errors(tmp_path):
    policy, data = save_speaker(tmp_path / "policy"), tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (tmp_path / "judges.py").write_text("def letters(completions):\n    return [t.count('e') for t in completions]\n")
    command = ["evaluate", "--model", policy, "--prompts", data, "--judge", f"{tmp_path}/judges.py:letters"]
    done = run_kedge(*command, "--out", tmp_path / "run", "generate.max_new_tokens=4")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["win_rate"]["value"] == pytest.approx(0.6)
    wrong = forked_kedge(*command[:-1], f"{tmp_path}/judges.py:words", "--out", tmp_path / "b")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert wrong.stderr.count("\n") == 1


def save_repeater(folder: Path) -> Path:
    """A policy that writes an "x" and then a line break: after "x" the next token is "\\n", after all others "x"."""
    tokenizer, model = tiny_tokenizer(), AutoModelForCausalLM.from_pretrained(save_speaker(folder))
    [letter], [newline] = tokenizer.encode("x"), tokenizer.encode("\n")
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(16)[torch.zeros(len(tokenizer), dtype=torch.long)])
        model.get_input_embeddings().weight[letter] = torch.eye(16)[1]
        model.get_output_embeddings().weight.zero_()
        model.get_output_embeddings().weight[letter, 0] = model.get_output_embeddings().weight[newline, 1] = 60.0
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shift", [None, 0.0])
def test_a_policy_that_writes_the_reference_scores_like_it_whatever_its_stop_token(tmp_path, shift):
    judge = save_tiny_reward_model(tmp_path / "judge")
    if shift is not None:  # as kedge saves it
        description = json.loads((judge / "config.json").read_text())
        (judge / "config.json").write_text(json.dumps({**description, "kedge_score_shift": shift}))
    policy = save_repeater(tmp_path / "policy")
    rows = [{"prompt": row["prompt"], "completion": "x"} for row in ROWS]
    flags = {"evaluate.judge": str(judge)}
    result = run_evaluate(config_for(tmp_path, 'rollout.stop_token="\\n"', model=policy, **flags), prompts=rows)
    judgments = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    assert {row["completion"] for row in judgments} == {"x"}
    assert result.summary["eos_rate"] == 1.0
    assert [row["score"] for row in judgments] == [row["score_against"] for row in judgments]
    assert result.win_rate.value == 0.5
    plain = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    for row in judgments:
        ids = tiny_tokenizer().encode(row["prompt"] + "x<eos>")
        with torch.no_grad():
            assert row["score"] == pytest.approx(plain(torch.tensor([ids])).logits.item(), abs=1e-5)
