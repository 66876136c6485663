"""Evaluations and generated responses on the page, from rows written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kedge_inspect.page.data import ReportedRun, page_data
from kedge_inspect.page.numbers import distributions
from kedge_inspect.page.responses import evaluation, generation, judge_agreement
from kedge_inspect.report import collect_page
from tests.inspect.page.judged import (
    SUMMARY,
    WINNERS,
    evaluation_record,
    generation_record,
    judgment,
    solving_record,
    write_judged,
)
from tests.inspect.page.records import ppo_record

MANY = 1_000_000


def test_an_evaluation_has_its_figures_and_every_pair():
    shown = evaluation(evaluation_record(), most_bytes=MANY)
    assert {name: shown[name] for name in ("won", "tied", "lost", "win_rate")} == {
        "won": 2, "tied": 1, "lost": 1, "win_rate": SUMMARY["win_rate"],
    }  # fmt: skip
    assert [pair["outcome"] for pair in shown["pairs"]] == ["won", "won", "tied", "lost", "undecided"]
    assert (len(shown["pairs"]), shown["of"]) == (5, 5)
    assert shown["pairs"][3]["score"] == 3
    assert shown["num_unequal_lengths"] == 2
    assert shown["orders"] is None


def test_an_evaluation_of_pass_at_k_shows_its_responses():
    shown = generation(solving_record(), most_bytes=MANY)
    rows = [(row["model"], row["k"], row["pass"]["value"], row["maj"]) for row in shown["solved"]]
    half = {"value": 0.5, "low": 0.25, "high": 0.75}
    assert rows == [
        ("runs/ppo/model", "1", 0.25, half), ("runs/ppo/model", "2", 0.5, half),
        ("runs/sft/model", "1", 0.25, None), ("runs/sft/model", "2", 0.5, None),
    ]  # fmt: skip
    first = shown["responses"][0]
    assert (first["model"], first["score"], first["reason"], first["answer"]) == ("runs/ppo/model", 1, "right", "0")
    assert (len(shown["responses"]), shown["of"]) == (8, 8)
    assert evaluation(solving_record(), most_bytes=MANY) == {"empty": ""}
    assert generation(evaluation_record(), most_bytes=MANY) == {"empty": ""}
    sentences = page_data([ReportedRun("e", solving_record(), [])], title="")["runs"][0]["sentences"]
    assert sentences[:2] == [
        "At the first try runs/ppo/model solves 25% (25% to 75%) of 2 prompts, judged by gsm8k.",
        "At least one of 2 responses is right for 50% (25% to 75%), and the most frequent answer for 50% (25% to 75%).",
    ]


def test_the_verdict_says_whether_the_sides_differ():
    def sentences(**rate: float) -> list[str]:
        data = page_data([ReportedRun("e", evaluation_record(win_rate=rate), [])], title="")
        return data["runs"][0]["sentences"]

    first, second = sentences(value=0.625, low=0.25, high=1.0)
    assert "won 2, tied 1 and lost 1 of 4 prompts against runs/sft/model, judged by letters" in first
    assert "62% (25% to 100%)" in first
    assert "does not tell the two apart" in second
    record = evaluation_record(num_judged=1)
    assert (
        "lost 1 of 1 prompt against" in page_data([ReportedRun("e", record, [])], title="")["runs"][0]["sentences"][0]
    )
    assert sentences(value=0.8, low=0.6, high=0.9)[1] == "The judge prefers runs/ppo/model."
    assert sentences(value=0.2, low=0.1, high=0.4)[1] == "The judge prefers runs/sft/model."


def test_the_orders_of_a_pairwise_judge_are_counted():
    orders = [("model", "model"), ("against", "against"), ("model", "against"), ("model", "against"),
              ("against", "model"), ("tie", "model"), (None, "model")]  # fmt: skip
    rows = [
        judgment(number, "tie", winner_shown_first=one, winner_shown_second=two)
        for number, (one, two) in enumerate(orders)
    ]
    shown = evaluation(evaluation_record(rows), most_bytes=MANY)
    assert shown["orders"] == {"pairs": 6, "same": 2, "first": 2, "second": 1}
    assert shown["pairs"][2]["orders"] == ["won", "lost"]


@pytest.mark.parametrize(("scored", "values"), [(True, [1, 2, 1.5]), (False, [0.5, 0.625, 0.75])])
def test_the_frontier_starts_at_the_opponent(scored: bool, values: list[float]):
    other = {"model": "runs/far/model", "kl": {"value": 9.0}, "win_rate": {"value": 0.75, "low": 0.5, "high": 0.9},
             "score": {"value": 1.5, "low": 1.0, "high": 2.0}}  # fmt: skip
    more = {} if scored else {"score_against": None}
    found = evaluation(evaluation_record(frontier=[other], **more), most_bytes=MANY)["frontier"]
    assert found["of"] == ("score" if scored else "win rate")
    assert [point["root_kl"] for point in found["points"]] == [0, 2, 3]
    assert [point["value"] for point in found["points"]] == values
    assert evaluation(evaluation_record(), most_bytes=MANY)["frontier"] is None


def test_only_as_many_pairs_as_fit_are_shown_and_counted():
    rows = [judgment(number, "model") for number in range(100)]
    shown = evaluation(evaluation_record(rows), most_bytes=5_000)
    assert 10 < len(shown["pairs"]) < 40
    assert len(json.dumps(shown["pairs"])) < 6_000
    assert shown["of"] == 100


def test_generated_responses_have_scores_and_lengths():
    shown = generation(generation_record(), most_bytes=MANY)
    assert [row.get("score") for row in shown["responses"]] == [1, None, 3]
    assert shown["scores"]["named"][0]["median"] == 2
    assert shown["lengths"]["named"][0]["median"] == 2
    [run] = page_data([ReportedRun("g", generation_record(), [])], title="")["runs"]
    assert run["sentences"] == [
        "3 responses to 3 prompts, 4 tokens long on average; 67% end with a stop token.",
        "Their mean score by letters is 2 (1 to 3).",
    ]


def test_a_run_without_a_result_says_so():
    running = replace(evaluation_record(), summary={}, results=(), state="running")
    assert "is running" in evaluation(running, most_bytes=MANY)["empty"]
    stopped = replace(generation_record(), summary={}, state="stopped", progress=[{"total": 9}])
    [run] = page_data([ReportedRun("g", stopped, [])], title="")["runs"]
    assert run["sentences"] == ["Stopped after 3 of 9 responses."]
    assert len(run["generation"]["responses"]) == 3
    assert "empty" in evaluation(ppo_record(), most_bytes=MANY)
    assert "empty" in generation(ppo_record(), most_bytes=MANY)


def test_agreement_of_judges_by_hand():
    # 20 pairs: both yes 8, both no 6, one alone 4, other alone 2: p_o = .7, p_e = .6·.5 + .4·.5 = .5, κ = .4.
    pairs = [("model", "model")] * 8 + [("against", "against")] * 6 + [("model", "against")] * 4
    pairs += [("against", "model")] * 2
    one, other = (
        evaluation_record([judgment(number, pair[side]) for number, pair in enumerate(pairs)]) for side in (0, 1)
    )
    [found] = judge_agreement({"a": one, "b": other, "c": ppo_record()})
    assert (found["pairs"], found["same"], found["kappa"]) == (20, 14, pytest.approx(0.4))
    always = evaluation_record([judgment(number, "model") for number in range(3)])
    assert judge_agreement({"a": always, "b": always})[0]["kappa"] is None
    elsewhere = evaluation_record([judgment(number, "model", prompt="another") for number in range(3)])
    assert judge_agreement({"a": always, "b": elsewhere}) == []


def test_shares_of_a_distribution_sum_to_one():
    found = distributions({"a": [1.0, 2.0, 2.0, 9.0], "b": [], "c": [5.0]})
    assert found is not None
    assert [each["name"] for each in found["named"]] == ["a", "c"]
    assert [sum(each["shares"]) for each in found["named"]] == [1, 1]
    assert found["named"][0]["median"] == 2
    assert distributions({"a": []}) is None


def test_finished_folders_are_read(tmp_path):
    folders = [write_judged(tmp_path / record.stage, record) for record in (evaluation_record(), generation_record())]
    data: dict[str, Any] = collect_page(folders)
    assert [run["state"] for run in data["runs"]] == ["finished", "finished"]
    assert len(data["runs"][0]["evaluation"]["pairs"]) == len(WINNERS)
    assert data["runs"][1]["generation"]["of"] == 3
