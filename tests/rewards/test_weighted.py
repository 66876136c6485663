"""Several rewards as one: the weighted sum, missing scores, token scores, and the metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kedge.rewards import CallLimits, FunctionReward, Responses, RewardTerm, WeightedReward, load_reward
from kedge_base.errors import NonfiniteScoreError, RewardError

BATCH = Responses(["p"] * 3, ["a", "bb", "ccc"], [[1]] * 3, [[1]] * 3, [True] * 3)


TOKENS = replace(BATCH, response_ids=[[1], [1, 2], [1, 2, 3]])
DROP = CallLimits(retries=0, on_error="drop")


def fixed(name, *values):
    return FunctionReward(lambda completions: list(values), name=name)


def test_the_weighted_sum_leaves_missing_scores_out():
    reward = WeightedReward([(fixed("a", 1, None, None), 2.0), (fixed("b", 10, 20, None), 0.5)])
    scored = reward.score_terms(BATCH)
    assert scored.scores == [2 * 1 + 0.5 * 10, 0.5 * 20, None]
    assert scored.terms == {"a": [1, None, None], "b": [10, 20, None]}
    assert scored.metrics() == {"score/a": 1.0, "score/b": 15.0}
    assert reward.score(BATCH) == scored.scores


def test_a_term_without_any_score_has_no_mean():
    means = WeightedReward([(fixed("a", None, None, None), 1.0)]).score_terms(BATCH).metrics()
    assert math.isnan(means["score/a"])


def test_a_source_of_weight_zero_is_reported():
    scored = WeightedReward([(fixed("main", 1, 2, 3), 1.0), (fixed("watched", 7, 7, 7), 0.0)]).score_terms(BATCH)
    assert scored.scores == [1, 2, 3]
    assert scored.metrics()["score/watched"] == 7


def test_a_judge_changes_no_score():
    scored = WeightedReward([(fixed("main", 1, None, 3), 1.0), (fixed("judge", 7, 7, None), 0.0)]).score_terms(BATCH)
    assert scored.scores == [1, None, 3]
    with pytest.raises(RewardError, match="every reward has weight 0"):
        WeightedReward([(fixed("judge", 1, 2, 3), 0.0)])


def test_token_scores_are_summed_token_by_token():
    process = fixed("process", [1.0], [2.0, 3.0], None)
    other = fixed("other", [10.0], 7.0, [1.0, 2.0, 3.0])
    outcome = fixed("outcome", 100.0, None, None)
    reward = WeightedReward([(process, 2.0), (other, -1.0), (outcome, 0.5)])
    scored = reward.score_terms(TOKENS)
    assert scored.scores == [50.0, -7.0, 0.0]
    assert scored.token_scores == [[2 * 1 - 10.0], [4.0, 6.0], [-1.0, -2.0, -3.0]]
    assert scored.totals() == reward.score(TOKENS) == [50.0 - 8.0, -7.0 + 10.0, -6.0]
    assert scored.metrics() == {
        "score/process": (1 + 5) / 2,
        "score/other": (10 + 7 + 6) / 3,
        "score/outcome": 100.0,
    }


def test_a_response_without_any_score_has_no_token_scores():
    scored = WeightedReward([(fixed("process", None, [2.0, 3.0], None), 1.0)]).score_terms(TOKENS)
    assert (scored.scores, scored.token_scores) == ([None, 0.0, None], [None, [2.0, 3.0], None])
    assert scored.totals() == [None, 5.0, None]


def test_a_judge_of_tokens_changes_no_score():
    judge = fixed("judge", [9.0], [9.0, 9.0], [9.0, 9.0, 9.0])
    scored = WeightedReward([(fixed("main", 1, None, 3), 1.0), (judge, 0.0)]).score_terms(TOKENS)
    assert (scored.scores, scored.token_scores) == ([1, None, 3], None)
    assert scored.metrics()["score/judge"] == (9 + 18 + 27) / 3


def test_a_response_that_a_function_failed_on_has_no_token_scores_either():
    def picky(completion_ids):
        if [1, 2] in completion_ids:
            raise ValueError
        return [[1.0] * len(ids) for ids in completion_ids]

    reward = load_reward([picky, fixed("process", *([1.0] * n for n in (1, 2, 3))).function], limits=DROP)
    scored = reward.score_terms(TOKENS)
    assert scored.scores == [0.0, None, 0.0]
    assert scored.token_scores == [[2.0], None, [2.0, 2.0, 2.0]]


def test_terms_of_the_same_name_are_numbered():
    reward = WeightedReward([(fixed("f", 1, 1, 1), 1.0), (fixed("g", 0, 0, 0), 1.0), (fixed("f", 2, 2, 2), 1.0)])
    assert list(reward.score_terms(BATCH).terms) == ["f", "g", "f-2"]
    assert reward.name == "f+g+f-2"


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_must_be_finite(weight):
    with pytest.raises(RewardError, match="the weight of reward 'f'"):
        WeightedReward([(fixed("f", 1, 1, 1), weight)])
    with pytest.raises(RewardError, match="no reward given"):
        WeightedReward([])


def test_columns_of_every_function_are_checked():
    reward = load_reward([lambda completions: [0.0], lambda completions, answer: [0.0]])
    reward.check(["answer"])
    with pytest.raises(RewardError, match="takes 'answer'"):
        reward.check([])


def test_functions_load_with_weight_name_and_settings():
    reward = load_reward(
        [
            lambda completions: [float(len(text)) for text in completions],
            RewardTerm("kedge.rewards.penalties:ill_formed", 0.5, {"pattern": "a|bb"}, name="format"),
        ]
    )
    assert reward.names == ["lambda", "format"]
    assert reward.score(BATCH) == [1.0, 2.0, 3.0 - 0.5]


def test_names_stay_distinct_where_a_numbered_one_is_taken():
    def one(completions):
        return [1.0] * len(completions)

    terms = [RewardTerm(one, name=name) for name in ("a", "a", "a-2", "a")]
    assert load_reward(terms).names == ["a", "a-3", "a-2", "a-4"]


def test_a_judges_number_that_is_not_finite_is_no_score():
    broken = fixed("judge", 1.0, math.nan, 3.0)
    scored = WeightedReward([(fixed("kept", 1, 2, 3), 1.0), (broken, 0.0)]).score_terms(BATCH)
    assert scored.scores == [1, 2, 3]
    assert scored.terms["judge"] == [None, None, None]
    with pytest.raises(NonfiniteScoreError):
        WeightedReward([(broken, 1.0)]).score(BATCH)
