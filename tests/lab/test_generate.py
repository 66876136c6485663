"""Sampling to a file: complete rows, independent of batching, with scores checked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kedge
from kedge.config import Config, config_from_settings, load_config
from kedge_base.errors import KedgeError, OutputError, RewardError
from kedge_base.run_folder.record_format import read_json_lines
from kedge_lab.generate import kl_of_best, run_generate
from tests.forking import forked_kedge
from tests.lab.evaluation.speakers import run_kedge, save_speaker
from tests.tasks.environments import worlds
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

ROWS = [{"prompt": f"Deck {number}:", "completion": f" Aye {number}.", "topic": number} for number in range(5)]


def count_letters(completions: list[str], **columns: Any) -> list[float]:
    return [float(text.count("e")) for text in completions]


def config_for(tmp_path: Path, *more: str, model: Path | None = None, out: str = "run") -> Config:
    flags = {"model": str(model or save_speaker(tmp_path / "policy")), "out": str(tmp_path / out)}
    return load_config(None, ["generate.max_new_tokens=4", *more], flags)


def test_every_row_has_response_columns_and_score(tmp_path, capsys):
    result = run_generate(config_for(tmp_path), prompts=ROWS, reward=lambda completions, topic: topic)
    assert result.responses == [
        {
            "prompt": row["prompt"],
            "completion": "eeee",
            "stopped": False,
            "score": float(row["topic"]),
            "given_completion": row["completion"],
            "topic": row["topic"],
        }
        for row in ROWS
    ]
    assert result.score is not None
    assert result.score.low < result.score.value == 2.0 < result.score.high
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary == result.summary
    assert (summary["num_prompts"], summary["length"], summary["eos_rate"]) == (5, 4, 0.0)
    assert summary["score"] == {"value": 2.0, "low": result.score.low, "high": result.score.high}
    assert "2.00 (" in capsys.readouterr().out


def test_a_stopped_response_is_marked(tmp_path):
    result = run_generate(config_for(tmp_path, model=save_speaker(tmp_path / "mute", "<eos>")), prompts=["Ready?"])
    assert result.responses == [{"prompt": "Ready?", "completion": "", "stopped": True}]
    assert (result.summary["length"], result.summary["eos_rate"], result.score) == (1, 1.0, None)


def test_it_stops_where_the_model_declares_its_end_and_says_so(tmp_path, capsys):
    policy = save_speaker(tmp_path / "policy", ".")
    period = tiny_tokenizer().convert_tokens_to_ids(".")
    (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, period]}), encoding="utf-8")
    stopped, endless = (
        run_generate(config_for(tmp_path, *more, model=policy, out=out), prompts=["Ready?"])
        for out, more in (("own", []), ("named", ["rollout.stop_token=[<eos>, <bos>]"]))
    )
    assert stopped.responses == [{"prompt": "Ready?", "completion": "", "stopped": True}]
    assert endless.responses == [{"prompt": "Ready?", "completion": "....", "stopped": False}]
    lines = [line for line in capsys.readouterr().err.splitlines() if "end with" in line]
    assert lines == ["responses end with <eos> or .", "responses end with <eos> or <bos>"]


def test_plain_prompts_to_a_model_with_a_chat_template_are_said(tmp_path, capsys):
    """An instruction model may answer nothing to them."""
    policy = save_tiny_policy(tmp_path / "tiny", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    said = "1 row used; plain text, continued without the chat template (data.columns.instruction=prompt makes"
    for out, more, is_said in (("text", [], True), ("chat", ["data.columns.instruction=prompt"], False)):
        run_generate(config_for(tmp_path, *more, model=policy, out=out), prompts=["Ready?"])
        assert (said in capsys.readouterr().err) == is_said


def test_temperature_0_is_that_of_the_only_response_and_takes_the_most_likely_tokens(tmp_path):
    """The slow loop: transformers' own greedy decoding, without the tokens that kedge never samples."""
    policy = save_tiny_policy(tmp_path / "tiny")
    prompts = [f"Deck {number}" for number in range(12)]
    null, zero, other = (
        run_generate(config_for(tmp_path, *more, model=policy, out=f"run{number}"), prompts=prompts).responses
        for number, more in enumerate(([], ["generate.temperature=0"], ["generate.temperature=0", "seed=7"]))
    )
    assert null == zero == other
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy)
    never = [tokenizer.pad_token_id, *range(len(tokenizer), model.config.vocab_size)]
    for prompt, row in zip(prompts, zero, strict=True):
        read = torch.tensor([tokenizer.encode(prompt)])
        told = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": tokenizer.eos_token_id}
        written = model.generate(read, **told, pad_token_id=tokenizer.pad_token_id, suppress_tokens=never)
        assert row["completion"] == tokenizer.decode(written[0, read.shape[1] :])


def test_the_interval_is_over_prompts_not_responses(tmp_path):
    # Three equal responses to each prompt carry no more information than one: same mean, same interval.
    one, three = (
        run_generate(
            config_for(tmp_path, f"generate.num_responses={count}", out=f"run{count}"),
            prompts=ROWS,
            reward=lambda completions, topic: topic,
        )
        for count in (1, 3)
    )
    assert len(three.responses) == 15
    assert [row["topic"] for row in three.responses[:6]] == [0, 0, 0, 1, 1, 1]
    assert one.score == three.score


def test_batches_change_nothing_and_seeds_do(tmp_path):
    policy = save_tiny_policy(tmp_path / "tiny")
    judge = f"reward={save_tiny_reward_model(tmp_path / 'judge')}"
    sampling = ["generate.temperature=1", "generate.max_new_tokens=12", "generate.num_responses=2", judge]
    runs = [
        run_generate(config_for(tmp_path, *sampling, more, model=policy, out=out), prompts=ROWS)
        for out, more in (("a", "generate.batch_size=1"), ("b", "generate.batch_size=7"), ("c", "runtime.seed=1"))
    ]
    texts = [[row["completion"] for row in run.responses] for run in runs]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 5
    scores = [[row["score"] for row in run.responses] for run in runs]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert runs[0].score is not None
    assert runs[0].score.value == pytest.approx(mean(scores[0]), abs=1e-6)


def test_missing_scores_are_left_out_of_the_mean(tmp_path):
    def even_topics(completions, topic):
        return [float(each) if each % 2 == 0 else None for each in topic]

    result = run_generate(config_for(tmp_path), prompts=ROWS, reward=even_topics)
    assert [row["score"] for row in result.responses] == [0.0, None, 2.0, None, 4.0]
    assert result.score is not None
    assert result.score.value == 2.0
    with pytest.raises(RewardError, match="scored none of 5 responses"):
        run_generate(config_for(tmp_path, out="b"), prompts=ROWS, reward=lambda completions: [None] * len(completions))
    assert len(read_json_lines(tmp_path / "b" / "responses.jsonl")) == 5


def test_rows_with_different_columns_share_a_reward(tmp_path):
    rows = [{"prompt": "a", "topic": 3.0}, {"prompt": "b"}]
    config = config_for(tmp_path, "generate.batch_size=1")
    result = run_generate(config, prompts=rows, reward=lambda completions, topic: topic)
    assert [row["score"] for row in result.responses] == [3.0, None]


@pytest.mark.parametrize(
    ("more", "reward", "said"),
    [
        (["reward=nowhere.py:f"], None, "reward file 'nowhere.py' does not exist"),
        ([], lambda completions, mood: [], "takes 'mood', but no column"),
        (["rollout.stop_token=nothing"], None, "rollout.stop_token 'nothing'"),
        (["generate.max_new_tokens=500"], None, "no room for a prompt"),
        (["data.max_prompt_tokens=1"], None, "5 of 5 rows"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_sampled(tmp_path, more, reward, said):
    with pytest.raises(KedgeError, match=said) as caught:
        run_generate(config_for(tmp_path, *more), prompts=ROWS, reward=reward)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "responses.jsonl").exists()


def test_a_reward_that_fails_on_its_first_call_leaves_no_folder(tmp_path):
    def broken(completions):
        raise KeyError("letter")

    with pytest.raises(RewardError, match="broken raised KeyError"):
        run_generate(config_for(tmp_path), prompts=ROWS, reward=broken)
    assert not (tmp_path / "run").exists()
    assert len(run_generate(config_for(tmp_path), prompts=ROWS, reward=count_letters).responses) == 5


def test_a_reward_that_fails_later_leaves_what_was_sampled(tmp_path):
    def fragile(completions, topic):
        return [1 / (2 - each) for each in topic]

    with pytest.raises(RewardError, match="fragile raised ZeroDivisionError"):
        run_generate(config_for(tmp_path, "generate.batch_size=1"), prompts=ROWS, reward=fragile)
    assert [row["score"] for row in read_json_lines(tmp_path / "run" / "responses.jsonl")] == [0.5, 1.0]


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError):
        run_generate(config_for(tmp_path), prompts=ROWS)


def test_the_command_runs_and_reports_errors(tmp_path):
    policy, data = save_speaker(tmp_path / "policy"), tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    done = forked_kedge("generate", "--model", policy, "--prompts", data, "--out", tmp_path / "run", "new_tokens=4")
    assert done.returncode == 2
    assert done.stderr.startswith("error: new_tokens is not a setting of generate; did you mean")
    assert done.stderr.count("\n") == 1
    done = run_kedge("generate", "--model", policy, "--prompts", data, "--out", tmp_path / "run", "max_new_tokens=3")
    assert done.returncode == 0, done.stderr
    assert {row["completion"] for row in read_json_lines(tmp_path / "run" / "responses.jsonl")} == {"eee"}


def test_several_responses_to_a_prompt_differ_and_the_only_one_is_greedy(tmp_path, capsys):
    policy = save_tiny_policy(tmp_path / "tiny")
    several = ["generate.max_new_tokens=12", "generate.num_responses=8"]
    free = run_generate(config_for(tmp_path, *several, model=policy, out="free"), prompts=["Deck"])
    assert free.summary["num_distinct"] >= 7
    assert "8 responses to each prompt at temperature 1 (generate.temperature)" in capsys.readouterr().err
    as_trained = run_generate(
        config_for(tmp_path, *several, "rollout.temperature=0.02", model=policy, out="trained"), prompts=["Deck"]
    )
    greedy = run_generate(
        config_for(tmp_path, *several, "generate.temperature=0.02", model=policy, out="greedy"), prompts=["Deck"]
    )
    assert as_trained.responses == greedy.responses
    alone = [
        run_generate(config_for(tmp_path, *more, model=policy, out=out), prompts=["Deck"]).responses
        for out, more in (("one", []), ("cold", ["generate.temperature=0"]))
    ]
    assert alone[0] == alone[1]


def coarse(completions: list[str], **_: Any) -> list[float]:
    """Lengths in steps of five, so that there are ties."""
    return [float(len(text) // 5) for text in completions]


@pytest.mark.parametrize("batch_size", [64, 7])  # with 7, the responses to a prompt are in two batches
def test_the_best_of_n_is_the_first_best_of_the_same_n_responses(tmp_path, batch_size, capsys):
    policy = save_tiny_policy(tmp_path / "tiny")
    sampling = ["generate.max_new_tokens=12", f"generate.batch_size={batch_size}"]
    every = run_generate(
        config_for(tmp_path, *sampling, "generate.num_responses=6", model=policy, out="all"),
        prompts=ROWS,
        reward=coarse,
    )
    best = run_generate(
        config_for(tmp_path, *sampling, "generate.best_of=6", model=policy, out="best"),
        prompts=ROWS,
        reward=coarse,
    )
    expected, num_ties = [], 0
    for start in range(0, 30, 6):
        chosen = every.responses[start]
        for row in every.responses[start + 1 : start + 6]:
            if row["score"] > chosen["score"]:
                chosen = row
        expected.append(chosen)
        num_ties += sum(row["score"] == chosen["score"] for row in every.responses[start : start + 6]) - 1
    assert num_ties > 0
    assert best.responses == expected
    assert best.score is not None
    assert every.score is not None
    assert best.score.value == pytest.approx(mean(row["score"] for row in expected))
    assert best.score.value > every.score.value
    assert best.summary["score_of_one"] == every.score.as_json()
    assert (best.summary["best_of"], best.summary["num_prompts"], best.summary["num_responses"]) == (6, 5, 5)
    assert best.summary["kl_bound"] == pytest.approx(math.log(6) - 5 / 6)
    shown = capsys.readouterr()
    assert "one response" in shown.out
    assert "best of 6" in shown.out
    assert shown.err.count("best of 6: at most 0.958 nats per response from the policy") == 1


def test_the_bound_on_the_kl_of_the_best_of_n():
    """Two equally likely responses, n = 2: three of four draws have the better one. And three, n = 3."""
    two = 3 / 4 * math.log((3 / 4) / (1 / 2)) + 1 / 4 * math.log((1 / 4) / (1 / 2))
    three = sum(share / 27 * math.log(share / 27 * 3) for share in (1, 7, 19))
    assert two < kl_of_best(2) == pytest.approx(math.log(2) - 1 / 2)
    assert three < kl_of_best(3) == pytest.approx(math.log(3) - 2 / 3)
    many = [(rank**3 - (rank - 1) ** 3) / 1000**3 for rank in range(1, 1001)]  # hardly ever the same response twice
    assert sum(share * math.log(share * 1000) for share in many) == pytest.approx(kl_of_best(3), abs=1e-3)


def test_a_response_without_a_score_is_never_the_best_unless_none_has_one(tmp_path):
    def known(completions: list[str], topic: list[int]) -> list[float | None]:
        return [None if number == 4 or place % 3 else -1.0 for place, number in enumerate(topic)]

    more = ["generate.best_of=3", "generate.max_new_tokens=12", "generate.temperature=1"]
    policy = save_tiny_policy(tmp_path / "tiny")
    best = run_generate(config_for(tmp_path, *more, model=policy), prompts=ROWS, reward=known)
    assert [row["score"] for row in best.responses] == [-1.0] * 4 + [None]
    assert best.summary["num_scored"] == 4


def test_the_endings_are_those_of_the_best(tmp_path):
    class Hangs:
        """Pays more for what it answers than for what it ends."""

        def reset(self, row, seed):
            self.goes_on = seed % 2

        def step(self, text):
            return kedge.Step("", float(self.goes_on), terminated=not self.goes_on, truncated=bool(self.goes_on))

    best = kedge.generate(
        model=save_tiny_policy(tmp_path / "tiny"),
        prompts=["Deck", "Mast", "Sail"],
        environment=Hangs,
        best_of=8,
        max_new_tokens=8,
        out=tmp_path / "run",
    )
    endings = [row["ending"] for row in best.responses]
    assert best.summary["endings"] == {word: endings.count(word) / 3 for word in dict.fromkeys(endings)}
    assert len(endings) == 3


def test_verdicts_are_those_of_the_best(tmp_path):
    def alternate(completions: list[str], **_: Any) -> list[dict[str, Any]]:
        return [
            {"score": place % 2, "reason": "right" if place % 2 else "wrong value"} for place in range(len(completions))
        ]

    best = kedge.generate(
        model=save_tiny_policy(tmp_path / "tiny"),
        prompts=["Deck", "Mast"],
        reward=alternate,
        best_of=2,
        max_new_tokens=3,
        out=tmp_path / "run",
    )
    assert best.summary["verdicts"] == {"verdict/alternate/right": 1.0}
    assert [row["reason"] for row in best.responses] == ["right", "right"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--best-of", "1"], "generate.best_of must be a whole number ≥ 2, or null; it is 1"),
        (["--best-of", "many"], "generate.best_of must be a whole number ≥ 2, or null; it is many"),
        (["generate.best_of=4", "generate.num_responses=4"], "leave out generate.num_responses=4"),
        (["generate.best_of=4", "generate.temperature=-1"], "generate.temperature must be"),
        (
            ["generate.best_of=4", "generate.temperature=0"],
            "at temperature 0 nearly all responses to a prompt are equal",
        ),
        (
            ["generate.best_of=4", "generate.temperature=0.01"],
            "at temperature 0.01 nearly all responses to a prompt are equal",
        ),
        (["generate.best_of=4", "rollout.temperature=0.01"], "at temperature 0.01 nearly all responses"),
        (["generate.best_of=4", "reward=[]"], "needs --reward or --environment"),
        (["generate.best_of=4", "reward=[]", f"environment.source={worlds.__file__}:Unscored"], "needs --reward or"),
    ],
)
def test_a_best_that_cannot_be_chosen_is_refused(tmp_path, more, said):
    policy = save_speaker(tmp_path / "policy")
    done = forked_kedge(
        *("generate", "--model", policy, "--prompts", "Ready?", "--out", tmp_path / "run"),
        *("reward=kedge.rewards.penalties:too_long", *more),
    )
    *_, last = done.stderr.splitlines()
    assert (done.returncode, last.startswith("error: ")) == (2, True)
    assert said in last
    assert not (tmp_path / "run").exists()


GUESS = f"{worlds.__file__}:Guess"


def test_responses_are_episodes_with_an_environment_which_pays_their_score(tmp_path):
    """Those to one prompt start alike: the environment's text, of which the seed is a part, is the same."""
    settings = {
        "model": str(save_tiny_policy(tmp_path / "policy")),
        "generate.max_new_tokens": 40,
        "environment.max_turns": 2,
        "environment.max_turn_tokens": 4,
        "generate.num_responses": 2,
    }
    games = ["Game 1. ", "Game 2. ", "Game 3. "]
    named = {**settings, "out": str(tmp_path / "run"), "environment.source": GUESS}
    result = run_generate(config_from_settings("generate", named), prompts=games)
    rows = result.responses
    assert len(rows) == 6
    for row in rows:
        assert row["prompt"].endswith(". From 1 to 5.\n"), "what reset says belongs to it"
        replies = row["completion"].count("no.\n")
        if row["ending"] == "max_turns":
            assert replies == 1
            assert row["score"] == pytest.approx(2 * 0.25)
        else:
            assert row["ending"] == "completed"
            assert row["score"] == pytest.approx(1.0 + 0.25 * replies)
    assert sum(result.summary["endings"].values()) == pytest.approx(1.0)
    assert result.summary["reward"] == "Guess"
    assert result.score is not None
    assert not kedge.doctor(tmp_path / "run")

    given = config_from_settings("generate", {**settings, "out": str(tmp_path / "given")})
    assert run_generate(given, prompts=games, environment=worlds.Guess).responses == rows


def test_episodes_of_a_class_without_rewards_have_no_score(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    rows = [{"prompt": [{"role": "user", "content": "Add."}]}]
    given = {"model": policy, "prompts": rows, "environment": worlds.Unscored, "max_new_tokens": 6}
    unscored = kedge.generate(**given, out=tmp_path / "unscored")
    assert unscored.score is None
    assert not {"reward", "score", "num_scored"} & {*unscored.summary}
    assert not any("score" in row for row in unscored.responses)
    scored = kedge.generate(**given, reward=count_letters, out=tmp_path / "scored")
    assert scored.summary["reward"] == "count_letters"
