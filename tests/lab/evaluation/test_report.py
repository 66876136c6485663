"""The output of an evaluation, from outcomes written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kedge.rewards import Responses, Scores
from kedge.stages.judges import Judge, PairOutcomes, ScoredResponses
from kedge_lab.evaluation.evaluator import PolicyResult
from kedge_lab.evaluation.report import Evaluation, report


class NamedJudge:
    """A judge that has a name and nothing else."""

    name, mode = "letters", "pairwise"


def responses(texts: list[str]) -> Responses:
    prompts = [f"Deck {number}:" for number in range(len(texts))]
    ids = [[1] * len(text) for text in texts]
    return Responses(prompts, texts, ids, ids, [True] * len(texts), {})


def evaluation(wins: Scores, **orders: Scores) -> Evaluation:
    """An evaluation of a policy that writes "ab" against references of other lengths."""
    count = len(wins)
    ours = ScoredResponses(responses(["ab"] * count), None)
    theirs = ScoredResponses(responses(["a" * (1 + number % 3) for number in range(count)]), None)
    judge = cast("Judge", NamedJudge())
    return Evaluation(judge, PolicyResult("policy", ours, PairOutcomes(wins, **orders), None), theirs)


@pytest.fixture
def reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    wins: Scores = [1.0, 1.0, 0.5, 0.0, None, 1.0]
    return report(evaluation(wins), tmp_path), capsys.readouterr().out


def test_the_table_counts_what_was_won_tied_and_lost(reported):
    summary, printed = reported
    assert (summary["won"], summary["tied"], summary["lost"], summary["num_judged"]) == (3, 1, 1, 5)
    assert "3 / 1 / 1" in printed
    assert "KL" not in printed


def test_one_request_of_a_judge_has_no_plural(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usage = {"requests": 1, "tokens": 1, "cost": None, "unanswered": 1}
    report(replace(evaluation([1.0]), judge_usage=usage), tmp_path)
    assert "The judge: 1 request, 1 token; 1 question without a usable answer\n" in capsys.readouterr().out


def test_a_tie_in_one_order_is_no_contradiction():
    # Pairs: the same winner, two winners, a tie and a win, a win and a tie, two ties, and one undecided.
    first: Scores = [1.0, 1.0, 0.5, 0.0, 0.5, None]
    second: Scores = [1.0, 0.0, 1.0, 0.5, 0.5, 1.0]
    assert PairOutcomes(first, first, second).position_bias() == {
        "first_rate": (1 + 2 + 0.5 + 0.5 + 1) / 10,  # the response shown first wins 1 of 2, 2, ½, ½ and 1
        "contradicted": 1 / 5,
    }


def test_pairs_whose_lengths_differ_are_counted(reported):
    # "ab" against lengths 1, 2, 3, 1, 2, 3: pairs 0, 2, 3 and 5 differ and are decided; the longer wins 1, ½, 0 and 0.
    summary, _ = reported
    assert summary["num_unequal_lengths"] == 4
    assert summary["longer_wins"]["value"] == 1.5 / 4


def test_the_win_rate_is_also_controlled_for_length(tmp_path, capsys):
    # "ab" against lengths 1, 2, 3: of equal length, three of four are won; the longer text always wins otherwise.
    wins: Scores = [{0: 1.0, 1: float(number % 4 > 0), 2: 0.0}[number % 3] for number in range(240)]
    summary = report(evaluation(wins), tmp_path)
    controlled = summary["win_rate_controlled"]
    assert summary["win_rate"]["value"] == pytest.approx(7 / 12)
    assert controlled["for"] == ["length"]
    assert controlled["value"] == pytest.approx(0.75, abs=0.01)
    assert controlled["low"] < 0.75 < controlled["high"]
    printed = capsys.readouterr().out
    assert f"{controlled['value']:.2f} ({controlled['low']:.2f}–{controlled['high']:.2f})" in printed
    assert "Controlled: the win rate if both sides were alike in length" in printed


def test_a_frontier_is_controlled_too_and_few_pairs_are_not(reported, tmp_path):
    assert reported[0]["win_rate_controlled"] is None
    assert "ontrolled" not in reported[1]
    several = evaluation([float(number % 4 > 0) for number in range(60)])
    summary = report(replace(several, frontier=[several.policy]), tmp_path)
    assert summary["frontier"][0]["win_rate_controlled"] == summary["win_rate_controlled"] is not None
