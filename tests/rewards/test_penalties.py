"""The penalties, against values computed by hand from their definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kedge.rewards import FunctionReward, Responses, load_function, load_reward
from kedge.rewards.penalties import blank, ill_formed, off_length, off_target_length, repetitive, too_long, unfinished
from kedge_base.errors import RewardError
from kedge_tasks.verify import tags


def test_too_long_has_the_published_shape():
    # DAPO's own setting: at most 20,480 tokens, the last 4,096 of them punished, so 16,384 are free.
    lengths = [1, 16_384, 16_384 + 1_024, 16_384 + 2_048, 20_480, 30_000]
    assert too_long([[0] * n for n in lengths], 20_480) == pytest.approx([0, 0, -0.25, -0.5, -1, -1])


def test_too_long_with_another_window():
    assert too_long([[0] * n for n in (5, 6, 8, 10)], 10, window=0.5) == pytest.approx([0, -0.2, -0.6, -1])
    with pytest.raises(RewardError, match="window 0 is not in"):
        too_long([[0]], 10, window=0)


def test_off_length_is_free_near_the_target_and_falls_on_both_sides():
    # Target 100 ± 20: 40 tokens are 60 off, 40 of them beyond the tolerance, a share of 0.4; at most −1.
    lengths = [100, 80, 120, 40, 160, 500, 1]
    expected = [0, 0, 0, -0.4, -0.4, -1, -0.79]
    assert off_length([[0] * n for n in lengths], target=100) == pytest.approx(expected)
    assert off_target_length([[0] * 10] * 3, [10, 20, 5], tolerance=0) == pytest.approx([0, -0.5, -1])


@pytest.mark.parametrize("target", [0, -3, True, "nine", None, float("nan")])
def test_a_target_length_is_a_number_above_zero(target):
    with pytest.raises(RewardError, match="must be a number of tokens above 0"):
        off_target_length([[0]], [target])
    with pytest.raises(RewardError, match="the tolerance of a length, -1, must be 0 or more"):
        off_length([[0]], target=3, tolerance=-1)


def test_unfinished_and_blank():
    assert unfinished([True, False]) == [0, -1]
    assert blank(["word", "", " \n\t"]) == [0, -1, -1]


def test_repetitive_counts_what_was_said_before():
    # "a b c a b c" has the trigrams abc, bca, cab, abc: one of four was there before.
    assert repetitive(["a b c a b c", "a b c d", "a b", ""]) == pytest.approx([-0.25, 0, 0, 0])
    assert repetitive(["no no no no"], size=1) == pytest.approx([-0.75])
    with pytest.raises(RewardError, match="size 0"):
        repetitive(["a"], size=0)


def test_ill_formed_matches_the_whole_response():
    pattern = r"<think>.*</think>\s*\d+"
    texts = ["<think>a\nb</think> 42", "42", "<think></think> 42 indeed"]
    assert ill_formed(texts, pattern=pattern) == [0, -1, -1]
    with pytest.raises(RewardError, match=r"'\[' is not a regular expression"):
        ill_formed(["a"], pattern="[")


@pytest.mark.parametrize(
    ("penalty", "settings", "columns", "message"),
    [
        (too_long, {"window": 2}, {}, r"window 2 is not in"),
        (off_length, {"target": 0}, {}, r"the target of a length, 0, must"),
        (off_length, {"target": 9, "tolerance": -1}, {}, r"the tolerance of a length, -1, must"),
        (off_target_length, {}, {"target_length": [5, "long"]}, r"the target of a length, 'long', must"),
        (repetitive, {"size": 0}, {}, r"size 0 is not a whole number, at least 1"),
        (repetitive, {"size": 2.5}, {}, r"size 2\.5 is not a whole number, at least 1"),
        (ill_formed, {"pattern": "("}, {}, r"'\(' is not a regular expression"),
    ],
)
def test_bad_settings_are_found_before_a_run(penalty, settings, columns, message):
    with pytest.raises(RewardError, match=message):
        FunctionReward(penalty, settings=settings).check(columns)


def test_good_settings_pass_the_check_before_a_run():
    for penalty, settings, columns in (
        (too_long, {}, {}),
        (off_length, {"target": 9}, {}),
        (off_target_length, {"tolerance": 0.5}, {"target_length": [5, 9]}),
        (repetitive, {}, {}),
        (ill_formed, {"pattern": "a+"}, {}),
    ):
        FunctionReward(penalty, settings=settings).check(columns)


@pytest.mark.parametrize(
    ("function", "text", "columns"),
    [
        (tags, "<think>a</think><answer>b</answer>", {"names": [["Ann", "Bob"]]}),
        (repetitive, "a b c a b c", {"size": ["large"]}),
        (too_long, "a", {"window": [7.0]}),
    ],
)
def test_a_column_with_the_name_of_a_setting_is_not_taken_for_it(function, text, columns):
    batch = Responses(["p"], [text], [[3]], [[4] * 9 + [2]], [True], {}, max_new_tokens=10)
    reward = FunctionReward(function)
    reward.check(columns)
    assert reward.score(replace(batch, columns=columns)) == reward.score(batch) != [None]
    with pytest.raises(RewardError, match="off_length takes 'target', but no column"):
        FunctionReward(off_length).check({"target": [5]})


@pytest.mark.parametrize("name", ["too_long", "unfinished", "blank", "repetitive"])
def test_each_works_by_its_name_alone(name):
    batch = Responses(["p"], ["fine words"], [[3]], [[4, 2]], [True], {}, max_new_tokens=20)
    assert FunctionReward(load_function(f"kedge.rewards.penalties:{name}")).score(batch) == [0.0]


def test_a_worker_is_told_which_responses_ended():
    batch = Responses(["p"] * 2, ["fine"] * 2, [[3]] * 2, [[4, 2]] * 2, [True, False])
    assert load_reward("kedge.rewards.penalties:unfinished").score(batch) == [0.0, -1.0]


def test_the_target_length_comes_from_the_data():
    batch = Responses(["p"] * 2, ["fine"] * 2, [[3]] * 2, [[4, 2]] * 2, [True] * 2, {"target_length": [2, 8]})
    reward = load_reward("kedge.rewards.penalties:off_target_length")
    assert reward.score(batch) == pytest.approx([0.0, -0.55])
    assert reward.score(replace(batch, columns={"target_length": ["2", "8"]})) == pytest.approx(
        [0.0, -0.55]
    )  # of a CSV


def test_too_long_without_a_limit_says_what_is_missing():
    batch = Responses(["p"], ["fine words"], [[3]], [[4, 2]], [True])
    with pytest.raises(RewardError, match="too_long takes 'max_new_tokens'"):
        load_reward(too_long).score(batch)
