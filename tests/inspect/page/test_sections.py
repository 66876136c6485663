"""The data of each section, against values computed by hand from a run of five updates."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest

from kedge_inspect.doctor import Direction, Finding, Severity
from kedge_inspect.page.checks import FrontierPoint, critic, frontier, held_out
from kedge_inspect.page.clipping import clipping
from kedge_inspect.page.curves import curves, drawn_metrics
from kedge_inspect.page.data import ReportedRun, page_data
from kedge_inspect.page.looks import look_of
from kedge_inspect.page.responses import shown_responses
from kedge_inspect.page.scores import cost, policy_scores, reward_model
from kedge_inspect.page.verdict import describe_run, first_and_last
from kedge_inspect.record import RunRecord
from tests.inspect.page.records import CONFIG, critic_check, epoch, metric_row, ppo_record, reward_record, sample


def test_curves_have_columns_and_three_axes():
    found = curves(ppo_record(), most_points=100)
    assert found["update"] == [1, 2, 3, 4, 5]
    assert found["seconds"] == [4, 8, 12, 16, 20]
    assert found["items"] == [8, 16, 24, 32, 40]
    assert found["every"] == 1
    assert found["columns"]["score/gold"] == [-2, -1, 0, -1, -2]
    assert "flops/train" not in found["columns"]


def test_long_curves_are_thinned_to_means_and_maxima():
    found = curves(ppo_record(), most_points=3)
    assert found["update"] == [2, 4, 5]
    assert found["every"] == 2
    assert found["columns"]["reward/score_mean"] == [1.5, 3.5, 5]
    assert found["columns"]["policy/ratio_max"] == [3, 5, 6]


def test_missing_and_nonfinite_values_stay_gaps():
    rows = [metric_row(1, **{"policy/entropy": None}), metric_row(2, **{"reward/score_mean": math.nan})]
    columns = curves(ppo_record(metrics=rows), most_points=10)["columns"]
    assert columns["policy/entropy"] == [None, 1]
    assert columns["reward/score_mean"] == [1, None]


def test_panels_have_the_lines_with_data_and_name_each_source():
    found = {
        panel["title"]: panel for panel in look_of("ppo").panels_of(["score/gold", "score/model", "policy/entropy"])
    }
    assert set(found) == {"Score by source", "Entropy"}
    assert [line["label"] for line in found["Score by source"]["lines"]] == ["gold", "model"]
    assert look_of("ppo").panels_of(["score/model"]) == []
    several = {panel["title"]: panel["several"] for panel in look_of("ppo").panels_of(
        ["reward/score_mean", "reward/score_std", "verdict/right"])}  # fmt: skip
    assert several == {"Score": False, "Rewards": True, "Verdicts": True}  # the only line of the last two has a name
    assert look_of("unknown").panels_of(["loss"]) == []


def test_the_verdict_has_the_rise_the_kl_and_the_judge():
    first, second = describe_run(ppo_record())
    cost = "at a KL of 25 nats per response to the reference"
    assert first == f"PPO ran 5 updates (20 s, 40 responses): the score rose from 1 to 5, {cost}."
    assert second.startswith("The judge gold, which is not trained on, stayed near −2, response length stayed near 10")
    assert "75% of responses end with a stop token" in second
    assert describe_run(ppo_record(metrics=[metric_row(1)]))[0].startswith("PPO ran 1 update (4 s")
    played = [metric_row(u, **{"episode/turns": 7.0 - u, "episode/completed": 0.125 * u}) for u in range(1, 6)]
    second = describe_run(ppo_record(metrics=played))[1]
    assert second.endswith("turns per episode fell from 6 to 2, and 62% of episodes are completed.")


@pytest.mark.parametrize(
    ("state", "beginning"), [("running", "PPO is at update 5 of 5"), ("stopped", "PPO stopped after update 5 of 5")]
)
def test_the_verdict_says_how_a_run_ended(state, beginning):
    assert describe_run(ppo_record(state=state))[0].startswith(beginning)


def test_a_score_that_moved_less_than_a_tenth_of_its_spread_stayed():
    rows = [metric_row(u, **{"reward/score_mean": 0.99 + 0.01 * u}) for u in range(1, 6)]
    assert "the score stayed near 1.04" in describe_run(ppo_record(metrics=rows))[0]


GROUPED = {"group/constant": 0.5, "group/sampled": 30.0, "group/unused": 12.0, "group/resamples": 2.0}


def test_responses_that_were_thrown_away_are_counted():
    config = {**CONFIG, "ppo": {**CONFIG["ppo"], "constant_groups": "resample"}}
    rows = [metric_row(update, **GROUPED) for update in range(1, 6)]
    assert describe_run(ppo_record(config=config, metrics=rows))[2] == (
        "60 of 150 sampled responses (40%) were thrown away, because all responses to their prompt score the same "
        "or their update was complete (ppo.constant_groups=resample); there were 10 additional rounds of sampling."
    )
    config["ppo"]["constant_groups"] = "drop"
    rows = [{**row, "group/resamples": 0.0} for row in rows]
    assert describe_run(ppo_record(config=config, metrics=rows))[2].endswith("(ppo.constant_groups=drop).")
    assert len(describe_run(ppo_record(config=config, metrics=[{**row, "group/unused": 0.0} for row in rows]))) == 2


@pytest.mark.parametrize(
    ("settings", "is_shown"),
    [({}, True), ({"kl_coef": 0.05, "kl_in": "reward"}, True), ({"kl_coef": 0.0}, False), ({"kl_in": "loss"}, False)],
)
def test_the_score_less_its_kl_cost_is_shown_only_where_the_kl_is_in_the_reward(settings, is_shown):
    rows = [metric_row(update, **{"reward/total": 0.5 * update, "reward/kl": 0.5}) for update in range(1, 6)]
    record = ppo_record(config={**CONFIG, "ppo": {**CONFIG["ppo"], **settings}}, metrics=rows)
    shown = ("Score less KL cost" in {row["label"] for row in first_and_last(record)},
             "reward/total" in drawn_metrics(record), "reward/kl" in drawn_metrics(record))  # fmt: skip
    assert shown == (is_shown,) * 3


def test_every_stage_has_two_sentences():
    records = [ppo_record(), ppo_record(metrics=[]), reward_record(), replace(reward_record(), summary={})]
    records += [replace(reward_record(), facts={"stage": stage}) for stage in ("sft", "")]
    assert [len(describe_run(record)) for record in records] == [2] * len(records)
    assert "75% (70% to 80%) of 40 held-out pairs" in describe_run(reward_record())[1]
    assert "60%" in describe_run(reward_record())[1]


def test_the_verdict_on_a_critic_is_what_it_explains_on_held_out_prompts():
    summary = {
        "explained_variance": {"value": 0.446, "low": 0.37, "high": 0.51},
        "explained_by_third": [0.25, 0.46, 0.64],
        "measured_on": "held-out prompts",
    }
    rows = [{"update": step, "loss": 0.3, "explained_variance": 0.5, "eval/loss": 0.4} for step in (1, 2, 3)]
    record = replace(reward_record(), facts={"stage": "critic"}, summary=summary, metrics=rows)
    first, second = describe_run(record)
    assert first.endswith("on held-out prompts it explains 45% (37% to 51%) of the variance of the returns.")
    assert second == "In the first, middle and last third of the responses it explains 25%, 46% and 64%."
    alone = {**summary, "explained_variance": {"value": 0.446, "low": None, "high": None}}  # a single prompt
    assert "it explains 45% of the variance" in describe_run(replace(record, summary=alone))[0]
    first, second = describe_run(replace(record, summary={}))
    assert first.endswith("on the responses of a step it explains 50% of the variance.")
    assert "when the training ends" in second
    short = replace(record, summary={**summary, "explained_by_third": [0.2, None, None]})
    assert len(describe_run(short)) == 1
    assert [(row["label"], row["unit"]) for row in first_and_last(record)][1:] == [
        ("Loss", "variances of the returns"),
        ("Loss, held out", "variances of the returns"),
    ]


def test_first_and_last_are_means_over_a_twentieth_of_the_run():
    rows = [metric_row(update) for update in range(1, 41)]
    found = {row["label"]: row for row in first_and_last(ppo_record(metrics=rows))}
    assert (found["Score"]["first"], found["Score"]["last"]) == (1.5, 39.5)
    assert (found["Judge gold"]["first"], found["Judge gold"]["last"]) == (-1.5, -36.5)
    assert "Value loss" not in found


def changes(metrics: list[dict[str, object]]) -> dict[str, str]:
    return {row["label"]: row["change"] for row in first_and_last(ppo_record(metrics=metrics))}


def test_a_change_is_good_or_bad_only_beyond_noise_and_if_it_has_a_direction():
    steady = changes(
        [metric_row(u, **{"response/repetition": 0.02 * u, "tokens_per_second": 900.0 - u}) for u in range(1, 41)]
    )
    assert (steady["Score"], steady["Repetition"]) == ("better", "worse")
    assert steady["Tokens per second"] == steady["KL to the reference"] == ""
    # A rise of 0.1 in noise with a standard deviation of 1.
    wobble = [metric_row(u, **{"reward/score_mean": 0.0025 * u + (-1.0) ** (u * (u - 1) // 2)}) for u in range(1, 41)]
    assert changes(wobble)["Score"] == ""
    assert "the score stayed near" in describe_run(ppo_record(metrics=wobble))[0]
    few = [metric_row(u) for u in range(1, 4)]
    assert changes(few)["Score"] == "", "three values show no noise"
    assert "the score stayed near 3" in describe_run(ppo_record(metrics=few))[0]


def test_large_figures_are_whole_numbers():
    rows = [metric_row(u, **{"response/length": 250.0 * u, "objective/kl": 2e6 * u}) for u in range(1, 6)]
    first, second = describe_run(ppo_record(metrics=rows))
    assert "a KL of 1e+07 nats" in first
    assert "length rose from 250 to 1,250 tokens" in second


def test_rounding_errors_are_zero():
    rows = [metric_row(1, **{"objective/kl": -1e-7}), metric_row(2)]
    [kl] = [row for row in first_and_last(ppo_record(metrics=rows)) if row["label"] == "KL to the reference"]
    assert kl["first"] == 0


def test_samples_are_the_same_prompts_over_time_then_the_others():
    found = shown_responses(ppo_record(), most_bytes=10**6)
    assert [prompt["title"] for prompt in found["prompts"]] == ["Prompt 1", "Prompt 2", ""]
    assert [row["update"] for row in found["prompts"][0]["responses"]] == [0, 5]
    assert found["prompts"][0]["prompt"] == found["prompts"][2]["responses"][0]["prompt"] == "Tell me."
    assert (found["kept"], found["of"]) == (6, 6)
    first = found["prompts"][0]["responses"][0]
    assert first["values"] == [4.2, 4.5, 4.8, 5]
    assert first["length"] == len(first["tokens"]) == 4


def test_samples_are_thinned_to_what_fits_first_and_last_update_kept():
    rows = [sample(update, tokens=["word"] * 100) for update in range(1, 301)]
    found = shown_responses(ppo_record(samples=rows), most_bytes=30_000)
    updates = [row["update"] for row in found["prompts"][0]["responses"]]
    assert len(json.dumps(found)) < 31_000
    assert (updates[0], updates[-1]) == (1, 300)
    assert 2 < len(updates) == found["kept"] < found["of"] == 300


def test_long_responses_are_cut_but_keep_their_length():
    [prompt] = shown_responses(ppo_record(samples=[sample(1, tokens=["a"] * 1000)]), most_bytes=10**6)["prompts"]
    [row] = prompt["responses"]
    assert (row["length"], len(row["tokens"]), len(row["advantages"])) == (1000, 600, 600)


def test_what_a_cut_response_earned_after_its_last_shown_token_is_summed():
    rewards = [-0.5] * 998 + [None, 7.0]
    [prompt] = shown_responses(ppo_record(samples=[sample(1, tokens=["a"] * 1000, rewards=rewards)]), most_bytes=10**6)[
        "prompts"
    ]
    assert prompt["responses"][0]["later"] == 7 - 0.5 * 398


def test_episodes_have_what_was_only_read_their_turns_and_their_ending():
    said = [[0, "Go."], [1, "no."], [3, "x" * 7000], [4, "bye"]]
    rows = [sample(1, foreign=said, ending="max_turns"), sample(2, ending="completed"), sample(3)]
    [prompt] = shown_responses(ppo_record(samples=rows), most_bytes=10**6)["prompts"]
    several, single, plain = prompt["responses"]
    assert (several["turns"], several["ending"]) == (3, "max_turns")
    assert several["foreign"][:2] == said[:2]
    assert several["foreign"][2] == [3, "…" + "x" * 6000]
    assert (single["turns"], single["ending"], single["foreign"]) == (1, "completed", [])
    assert several["tree"] == single["tree"] == []
    assert not {"turns", "ending", "foreign", "tree"} & plain.keys()


def test_the_turns_of_an_episode_are_a_tree_with_figures():
    """By hand: two turns, a third that begins anew and a second sample of it, and one that goes on in the first."""
    turns = [[0, 0, 5, 5], [2, 2, 9, 2], [3, 0, 6, 4], [5, 0, 6, 0], [6, 1, 7, 1], [7, 7, 9, 1]]
    row = sample(1, tokens=list("abcdefgh"), turns=turns, foreign=[[2, "x"]], ending="completed")
    row |= {"rewards": [0.5, None, 1.0, 0.0, 0.0, 2.0, 0.0, 3.0], "values": [float(at) for at in range(8)]}
    [prompt] = shown_responses(ppo_record(samples=[row]), most_bytes=10**6)["prompts"]
    [shown] = prompt["responses"]
    assert shown["turns"] == 6
    tree = shown["tree"]
    assert [turn["level"] for turn in tree] == [0, 0, 0, 0, 1, 1]
    assert [(turn.get("after"), turn.get("kept")) for turn in tree] == [
        *[(None, None)] * 2,
        *[(0, 0)] * 2,
        (1, 1),
        (None, None),
    ]
    assert [(turn["reads"], turn["new"]) for turn in tree] == [(5, 5), (9, 2), (6, 4), (6, 0), (7, 1), (9, 1)]
    assert [turn["left_out"] for turn in tree] == [0, 0, 3, 5, 5, 5]
    assert [turn["reward"] for turn in tree] == [0.5, 1, 0, 2, 0, 3]
    assert [turn["value"] for turn in tree] == [0, 2, 3, 5, 6, 7]
    assert [turn["advantage"] for turn in tree] == pytest.approx([-0.1, 0.05, 0.2, 0.35, 0.45, 0.55])
    assert set(shown_responses(ppo_record(samples=[row | {"values": None}]), most_bytes=10**6)["prompts"][0]
               ["responses"][0]["tree"][0]) == {*tree[0]}  # fmt: skip


def test_cases_are_averaged_by_tokens_and_ratios_are_added():
    few, many = [0] * 41, [0] * 41
    few[20], many[0], many[40] = 1, 2, 1  # in the middle, and at both ends
    rows = [
        {"update": 1, "epochs": [epoch(few, [0] * 41, 0.0, {"raised": 1.0})]},
        {"update": 2, "epochs": [epoch(many, [0] * 41, 1 / 3, {"raised": 2 / 3, "raised_held": 1 / 3})]},
    ]
    found = clipping(ppo_record(details=rows))
    [whole] = found["whole"]
    assert (found["low"], found["high"]) == (0.8, 1.2)
    assert whole["tokens"] == 4
    assert whole["cases"]["raised"] == pytest.approx(0.75)
    assert whole["cases"]["raised_held"] == whole["clip_fraction"] == pytest.approx(0.25)
    assert whole["ratios"]["raised"][0] == 2
    assert [each["update"] for each in found["updates"]] == [1, 2]


def test_an_asymmetric_clip_has_its_own_bounds():
    config = {**CONFIG, "ppo": {**CONFIG["ppo"], "clip_range_high": 0.3}}
    found = clipping(ppo_record(config=config))
    assert (found["low"], found["high"]) == (0.8, 1.3)


def test_a_scheduled_clip_has_the_bounds_of_each_update():
    ratios = [0] * 41
    ratios[14] = 3  # log ρ from −0.32 to −0.27: below log 0.8 = −0.22, and above log 0.6 = −0.51
    rows = [{"update": n, "epochs": [epoch(ratios, [0] * 41, 0.0, {"raised": 1.0})]} for n in (1, 2)]
    measured = [{"update": n, "schedule/ppo.clip_range": clip} for n, clip in ((1, 0.2), (2, 0.4))]
    found = clipping(ppo_record(details=rows, metrics=measured))
    assert [(each["low"], each["high"]) for each in found["updates"]] == [(0.8, 1.2), (0.6, 1.4)]
    assert (found["low"], found["high"]) == (0.6, 1.4)


@pytest.mark.parametrize(("ratio", "whole"), [("sequence", "responses"), ("turn", "turns")])
def test_bounds_for_whole_responses_are_not_drawn_at_the_ratios_of_tokens(ratio, whole):
    config = {**CONFIG, "ppo": {**CONFIG["ppo"], "ratio": ratio, "clip_range": 3e-4, "clip_range_high": 4e-4}}
    found = clipping(ppo_record(config=config))
    assert (found["loss"], found["low"], found["high"]) == (f"clipped, by whole {whole}", 0.8, 1.2)


def test_the_frontier_is_over_the_root_of_the_kl_and_marks_the_judges_best():
    found = frontier(ppo_record())
    assert found["root_kl"] == [1, 2, 3, 4, 5]
    assert found["proxy"] == [1, 2, 3, 4, 5]
    [judge] = found["judges"]
    assert (judge["name"], judge["best"]) == ("gold", 2)


def test_a_kl_estimate_below_0_counts_as_0():
    assert frontier(ppo_record(metrics=[metric_row(1, **{"objective/kl": -0.3})]))["root_kl"] == [0]


def test_judges_outside_the_run_have_limits():
    points = [
        FrontierPoint(2, 4.0, 1.0, {"gold": {"value": 0.5, "low": 0.4, "high": 0.6}}),
        FrontierPoint(4, 9.0, 2.0, {"gold": {"value": 0.3, "low": 0.2, "high": 0.4}}),
    ]
    found = frontier(ppo_record(), points)
    assert found["root_kl"] == [2, 3]
    limits = {"low": [0.4, 0.2], "high": [0.6, 0.4]}
    assert found["judges"] == [{"name": "gold", "values": [0.5, 0.3], "best": 0, **limits}]


def test_costs_are_sums_and_the_rest_is_other():
    found = cost(ppo_record())
    assert found["phases"] == [
        {"phase": "rollout", "seconds": 10, "flops": 50},
        {"phase": "train", "seconds": 5, "flops": 150},
        {"phase": "other", "seconds": 5, "flops": None},
    ]
    assert (found["seconds"], found["updates"], found["sft_steps"]) == (20, 5, 7)
    assert found["peak"] == {"process": 2.5}
    assert found["roles"] == [{"role": "policy", "parameters": 10, "trained": True, "weights": 1, "optimizer": 2}]


def test_time_in_the_background_is_no_part_of_the_cost():
    """Of 4 s, an update waits 0.5 s for the responses that took 2 + 1.5 s during the one before."""
    rows = [metric_row(update, **{"time/reward": 1.5, "time/waiting_for_rollout": 0.5}) for update in range(1, 6)]
    found = cost(replace(ppo_record(), metrics=rows))
    assert {each["phase"]: each["seconds"] for each in found["phases"]} == {
        "waiting_for_rollout": 2.5,
        "rollout": 10,
        "reward": 7.5,
        "train": 5,
        "other": 12.5,
    }
    assert found["background"] == ["rollout", "reward"]
    parts = [each["seconds"] for each in found["phases"] if each["phase"] not in found["background"]]
    assert sum(parts) == found["seconds"] == 20
    assert cost(ppo_record())["background"] == []


def test_a_reward_models_scores_are_those_that_ppo_sees():
    found = reward_model(reward_record())
    chosen, rejected = found["scores"]["named"]
    # Scores of 1 to 21 and of −20 to 0, with the mean of 1 taken off, in units of 2.
    assert (chosen["median"], rejected["median"]) == (5, -5.5)
    assert sum(chosen["shares"]) == pytest.approx(1.0, abs=1e-3)  # of shares with five digits each
    assert found["scores"]["edges"][0] < -10.5 < 10 < found["scores"]["edges"][-1]
    assert found["accuracy"]["value"] == 0.75


def test_the_policys_scores_are_those_of_its_first_and_last_update():
    found = policy_scores(ppo_record())["scores"]
    assert [(each["name"], each["median"]) for each in found["named"]] == [("update 1", 11), ("update 5", 15)]


EMPTY = RunRecord(ppo_record().folder, facts={"stage": "ppo"})


SECTIONS = (
    partial(shown_responses, most_bytes=100),
    clipping,
    frontier,
    cost,
    reward_model,
    policy_scores,
    held_out,
    critic,
)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_without_data_says_why_unless_its_stage_has_none(section):
    assert section(EMPTY)["empty"].endswith(".") or section is reward_model
    assert section is cost or section(replace(EMPTY, facts={"stage": "sft"}))["empty"] == ""


EVALUATIONS = [
    {"update": update, "eval/score": score, "eval/win_rate": win_rate, "eval/score/gold": -score}
    for update, score, win_rate in ((0, 1.0, 0.5), (4, 3.0, 0.75), (8, 3.5, 0.75), (10, 0.25, math.nan))
]


def test_held_out_evaluations_with_the_best_one_marked():
    best = {"update": 8, "metric": "eval/score/gold", "value": -3.5}
    found = held_out(ppo_record(evaluations=EVALUATIONS, best=best, is_best_kept=True))
    assert [column["label"] for column in found["columns"]] == ["score", "win rate", "score/gold"]
    assert [row["values"] for row in found["rows"]][-1] == [0.25, None, -0.25]
    assert [row["update"] for row in found["rows"] if row["is_best"]] == [8]
    kept = "The best eval/score/gold is −3.5, after update 8. The checkpoint is kept: story@best is its model."
    assert found["sentence"] == kept


def answered(number: int, text: str, score: float | None) -> dict[str, Any]:
    return {"number": number, "prompt": f"prompt {number}", "completion": text, "score": score, "length": len(text)}


def test_responses_of_the_first_and_the_last_evaluation_are_side_by_side():
    first = [answered(0, "long and dull", 0.0), answered(1, "longer and duller", 0.0), answered(2, "lost", 1.0)]
    last = [answered(1, "brief", 1.0), answered(0, "short", 1.0), answered(3, "new", 0.0)]
    middle = [answered(number, "in between", 0.5) for number in range(4)]
    evaluations = [
        {"update": update, "eval/score": 0.5, "responses": rows}
        for update, rows in ((0, first), (4, middle), (8, last))
    ]
    found = held_out(ppo_record(evaluations=evaluations))
    assert found["pairs"] == [
        {"prompt": "prompt 1", "before": {"text": "longer and duller", "score": 0, "length": 17},
         "after": {"text": "brief", "score": 1, "length": 5}},
        {"prompt": "prompt 0", "before": {"text": "long and dull", "score": 0, "length": 13},
         "after": {"text": "short", "score": 1, "length": 5}},
    ]  # fmt: skip
    assert found["num_pairs"] == 2
    assert found["ends"] == ["at the start", "after update 8"]
    why = [{**row, "responses": [{**each, "reason": "so"} for each in row["responses"]]} for row in evaluations]
    assert {
        pair[side]["reason"] for pair in held_out(ppo_record(evaluations=why))["pairs"] for side in ("before", "after")
    } == {"so"}
    # 1 − (0.05/2)^(1/2): none and all of two prompts.
    assert found["sentence"].startswith(
        "The mean score on 2 held-out prompts is 1 (0.158 to 1) after update 8, and was 0 (0 to 0.842) at the start."
    )
    later = str(held_out(ppo_record(evaluations=evaluations[1:]))["sentence"])
    assert later.partition(". ")[0].endswith("after update 4")  # a resumed run may begin to evaluate
    unscored = [{**row, "responses": [{**each, "score": None} for each in row["responses"]]} for row in evaluations]
    found = held_out(ppo_record(evaluations=unscored))
    assert len(found["pairs"]) == 2
    assert found["sentence"].startswith("The best")
    assert held_out(ppo_record(evaluations=evaluations[:1]))["pairs"] == []


def test_without_a_marked_evaluation_the_first_with_the_best_win_rate_counts():
    found = held_out(ppo_record(evaluations=EVALUATIONS))
    assert found["sentence"] == "The best eval/win_rate is 0.75, after update 4. The checkpoint is not kept."


def test_of_many_evaluations_the_best_is_always_shown():
    many = [{"update": update, "eval/score": -abs(update - 33.0)} for update in range(400)]
    found = held_out(ppo_record(evaluations=many))
    assert [row["update"] for row in found["rows"] if row["is_best"]] == [33]
    assert (len(found["rows"]), found["left_out"]) == (41, 359)


def test_the_last_check_of_the_critic_is_shown_beside_a_group_baseline():
    found = critic(ppo_record(critic_checks=[critic_check(0, 0.0), critic_check(8, -0.25)]))
    assert found["sentence"].startswith("1,000 prefixes of responses to 32 prompts, about 8 continuations")
    assert found["sentence"].endswith("The prompt's mean return explains more of the returns than the critic does.")
    single = {**critic_check(0, 0.0), "num_prompts": 1, "num_prefixes": 1}
    sentence = critic(ppo_record(critic_checks=[single]))["sentence"]
    assert sentence.startswith("1 prefix of responses to 1 prompt, about 8 continuations")
    across, within = found["figures"][:2]
    assert (across["critic"], across["prompt_mean"]["value"], across["ceiling"]) == (across["prompt_mean"], 0.5, 0.875)
    assert (within["critic"], within["ceiling"], within["chance"]) == (None, None, 0.5)
    assert [row["update"] for row in found["rows"]] == [0, 8]
    assert found["bins"] == [{"value": 0.5, "low": 0.25, "high": 0.75, "at": 1, "count": 100}]
    assert len(found["points"]) == 300
    assert "better" not in critic(ppo_record(critic_checks=[critic_check(8, 0.0)]))["sentence"]


def test_why_a_run_ended_early_is_told():
    ended = ppo_record(summary={"ended": "the KL is -1"}, config={**CONFIG, "ppo": {"num_updates": 20}})
    beginning, *_, last = describe_run(ended)
    assert beginning.startswith("PPO ran 5 of 20 updates (")
    assert last == "It ended early: the KL is -1."


def finding(rule: str, severity: Severity, seen: str, field: str = "", direction: Direction = "switch") -> Finding:
    return Finding(rule, severity, seen, "m", field, direction, "t", "d.md")


def test_findings_of_one_cause_are_one_group_and_the_worst_comes_first():
    first = [
        finding("cap", "note", "40 tokens"),
        finding("drift", "warning", "KL -3 of 35", "ppo.kl_coef"),
        finding("hacking", "serious", "repeats", "ppo.kl_coef"),
    ]
    second = [finding("drift", "serious", "KL 90", "ppo.kl_coef"), finding("chance", "note", "accuracy 0.5; of 82")]
    third = [finding("length", "warning", "accuracy 0.5; longer 0.5")]
    found = {"a": first, "b": [*second, *third], "c": []}
    runs = [ReportedRun(name, ppo_record(), findings) for name, findings in found.items()]
    groups = page_data(runs, title="t")["findings"]
    assert [group["severity"] for group in groups] == ["serious", "warning", "note"]
    rules = [[(each["run"], each["rule"]) for each in group["findings"]] for group in groups]
    assert rules == [[(0, "hacking"), (1, "drift"), (0, "drift")], [(1, "length"), (1, "chance")], [(0, "cap")]]
    assert groups[0]["findings"][2]["seen"] == "KL -3 of 35"


def test_findings_that_move_a_field_in_opposite_directions_have_no_common_cause():
    """Also of one rule in two runs."""
    lower = finding("moved", "serious", "KL 1", "ppo.learning_rate", "too_high")
    raised = finding("moved", "warning", "KL 0", "ppo.learning_rate", "too_low")
    found = {"a": [lower], "b": [raised], "c": [finding("flat", "note", "0", "ppo.learning_rate", "too_low")]}
    runs = [ReportedRun(name, ppo_record(), findings) for name, findings in found.items()]
    groups = page_data(runs, title="t")["findings"]
    assert [[each["run"] for each in group["findings"]] for group in groups] == [[0], [1, 2]]


def test_a_run_without_metrics_still_has_a_page():
    found = page_data([ReportedRun("nothing", EMPTY)], title="nothing")
    assert found["runs"][0]["curves"]["update"] == []
    assert found["panels"] == {"ppo": []}


def test_runs_of_earlier_versions_have_every_section():
    newer = ("entropies", "new_logprobs", "fixed")
    row = {name: value for name, value in sample(1).items() if name not in newer}
    old = ppo_record(details=[], roles={}, samples=[row])
    [run] = page_data([ReportedRun("old", old)], title="old")["runs"]
    assert "details.jsonl" in run["clipping"]["empty"]
    assert run["samples"]["prompts"][0]["responses"][0]["tokens"]
    assert run["cost"]["roles"] == []


def test_a_page_of_many_long_runs_stays_small():
    rows = [metric_row(update) for update in range(1, 2001)]
    long = ppo_record(metrics=rows, samples=[sample(update, tokens=["word"] * 300) for update in range(1, 80)])
    runs = [ReportedRun(f"run {number}", long, []) for number in range(4)]
    data = page_data(runs, title="many", headlines=[{"label": "win rate", "value": 0.5, "low": 0.4, "high": 0.6}])
    assert len(json.dumps(data)) < 3_000_000
    assert data["headlines"][0]["low"] == 0.4


@pytest.mark.parametrize(
    ("stage", "update", "ending"),
    [
        ("evaluate", 0, "8 continuations of each."),
        ("evaluate", 6, "8 continuations of each, after update 6."),
        ("ppo", 0, "8 continuations of each, before the first update."),
    ],
)
def test_a_critic_that_is_no_run_of_ppos_was_checked_after_no_update(stage: str, update: int, ending: str):
    record = replace(ppo_record(), facts={"stage": stage}, critic_checks=[{**critic_check(update, 0.1), "gain": None}])
    assert critic(record)["sentence"].endswith(ending)
