"""Reasons for scores: from a function through checks, processes, ranks and checkpoints into metrics and samples."""

from __future__ import annotations

import json
import math
import os
import pickle
from dataclasses import replace

import pytest
import torch

from kedge.algorithm.experience import Rollout
from kedge.rewards import (
    CallLimits,
    FunctionReward,
    Responses,
    RewardTerm,
    ScoredTerms,
    Verdict,
    WeightedReward,
    load_reward,
)
from kedge.rewards.score import ScoredRollout, join_scored
from kedge.rewards.source import checked_scores, plain_scores
from kedge_base.errors import NonfiniteScoreError, RewardError
from kedge_tasks.verify import number, pattern

BATCH = Responses(["p"] * 4, ["a", "bb", "ccc", "d"], [[1]] * 4, [[1]] * 4, [True] * 4)
GSM8K = replace(BATCH, completions=["#### 1", "#### 2", "no", "#### 4"], columns={"answer": ["#### 1"] * 4})


def judged(name, *entries):
    return FunctionReward(lambda completions: list(entries), name=name)


def checked(*entries):
    return checked_scores(list(entries), name="f", lengths=[1] * len(entries))


def test_a_verdict_is_a_number_with_a_reason():
    verdict = Verdict(0.5, "partly right")
    assert verdict + 1 == 1.5
    assert isinstance(verdict, float)
    assert pickle.loads(pickle.dumps(verdict)).reason == "partly right"
    for entry in (
        verdict,
        {"score": 0.5, "reason": " partly  right "},
        {"score": torch.tensor(0.5), "reason": "partly right"},
    ):
        [score] = checked(entry)
        assert (score, score.reason) == (0.5, "partly right")


def test_verdicts_survive_json():
    scores = checked(Verdict(1, "right"), 0.25, None, [2.0], Verdict(0, "wrong value", "42"))
    back = checked_scores(json.loads(json.dumps(plain_scores(scores))), name="f", lengths=[1] * 5)
    assert back == scores
    assert isinstance(back[0], Verdict)
    assert (back[0].reason, back[0].answer) == ("right", None)
    assert (back[4].reason, back[4].answer) == ("wrong value", "42")
    assert pickle.loads(pickle.dumps(back[4])).answer == "42"


def test_answers_stay_with_their_responses():
    found = judged("found", Verdict(1, "right", "42"), {"score": 0, "reason": "wrong", "answer": "7"}, 0.5, None)
    scored = WeightedReward([(found, 1.0), (judged("plain", 1, 1, 1, 1), 1.0)]).score_terms(BATCH)
    assert scored.answers == {"found": ["42", "7", None, None]}
    plain = WeightedReward([(judged("found", 1, 1, 1, 1), 1.0), (judged("plain", 1, 1, 1, 1), 1.0)]).score_terms(BATCH)
    assert plain.answers == {}
    assert ScoredTerms.joined([scored, plain]).answers == {"found": ["42", "7"] + [None] * 6}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"score": 1.0}, "expected a number, or a score with its reason: {'score': 0.0, 'reason': 'wrong value'}"),
        ({"score": 1.0, "reason": "a", "more": 1}, "or a score with its reason"),
        ({"score": None, "reason": "a"}, "gave response 0 None .* expected a number, also with a reason"),
        ({"score": [1.0], "reason": "a"}, "expected a number, also with a reason"),
        ({"score": 1.0, "reason": ""}, "expected a phrase of at most 60 characters"),
        ({"score": 1.0, "reason": 3}, r"the reason 3 \(of type int\)"),
        ({"score": 1.0, "reason": "a", "answer": 3}, r"the answer 3 \(of type int\); expected a text, or None"),
        (Verdict(1.0, "x" * 61), "expected a phrase"),
        (Verdict(float("nan"), "right"), "expected a finite number"),
    ],
)
def test_what_is_no_verdict_is_named(entry, message):
    with pytest.raises(RewardError, match=message):
        checked(entry)


def test_shares_of_the_reasons_are_metrics():
    good = judged("good", Verdict(1, "right"), Verdict(0, "wrong value"), Verdict(0, "Wrong value!"), None)
    scored = WeightedReward([(good, 1.0), (judged("plain", 1, 1, 1, 1), 1.0)]).score_terms(BATCH)
    assert scored.metrics() == {
        "score/good": 1 / 3,
        "score/plain": 1.0,
        "verdict/good/right": 1 / 3,
        "verdict/good/wrong_value": 2 / 3,
    }
    assert scored.row_reasons() == ["right", "wrong value", "Wrong value!", None]
    assert scored.totals() == [2.0, 1.0, 1.0, 1.0]


def test_without_reasons_nothing_is_added():
    scored = WeightedReward([(judged("plain", 1, 0, 1, 1), 1.0)]).score_terms(BATCH)
    assert scored.metrics() == {"score/plain": 0.75}
    assert scored.row_reasons() is None


def test_reasons_of_several_sources_have_their_names():
    right = judged("one", *[Verdict(1, "right")] * 4)
    other = judged("two", Verdict(0, "cut off"), 1, None, Verdict(1, "right"))
    scored = WeightedReward([(right, 1.0), (other, 0.0)]).score_terms(BATCH)
    assert scored.row_reasons() == ["one: right; two: cut off", "one: right", "one: right", "one: right; two: right"]
    joined = ScoredTerms.joined(
        [scored, WeightedReward([(judged("one", 1, 1, 1, 1), 1.0), (other, 0.0)]).score_terms(BATCH)]
    )
    assert joined.reasons["one"] == ["right"] * 4 + [None] * 4
    assert joined.metrics()["verdict/two/cut_off"] == 0.5


def test_many_reasons_share_a_metric():
    texts = [f"reason {number}" for number in range(100)]
    batch = Responses(["p"] * 100, texts, [[1]] * 100, [[1]] * 100, [True] * 100)
    found = WeightedReward([(judged("f", *(Verdict(0, text) for text in texts)), 1.0)]).score_terms(batch).verdicts()
    assert len(found) == 33
    assert found["verdict/f/other"] == pytest.approx(0.68)
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no process groups")
def test_a_verifier_runs_by_name_in_a_process_of_its_own():
    reward = load_reward("kedge_tasks.verify:gsm8k", limits=CallLimits(timeout=60.0))
    try:
        reward.check({"answer": ["#### 1"], "other": [object()]})
        scored = reward.score_terms(GSM8K)
        assert scored.scores == [1, 0, 0, 0]
        assert scored.row_reasons() == ["right", "wrong value", "no answer found", "wrong value"]
        assert scored.answers == {"gsm8k": ["1", "2", None, "4"]}
        with pytest.raises(
            RewardError, match=r"^gsm8k: column 'answer', prompt 2: '42' is not usable; expected a solution"
        ):
            reward.check({"answer": ["#### 1", "42"]})
        with pytest.raises(RewardError, match="gsm8k takes 'answer', but no column of the prompts has that name"):
            reward.check({"question": ["x"]})
    finally:
        reward.sources[0]._function.close()


def test_a_function_with_check_rows_reads_the_prompts_before_a_run():
    def mine(completions, level):
        return [1.0] * len(completions)

    def check_rows(level):
        raise RewardError(f"level {level[0]} is unknown")

    mine.check_rows = check_rows
    reward = FunctionReward(mine)
    reward.check(["level"])  # names alone have nothing to check
    with pytest.raises(RewardError, match=r"^mine: level 7 is unknown$"):
        reward.check({"level": [7], "other": [1]})


def test_check_rows_gets_the_columns_and_settings_that_it_names():
    def mine(completions, level, hint=None, *, strict=False):
        return [1.0] * len(completions)

    read = []
    mine.check_rows = lambda level: read.append(level)
    reward = FunctionReward(mine, settings={"strict": True})
    reward.check({"level": [7], "hint": ["x"]})
    mine.check_rows = lambda **columns: read.append(columns)
    reward.check({"level": [7], "hint": ["x"], "other": [1]})
    assert read == [[7], {"level": [7], "hint": ["x"]}]


def test_a_judge_over_an_api_scores_prompts_that_are_conversations():
    """Their column `messages` is an argument of the judge, and nothing that it checks."""
    reward = load_reward("openai:m@http://127.0.0.1:9/v1")
    try:
        reward.check({"messages": [[{"role": "user", "content": "Ahoy?"}]]})
    finally:
        reward.sources[0]._function.close()


def test_a_verifier_checks_a_column_that_a_setting_gives():
    with pytest.raises(RewardError, match=r"column 'pattern', prompt 2: '\(' is not usable; expected a regular"):
        FunctionReward(pattern, settings={"pattern": ["a", "("]}).check({})


def test_selected_rows_keep_their_reasons():
    ids = torch.arange(12).reshape(4, 3)
    mask = torch.ones(4, 3, dtype=torch.bool)
    rollout = Rollout(
        prompt_ids=ids,
        prompt_mask=mask,
        response_ids=ids,
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(4, 3),
        stopped=mask[:, 0],
        group=torch.arange(4),
        policy_version=torch.zeros(4, dtype=torch.long),
    )
    terms = ScoredTerms(scores=[0.0] * 4, terms={})
    scored = ScoredRollout(rollout, torch.zeros(4), None, ["p"] * 4, terms, reasons=["a", None, "c", "d"])
    assert scored.select([3, 0]).reasons == ["d", "a"]
    without = ScoredRollout(rollout, torch.zeros(4), None, ["p"] * 4, terms)
    assert join_scored([scored, without], pad_id=0).reasons == ["a", None, "c", "d"] + [None] * 4


@pytest.mark.parametrize("local", [False, True], ids=["worker", "local"])
def test_verifiers_of_several_tasks_score_the_rows_that_have_their_columns(local):
    sources = [number, pattern] if local else [f"kedge_tasks.verify:{name}" for name in ("number", "pattern")]
    reward = load_reward(sources)
    columns = {"answer": ["1", None, None, "3"], "pattern": [None, "b+", None, None]}
    reward.check(columns)
    batch = replace(BATCH, completions=["1", "bb", "x", "4"], columns=columns)
    scored = reward.score_terms(batch)
    assert scored.terms == {"number": [1.0, None, None, 0.0], "pattern": [None, 1.0, None, None]}
    assert scored.scores == [1.0, 1.0, None, 0.0]
    assert scored.row_reasons() == ["number: right", "pattern: right", None, "number: wrong value"]
    some = batch.select([1, 2])
    assert reward.score_terms(some).terms["number"] == [None, None]
    with pytest.raises(RewardError, match=r"number: column 'answer', prompt 2: 'x' is not usable"):
        reward.check({**columns, "answer": [None, "x", None, None]})
    with pytest.raises(RewardError, match=r"number: no prompt has an entry in all of its columns \(answer\)"):
        reward.check({**columns, "answer": [None] * 4})
    alone = load_reward(sources[0])
    with pytest.raises(RewardError, match=r"prompt 2: None is not usable; expected a number"):
        alone.check(columns)


def test_a_score_that_is_not_finite_is_of_a_response_of_the_batch():
    """Its number leads to the response; one among those that the function scores would lead to another."""

    def judged(completions, answer):
        return [math.nan] * len(completions)

    judged.check_rows = lambda answer: None
    reward = load_reward([judged, lambda completions: [0.0] * len(completions)], limits=CallLimits(retries=0))
    with pytest.raises(NonfiniteScoreError, match="judged gave response 2 nan") as raised:
        reward.score_terms(replace(BATCH, columns={"answer": [None, None, "1", "2"]}))
    assert raised.value.row == 2


def test_a_row_that_only_a_judge_scores_is_refused():
    terms = [RewardTerm(number), RewardTerm(lambda completions: [0.0] * len(completions), weight=0.0, name="judge")]
    with pytest.raises(RewardError, match=r"prompt 2: None is not usable"):
        load_reward(terms).check({"answer": ["1", None]})


def test_an_async_function_that_checks_its_rows_scores_those_that_it_can():
    async def judged(completions, answer):
        return [float(len(text) + len(right)) for text, right in zip(completions, answer, strict=True)]

    judged.check_rows = lambda answer: None
    batch = replace(BATCH, columns={"answer": ["a", None, "bb", None]})
    expected = [len(BATCH.completions[0]) + 1.0, None, len(BATCH.completions[2]) + 2.0, None]
    reward = load_reward([judged, lambda completions: [0.0] * len(completions)])
    assert reward.score_terms(batch).terms["judged"] == expected
    function = FunctionReward(judged, skips_missing=True)
    assert function.score(batch) == expected
    assert function.start(replace(batch, columns={"answer": [None] * 4}))() == [None] * 4


def test_only_columns_that_a_verifier_needs_decide_which_rows_it_scores():
    """Not those of settings, nor one with the name of an argument that kedge gives."""

    def judged(completions, level=None):
        return [1.0] * len(completions)

    judged.check_rows = lambda level=None: None
    reward = load_reward([judged, lambda completions: [0.0] * len(completions)])
    columns = {"completions": [None] * 4, "level": [None] * 4}
    reward.check(columns)
    load_reward(number).check({"answer": ["1"], "completions": ["of the data set"]})
    assert reward.score_terms(replace(BATCH, columns=columns)).terms["judged"] == [1.0] * 4
