"""The output of an evaluation, from outcomes written by hand."""

from __future__ import annotations

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
