"""Policies are compared by the episodes that they play."""

from __future__ import annotations

from math import comb

import pytest

import kedge
from kedge_base.errors import ConfigError, EnvError
from kedge_base.run_folder.record_format import read_json_lines
from kedge_tasks import verify
from kedge_tasks.environments import Step
from tests.lab.evaluation.speakers import save_speaker
from tests.tasks.environments.worlds import Guess, Unscored
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

PROMPTS = [{"prompt": "Guess: "}, {"prompt": "Number: "}, {"prompt": "Again: "}, {"prompt": "Once more: "}]
GAME = {
    "rollout.max_new_tokens": 40,
    "environment.max_turns": 3,
    "environment.max_turn_tokens": 6,
    "runtime.report": False,
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    return [str(save_tiny_policy(folder / f"{seed}", seed=seed)) for seed in (0, 3)]


def test_the_win_rate_is_of_what_both_are_paid_in_the_same_games(tmp_path, policies):
    ours, theirs = policies
    settings = {"prompts": PROMPTS, "environment": Guess, "generate.temperature": 1.0, **GAME}
    result = kedge.evaluate(model=ours, against=theirs, out=tmp_path / "run", **settings)
    rows = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    # A turn that is not the last pays 0.25, the right guess 1.
    assert {row["score"] for row in rows} <= {0.75, 1.0, 1.25, 1.5}
    outcomes = [(row["score"] > row["score_against"]) + (row["score"] == row["score_against"]) / 2 for row in rows]
    assert result.win_rate.value == sum(outcomes) / 4
    assert {row["ending"] for row in rows} <= {"completed", "max_turns"}
    for name, key in (("endings", "ending"), ("endings_against", "ending_against")):
        words = [row[key] for row in rows]
        assert result.summary[name] == {word: words.count(word) / 4 for word in dict.fromkeys(sorted(words))}
    for row in rows:
        assert (row["ending"] == "completed") == (row["score"] >= 1)
    assert result.summary["kl"] is None
    same = kedge.evaluate(model=ours, against=ours, out=tmp_path / "same", **settings)
    assert [same.summary[name] for name in ("won", "tied", "lost")] == [0, 4, 0], "the games start alike"


def test_an_episode_that_is_paid_1_or_more_is_solved(tmp_path, policies):
    result = kedge.pass_at_k(
        model=policies[0], prompts=PROMPTS, environment=Guess, num_responses=6, out=tmp_path / "run", **GAME
    )
    rows = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    right = [sum(row["ending"] == "completed" for row in rows[start : start + 6]) for start in range(0, 24, 6)]
    assert 0 < sum(right) < 24
    for k, interval in result.pass_at.items():
        assert interval.value == pytest.approx(sum(1 - comb(6 - count, k) / comb(6, k) for count in right) / 4)
    assert result.summary["endings"]["completed"] == sum(right) / 24


def test_a_judge_decides_where_one_is_given(tmp_path, policies):
    def longest(prompts, completions):
        return [float(len(text)) for text in completions]

    ours, theirs = policies
    result = kedge.evaluate(
        model=ours, against=theirs, prompts=PROMPTS, environment=Guess, judge=longest, out=tmp_path / "run", **GAME
    )
    rows = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    assert [row["score"] for row in rows] == [len(row["completion"]) for row in rows]
    assert result.summary["judge"] == "longest"


def test_what_cannot_be_compared_is_refused_before_sampling(tmp_path, policies):
    with pytest.raises(ConfigError, match=r"episodes have no references .* pass against=, or call kedge.pass_at_k"):
        kedge.evaluate(model=policies[0], prompts=PROMPTS, environment=Guess, out=tmp_path / "run", **GAME)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="judge="):
        kedge.evaluate(model=policies[0], against=policies[1], prompts=PROMPTS, out=tmp_path / "run", **GAME)


def test_episodes_that_nothing_scores_have_no_result(tmp_path):
    policy = str(save_tiny_policy(tmp_path / "chat", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE)))
    given = {"prompts": [{"prompt": [{"role": "user", "content": "Go"}]}], "environment": Unscored, **GAME}
    for name, evaluate in (("win", kedge.evaluate), ("pass", kedge.pass_at_k)):
        more = {"against": policy} if name == "win" else {"num_responses": 2}
        with pytest.raises(EnvError, match="nothing scores the episodes of Unscored: add get_reward, or judge="):
            evaluate(model=policy, out=tmp_path / name, **more, **given)
        assert not (tmp_path / name).exists()


def test_policies_that_write_conversations_differently_are_not_compared(tmp_path, policies, capsys):
    other = save_tiny_policy(tmp_path / "chat", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    with pytest.raises(ConfigError, match=r"another tokenizer or chat template .* episodes cannot be compared"):
        kedge.evaluate(
            model=policies[0], against=str(other), prompts=PROMPTS, environment=Guess, out=tmp_path / "run", **GAME
        )
    assert "sample" not in capsys.readouterr().err


class Oracle:
    """Says the right answer after the first turn; and asks again, or fails in the games that are to fail."""

    def reset(self, row, seed):
        self.fails = row["prompt"] == "Again: "
        self.turns = 0
        return ""

    def step(self, text):
        if self.fails:
            raise ConnectionResetError("the connection was reset")
        self.turns += 1
        return Step(" It is 42. ", terminated=self.turns == 2)


@pytest.mark.parametrize(("said", "share"), [("\\boxed{7} ", 0.0), ("\\boxed{42} ", 1.0)])
def test_a_verifier_reads_what_the_policy_said_last(tmp_path, said, share):
    """Its only token is its answer, in two turns; what is said between them is 42. One game of four has no score."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([said])
    policy = str(save_speaker(tmp_path / "policy", said, tokenizer=tokenizer))
    rows = [{**row, "answer": 42} for row in PROMPTS]
    settings = {**GAME, "environment.max_turn_tokens": 1}
    result = kedge.pass_at_k(
        model=policy, prompts=rows, environment=Oracle, judge=verify.number, num_responses=2, out=tmp_path / "run",
        **settings,
    )  # fmt: skip
    assert result.pass_at[1].value == share
    assert result.summary["num_scored"] == 6
    assert result.summary["endings"] == {"completed": 0.75, "failed": 0.25}
    found = read_json_lines(tmp_path / "run" / "judgments.jsonl")
    assert {row["score"] for row in found if row["ending"] == "failed"} == {None}
    assert all("It is 42." in row["completion"] for row in found if row["ending"] == "completed")
