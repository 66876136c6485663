"""Pairwise judges: their arguments, valid verdicts, and the errors for invalid ones."""

from __future__ import annotations

import pytest

from kedge.rewards import Responses
from kedge.rewards.function import FunctionReward
from kedge.stages.judges import PairwiseJudge
from kedge_base.errors import RewardError


def said(*texts: str, **columns: list) -> Responses:
    count = len(texts)
    return Responses(["?"] * count, list(texts), [[1]] * count, [[2]] * count, [True] * count, columns={**columns})


def test_it_sees_prompts_both_texts_and_columns():
    seen = {}

    def judge(prompts, first, second, topic, **columns):
        seen.update(prompts=prompts, first=first, second=second, topic=topic)
        return [1, 0.5]

    judged = PairwiseJudge(judge).verdicts(said("a", "b", topic=[1, 2]), said("c", "d", topic=[1, 2]))
    assert judged == [1.0, 0.5]
    assert seen == {"prompts": ["?", "?"], "first": ["a", "b"], "second": ["c", "d"], "topic": [1, 2]}


def test_async_none_and_truth_values():
    async def judge(first, second, **columns):
        return [True, False, None]

    judge_of_pairs = PairwiseJudge(judge)
    assert judge_of_pairs.name == "judge"
    assert judge_of_pairs.verdicts(said("a", "b", "c"), said("d", "e", "f")) == [1.0, 0.0, None]


def test_a_function_is_found_by_its_name(tmp_path):
    (tmp_path / "judges.py").write_text(
        "def shorter(first, second, **_):\n    return [float(a < b) for a, b in zip(first, second)]\n"
    )
    judge = PairwiseJudge(f"{tmp_path}/judges.py:shorter")
    assert judge.verdicts(said("a"), said("b")) == [1.0]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda first, second: [], "cannot judge pairs; expected a function f(prompts, first, second, **columns)"),
        (lambda completions, **columns: [], "cannot judge pairs"),
        (3, "cannot judge pairs"),
        (dict, "cannot judge pairs"),
        ("nowhere.py:f", "reward file 'nowhere.py' does not exist"),
    ],
)
def test_what_is_no_judge_is_refused_at_once(function, complaint):
    with pytest.raises(RewardError, match=complaint.replace("(", r"\(").replace(")", r"\)").replace("*", r"\*")):
        PairwiseJudge(function)


@pytest.mark.parametrize(
    ("verdicts", "complaint"),
    [
        ([0.7], "returned 0.7 for pair 0; expected 1"),
        (["A"], r"^lambda returned 'A' for pair 0; expected 1 \(the first is better\), 0 \(the second\)"),
        ([[1.0]], r"returned \[1.0\] for pair 0"),
        ([-1], r"returned -1\.0 for pair 0"),
        ([], "0 scores for 1"),
        (["first"], "returned 'first' for pair 0"),
    ],
)
def test_other_verdicts_are_refused(verdicts, complaint):
    with pytest.raises(RewardError, match=complaint):
        PairwiseJudge(lambda **pairs: verdicts).verdicts(said("a"), said("b"))


def test_a_judge_of_pairs_that_is_to_score_names_its_mode():
    def judge(prompts, first, second):
        return []

    with pytest.raises(RewardError, match=r"judge takes two responses, .* and each is scored by itself here; as a"):
        FunctionReward(judge)
    with pytest.raises(RewardError, match=r"needs evaluate.judge_mode=pairwise"):
        FunctionReward(lambda first, second, **columns: []).check(["topic"])
    FunctionReward(lambda completions, first, second: []).check(["first", "second"])


def test_columns_are_checked_before_a_run():
    judge = PairwiseJudge(lambda first, second, topic, **columns: [])
    judge.check(["topic"])
    with pytest.raises(RewardError, match="takes 'topic', but no column"):
        judge.check([])
    judge.check(["topic", "first"])


def test_a_column_with_the_name_of_a_side_is_passed_under_another():
    judge = PairwiseJudge(lambda first, second, given_first, **columns: [float(given_first[0] == "mine" != first[0])])
    assert judge.verdicts(said("a", first=["mine"]), said("b")) == [1]
