"""The doctor on evaluations: what it says about figures, and about runs that have none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kedge_inspect.diagnosis import diagnose_run, examine_run
from kedge_inspect.doctor import diagnose, examine
from tests.inspect.doctor.cases import judged, rate
from tests.inspect.doctor.synthetic import synthetic_run
from tests.inspect.page.judged import evaluation_record, generation_record, write_judged


def test_a_finished_evaluation_is_examined(tmp_path):
    folder = write_judged(tmp_path / "run", evaluation_record())
    assert [(each.severity, each.rule) for each in diagnose_run(folder)] == [
        ("warning", "unjudged_responses"), ("note", "win_rate_undecided"),
    ]  # fmt: skip
    [examined] = examine_run(folder).values()
    assert "nothing was checked" not in examined.verdict
    assert not examined.gaps


@pytest.mark.parametrize("record", [evaluation_record(), generation_record()])
def test_without_a_result_nothing_was_checked(record):
    examined = examine(replace(record, summary={}, state="stopped"))
    assert not examined.is_clean
    assert examined.verdict.startswith("nothing was checked")
    assert "the run has no result" in examined.verdict


def test_a_clean_result_says_how_many_checks_it_passed():
    summary = {**evaluation_record().summary, "num_judged": 5, "win_rate": rate(0.8, 0.1)}
    examined = examine(replace(evaluation_record(), summary=summary))
    assert examined.is_clean
    assert examined.verdict == "nothing wrong in 5 checks"
    assert examine(replace(generation_record(), summary={**generation_record().summary, "num_scored": 3})).is_clean


@pytest.mark.parametrize(
    ("value", "reach", "needed"), [(0.6, 0.2, "about 240 prompts"), (0.5, 0.1, "many more prompts")]
)
def test_an_undecided_win_rate_says_how_many_prompts_would_decide_it(value, reach, needed):
    # Half the interval is 0.2 and the distance 0.1: twice as narrow takes four times as many prompts as 60.
    [finding] = diagnose(judged("evaluate", win_rate=rate(value, reach), num_judged=60))
    assert f"judge {needed}" in finding.try_
    assert "raise evaluate.num_prompts from 60 to 240" in finding.try_


def test_mean_lengths_of_thousands_of_tokens_have_no_exponent():
    lengths = {"length": 1234.5, "length_against": 98.76}
    found = diagnose(judged("evaluate", longer_wins=rate(0.8, 0.1), num_unequal_lengths=2_000, **lengths))
    [seen] = [each.seen for each in found if each.rule == "judge_prefers_length"]
    assert seen.endswith("of the 2,000 pairs whose lengths differ; mean lengths are 1,234 and 98.8 tokens")


def test_one_of_a_kind_has_no_plural():
    interval = {"value": 0.5, "low": 0.0, "high": 1.0}
    tie = {"num_prompts": 1, "num_judged": 1, "tied": 1, "num_equal": 0, "win_rate": interval}
    alike = generation_record()
    seen = {
        finding.rule: finding.seen
        for record in (
            evaluation_record(num_prompts=1, num_judged=0),
            evaluation_record(**tie),
            replace(alike, summary={**alike.summary, "num_prompts": 8, "num_distinct": 1, "num_scored": 3}),
        )
        for finding in diagnose(record)
    }
    assert seen["win_rate_undecided"].endswith(" on 1 prompt")
    assert seen["mostly_ties"] == "1 of 1 pair tied"
    assert seen["unjudged_responses"] == "1 of 1 pair had no decision"
    assert seen["responses_alike"] == "8 prompts have only 1 different response"
    lost = synthetic_run(1, {"reward/mine_given_up": [1.0]}, settings={"rollout.num_prompts": 1})
    assert [each.seen for each in diagnose(lost)] == ["reward/mine_given_up: 1 of 1 response"]
