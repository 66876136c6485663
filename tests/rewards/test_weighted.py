"""Several rewards as one: the weighted sum, missing scores, and what the metrics see."""

from __future__ import annotations

import math

import pytest

from kedge.errors import RewardError
from kedge.rewards import FunctionReward, Responses, RewardTerm, WeightedReward, load_reward

BATCH = Responses(["p"] * 3, ["a", "bb", "ccc"], [[1]] * 3, [[1]] * 3, [True] * 3)


def fixed(name, *values):
    return FunctionReward(lambda completions: list(values), name=name)


def test_the_weighted_sum_leaves_missing_scores_out():
    reward = WeightedReward([(fixed("a", 1, None, None), 2.0), (fixed("b", 10, 20, None), 0.5)])
    scored = reward.score_terms(BATCH)
    assert scored.scores == [2 * 1 + 0.5 * 10, 0.5 * 20, None]
    assert scored.terms == {"a": [1, None, None], "b": [10, 20, None]}
    assert scored.term_means() == {"score/a": 1.0, "score/b": 15.0}
    assert reward.scores(BATCH) == scored.scores


def test_a_term_without_any_score_has_no_mean():
    means = WeightedReward([(fixed("a", None, None, None), 1.0)]).score_terms(BATCH).term_means()
    assert math.isnan(means["score/a"])


def test_a_weight_of_zero_still_reports_its_term():
    scored = WeightedReward([(fixed("main", 1, 2, 3), 1.0), (fixed("watched", 7, 7, 7), 0.0)]).score_terms(BATCH)
    assert scored.scores == [1, 2, 3]
    assert scored.term_means()["score/watched"] == 7


def test_a_judge_decides_about_no_response():
    scored = WeightedReward([(fixed("main", 1, None, 3), 1.0), (fixed("judge", 7, 7, None), 0.0)]).score_terms(BATCH)
    assert scored.scores == [1, None, 3]
    with pytest.raises(RewardError, match="every reward has weight 0"):
        WeightedReward([(fixed("judge", 1, 2, 3), 0.0)])


def test_terms_of_the_same_name_are_told_apart():
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
    reward.check_columns(["answer"])
    with pytest.raises(RewardError, match="takes 'answer'"):
        reward.check_columns([])


def test_functions_load_with_weight_name_and_settings():
    reward = load_reward(
        [
            lambda completions: [float(len(text)) for text in completions],
            RewardTerm("kedge.rewards.penalties:ill_formed", 0.5, {"pattern": "a|bb"}, name="format"),
        ]
    )
    assert reward.names == ["lambda", "format"]
    assert reward.scores(BATCH) == [1.0, 2.0, 3.0 - 0.5]
