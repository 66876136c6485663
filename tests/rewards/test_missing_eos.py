"""The score for a missing stop token that follows the first scores."""

from __future__ import annotations

import json

import pytest
import torch

from kedge.rewards.score import MissingEos

STOPPED = torch.tensor([True, True, False, False])


def penalize(missing: MissingEos, scores: list[float], stopped: torch.Tensor = STOPPED) -> list[float]:
    return missing.penalize(torch.tensor(scores), stopped).tolist()


# By hand: the stopped mean is offset + 1·scale; all four scores 0, 2, 4, 6 have standard deviation √5.
@pytest.mark.parametrize("offset", [-10.0, 0.0, 10.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_auto_lies_a_standard_deviation_below_the_stopped_scores_and_never_above_minus_one(offset, scale):
    missing = MissingEos("auto")
    scores = [offset + scale * score for score in (0.0, 2.0, 4.0, 6.0)]
    expected = min(-1.0, offset + scale * (1 - 5**0.5))
    assert penalize(missing, scores) == pytest.approx([*scores[:2], expected, expected], rel=1e-5)
    assert missing.score == pytest.approx(expected, rel=1e-5)
    assert missing.metrics() == {"reward/missing_eos_score": missing.score}


@pytest.mark.parametrize(("scale", "amount"), [(0.1, 1.0), (10.0, 10 * 5**0.5)])
@pytest.mark.parametrize("offset", [-10.0, 10.0])
def test_the_amount_to_subtract_does_not_depend_on_the_offset(offset, scale, amount):
    scores = [offset + scale * score for score in (0.0, 2.0, 4.0, 6.0)]
    expected = [*scores[:2], *(score - amount for score in scores[2:])]
    assert penalize(MissingEos("auto", "subtract"), scores) == pytest.approx(expected, rel=1e-5)


def test_if_no_response_stopped_all_scores_decide():
    missing = MissingEos("auto")
    assert penalize(missing, [-9.0, -5.0], torch.tensor([False, False])) == [-9.0, -9.0]  # mean −7, deviation 2


def test_the_first_batch_decides_for_the_whole_run_also_after_a_resume():
    missing, resumed = MissingEos("auto"), MissingEos("auto")
    assert missing.metrics() == {}
    penalize(missing, [-5.0, -6.0, -4.0, -5.0])
    first = missing.score
    resumed.load_state_dict(json.loads(json.dumps(missing.state_dict())))
    for each in (missing, resumed):
        assert penalize(each, [100.0, 90.0, 110.0, 80.0]) == pytest.approx([100.0, 90.0, first, first])


@pytest.mark.parametrize("score", [None, -2.5, 5.0])
def test_a_configured_score_stays(score):
    missing = MissingEos(score)
    expected = [-7.0, -8.0, *([-9.0, -6.0] if score is None else [score] * 2)]
    assert penalize(missing, [-7.0, -8.0, -9.0, -6.0]) == expected
    assert missing.metrics() == ({} if score is None else {"reward/missing_eos_score": score})


@pytest.mark.parametrize("score", [2.0, -2.0])
def test_what_is_subtracted_is_logged_as_what_is_added(score):
    missing = MissingEos(score, "subtract")
    assert penalize(missing, [-7.0, -8.0, -9.0, -6.0]) == [-7.0, -8.0, -11.0, -8.0]
    assert missing.metrics() == {"reward/missing_eos_score": -2.0}
