"""Logs of other libraries as runs: who wrote them, units, conditions, and what the doctor makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kedge_base.errors import DataError
from kedge_inspect.abroad.runs import Origin, read_any_run
from kedge_inspect.abroad.settings import KEDGE_ONLY, counterparts, translate_settings
from kedge_inspect.abroad.trainers import TRAINERS
from kedge_inspect.diagnosis import diagnose_run, examine_run
from kedge_inspect.doctor.examine import examine
from kedge_inspect.live import has_run, serve_run
from kedge_inspect.page.verdict import describe_run
from kedge_inspect.record import RunRecord
from kedge_inspect.report import write_report
from tests.inspect.abroad.logs import BASELINES, GRPO, OPENRLHF, PPO, VERL, Row, over, write_args, write_state
from tests.inspect.doctor.cases import CASES

BY_KEY = {trainer.key: trainer for trainer in TRAINERS}


def lines(folder: Path, rows: list[Row]) -> Path:
    """JSON lines with steps."""
    file = folder / "run.jsonl"
    file.write_text("".join(json.dumps({"step": number, **row}) + "\n" for number, row in enumerate(rows, 1)))
    return file


def first(run: RunRecord) -> Row:
    return {name: pytest.approx(value) for name, value in run.metrics[0].items()}


def test_units_of_grpo(tmp_path: Path) -> None:
    run = read_any_run(write_state(tmp_path, over(9, GRPO)))
    assert run.trainer is BY_KEY["trl-grpo"]
    assert first(run) == {
        "update": 1,
        "reward/score_mean": 0.5,
        "reward/score_std": 0.4,
        "group/constant": 0.25,
        "objective/kl": 0.8,  # 0.02 per token × 40 tokens
        "policy/entropy": 0.5,
        "response/length": 40.0,
        "response/length_max": 60.0,
        "response/eos_rate": 0.75,
        "policy/grad_norm": 0.3,
        "policy/learning_rate": 1e-6,
    }


def test_settings_decide_what_a_name_means(tmp_path: Path) -> None:
    state = write_state(tmp_path, over(9, {**GRPO, "rewards/long/mean": 0.1, "rewards/long/std": 0.2}))
    assert not {"reward/score_std", "group/score_std", "policy/clip_fraction"} & set(read_any_run(state).metrics[0])
    write_args(tmp_path, importance_sampling_level="token", scale_rewards="group", beta=0.04)
    old = read_any_run(state).metrics[0]
    assert (old["group/score_std"], old["policy/clip_fraction"], old["objective/kl_coef"]) == (0.4, 0.01, 0.04)
    write_args(tmp_path, importance_sampling_level="sequence", scale_rewards="none", multi_objective_aggregation="x")
    new = read_any_run(state)
    assert new.metrics[0]["reward/score_std"] == 0.4
    assert not {"group/score_std", "policy/clip_fraction"} & set(new.metrics[0])
    assert new.setting("ppo.advantage") == "dr_grpo"


def test_grpo_and_rloo_are_told_apart_by_settings_or_by_the_model_card(tmp_path: Path) -> None:
    state = write_state(tmp_path, over(9, GRPO))
    (tmp_path / "README.md").write_text("This model was trained with RLOO, a method introduced in …")
    assert read_any_run(state).trainer is BY_KEY["trl-rloo"]
    write_args(tmp_path, scale_rewards="group")
    assert read_any_run(state).trainer is BY_KEY["trl-grpo"]
    assert read_any_run(state, origin=Origin("trl-rloo")).trainer is BY_KEY["trl-rloo"]


def test_reward_functions_that_are_not_trained_on_are_judges(tmp_path: Path) -> None:
    rows = over(9, {**GRPO, "rewards/gold/mean": 0.9, "rewards/gold/std": 0.2})
    assert read_any_run(write_state(tmp_path, rows)).judges == ["score/gold"]
    both = over(9, {**GRPO, "rewards/gold/mean": 0.5, "rewards/gold/std": 0.2})  # either may be the reward
    assert read_any_run(write_state(tmp_path, both)).judges == []


def test_units_of_ppo(tmp_path: Path) -> None:
    rows = over(
        9, PPO, episode=lambda number: 64 * (number + 1), objective__scores=lambda number: 0.5 + 0.1 * (number % 2)
    )
    write_args(write_state(tmp_path, rows), stop_token="eos", local_batch_size=64, num_ppo_epochs=4, response_length=53)
    run = read_any_run(tmp_path)
    # Steps of 0.1 in means of 64: a standard deviation of 0.1 × 1.4826 / √2 × √64.
    assert first(run) == {
        "update": 1,
        "reward/score_mean": 0.5,
        "reward/score_std": 0.8387,
        "reward/total": 0.4,
        "reward/kl": 0.1,
        "objective/kl": 2.0,
        "objective/kl_coef": 0.05,
        "response/entropy": 20.0,
        "policy/entropy": 0.6,
        "policy/approx_kl": 0.01,
        "policy/clip_fraction": 0.02,
        "value/loss": 0.1,
        "policy/learning_rate": 1e-5,
        "response/eos_rate": 0.75,
    } | {"reward/score_std": pytest.approx(0.8387, rel=1e-3)}
    assert run.setting("ppo.num_epochs") == 4


@pytest.mark.parametrize(("counts", "expected"), [(0, 0.0), (48, None)])
def test_stop_tokens_are_counted_only_where_a_response_has_at_most_one(
    counts: int, expected: float | None, tmp_path: Path
) -> None:
    run = read_any_run(write_state(tmp_path, over(9, {**PPO, "val/num_eos_tokens": counts})))
    assert run.metrics[0].get("response/eos_rate") == expected


def test_units_of_verl(tmp_path: Path) -> None:
    file = lines(tmp_path, over(9, {**VERL, "actor/reward_kl_penalty": 0.002, "actor/reward_kl_penalty_coeff": 0.001}))
    run = read_any_run(file)
    assert run.trainer is BY_KEY["verl"]
    assert first(run) == {
        "update": 1,
        "reward/score_mean": 0.5,
        "reward/total": 0.4,
        "policy/approx_kl": 0.001,
        "policy/clip_fraction": 0.01,
        "policy/loss": 0.1,
        "policy/grad_norm": 0.2,
        "objective/kl": 0.6,  # 0.002 per token × 300 tokens
        "objective/kl_coef": 0.001,
        "response/length": 300.0,
        "response/length_max": 512.0,
        "response/eos_rate": 0.75,
    }
    assert run.setting("ppo.critic") == "none"
    (tmp_path / "config.yml").write_text("actor_rollout_ref: {actor: {loss_agg_mode: token-mean, optim: {lr: 1.0e-6}}}")
    known = read_any_run(file, origin=Origin(settings=tmp_path / "config.yml"))
    assert known.metrics[0]["policy/entropy"] == 0.7
    assert known.setting("ppo.learning_rate") == 1e-6


def test_units_of_openrlhf_and_of_stable_baselines(tmp_path: Path) -> None:
    run = read_any_run(lines(tmp_path, [{f"train/{name}": value for name, value in OPENRLHF.items()}] * 9))
    assert run.trainer is BY_KEY["openrlhf"]
    assert (run.metrics[0]["objective/kl"], run.metrics[0]["response/eos_rate"]) == (2.0, 0.9)
    control = read_any_run(lines(tmp_path, over(9, BASELINES, time__iterations=lambda number: number + 1)))
    assert control.stage == "control"
    assert control.metrics[1]["update"] == 2
    assert control.metrics[1]["policy/entropy"] == 0.6


def test_without_its_rules_control_is_not_judged_by_those_for_language_models(tmp_path: Path) -> None:
    run = read_any_run(lines(tmp_path, over(20, {**BASELINES, "train/clip_fraction": 0.5})))
    examination = examine(replace(run, facts={"stage": "elsewhere"}))
    assert (examination.findings, examination.num_checks) == ((), 0)


def test_a_configuration_of_others_does_not_make_a_folder_a_run_of_kedge(tmp_path: Path) -> None:
    write_state(tmp_path, over(9, GRPO))
    for folder in (tmp_path, tmp_path / "files", tmp_path / ".hydra"):
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text("learning_rate: 1\n")
    [run] = examine_run(tmp_path)
    assert run == str(tmp_path)
    assert read_any_run(tmp_path).trainer is BY_KEY["trl-grpo"]
    assert "TRL's GRPO" in write_report([tmp_path]).read_text(encoding="utf-8")


def test_names_with_prefixes_of_transformers(tmp_path: Path) -> None:
    rows: list[Row] = [{"train/loss": 2.0, "train/mean_token_accuracy": 0.5, "eval/loss": 3.0}] * 9
    run = read_any_run(lines(tmp_path, rows))
    assert run.trainer is BY_KEY["trl-sft"]
    assert run.metrics[0] == {"update": 1, "loss": 2.0, "eval/loss": 3.0, "token_accuracy": 0.5}


def test_held_out_accuracy_has_the_interval_of_its_pairs(tmp_path: Path) -> None:
    held_out = {"eval_accuracy": 0.5, "eval_loss": 0.69, "eval_runtime": 2.0, "eval_samples_per_second": 50.0}
    rows: list[Row] = [{"loss": 0.7, "mean_reward": 0.0, "margin": 0.1, "accuracy": 0.5}] * 20
    run = read_any_run(write_state(tmp_path, [*rows, held_out]))
    assert run.summary["num_pairs"] == 100
    assert 0.39 < run.summary["accuracy"]["low"] < 0.42
    assert [finding.rule for finding in diagnose_run(tmp_path)] == ["reward_model_at_chance"]


def test_a_log_that_does_not_say_who_wrote_it_needs_the_library(tmp_path: Path) -> None:
    state = write_state(tmp_path, [{"loss": 1.0, "grad_norm": 0.1}] * 9)
    with pytest.raises(DataError, match="do not say what wrote it; say it with --library: trl-ppo, "):
        read_any_run(state)
    assert read_any_run(state, origin=Origin("trl-sft")).stage == "sft"
    with pytest.raises(DataError, match="no library 'x'; choose one of trl-ppo"):
        read_any_run(state, origin=Origin("x"))
    with pytest.raises(DataError, match=r"--library: trl-ppo, .*, trl-sft$"):
        read_any_run(state, origin=Origin("trl"))


def test_what_the_log_lacks_is_said(tmp_path: Path) -> None:
    [examination] = examine_run(write_state(tmp_path, over(20, GRPO))).values()
    assert "need " in examination.verdict
    needs = {gap.rule: gap.why for gap in examination.gaps}
    assert needs["hacking_by_length"] == "it needs reward/length_correlation"
    assert needs["beta_too_small"] == "β is not known"


def test_a_beta_of_0_is_known_though_its_kl_is_not_logged(tmp_path: Path) -> None:
    write_args(write_state(tmp_path, over(20, GRPO, kl=lambda number: None)), beta=0.0)
    [examination] = examine_run(tmp_path).values()
    assert "β is not known" not in examination.verdict


def test_rows_without_the_metrics_do_not_count_as_updates_of_a_rule(tmp_path: Path) -> None:
    """With TRL's `num_iterations` or `steps_per_generation`, most steps log no score."""
    rows = over(32, GRPO, reward=lambda number: 0.5 if number % 4 == 1 else None)
    [examination] = examine_run(write_state(tmp_path, rows)).values()
    assert "updates with their metrics, and the log has fewer" in examination.verdict
    assert "and the run has 32" not in examination.verdict


def test_masked_responses_have_no_entropy(tmp_path: Path) -> None:
    """TRL logs 0 where `mask_truncated_completions` leaves no token."""
    rows = over(9, GRPO, entropy=lambda number: 0.0, **{"completions/clipped_ratio": lambda number: 1.0})
    assert read_any_run(write_state(tmp_path, rows)).metrics[0]["policy/entropy"] == 0.0
    write_args(tmp_path, mask_truncated_completions=True)
    assert "policy/entropy" not in read_any_run(tmp_path).metrics[0]


def test_a_reward_that_reads_messages_is_not_blamed_in_a_run_of_trl(tmp_path: Path) -> None:
    rows = over(20, GRPO, reward_std=lambda number: 0.0, **{"rewards/right/std": lambda number: 0.0})
    write_args(write_state(tmp_path, rows), multi_objective_aggregation="sum_then_normalize")
    [flat] = [finding for finding in diagnose_run(tmp_path) if finding.rule == "reward_flat"]
    assert flat.try_.startswith("check the reward: it gives every response the same score")
    assert "content" not in flat.try_


def test_held_out_accuracy_that_the_log_lacks_is_not_promised(tmp_path: Path) -> None:
    rows = [{"loss": 0.6, "accuracy": 0.6, "margin": 0.1, "grad_norm": 0.3}] * 20
    [examination] = examine_run(write_state(tmp_path, rows), origin=Origin("trl-reward")).values()
    assert "1 needs eval/loss; 1 because there is no held-out accuracy so far" in examination.verdict


def test_a_finished_run_is_told_from_one_that_was_stopped(tmp_path: Path) -> None:
    assert read_any_run(write_state(tmp_path, over(9, GRPO))).state == "finished"
    assert read_any_run(write_state(tmp_path, over(9, GRPO), total=100)).state == "running"


def test_steps_that_share_a_generation_or_a_row_of_the_log_are_counted_right(tmp_path: Path) -> None:
    """40 steps, 10 logged; 4 steps of 2 passes on each of the generations, twice: 5 generations of 32 responses."""
    rows = over(10, {**GRPO, "step_time": 0.5})
    state = write_state(tmp_path, [{**row, "step": 4 * number} for number, row in enumerate(rows, 1)], total=40)
    sizes = {"generation_batch_size": 32, "num_generations": 4}
    write_args(state, gradient_accumulation_steps=2, steps_per_generation=8, num_iterations=2, **sizes)
    assert describe_run(read_any_run(state))[0].startswith("TRL's GRPO ran 40 updates (20 s, 160 responses): ")


def test_what_a_file_of_settings_leaves_out_has_trls_default(tmp_path: Path) -> None:
    state = write_state(tmp_path, over(40, {**GRPO, "step_time": 0.5}), total=40)
    settings = tmp_path / "settings.yaml"
    settings.write_text("steps_per_generation: 8\ngeneration_batch_size: 32\nnum_generations: 4\n")
    run = read_any_run(state, origin=Origin(settings=settings))
    assert describe_run(run)[0].startswith("TRL's GRPO ran 40 updates (20 s, 160 responses): ")


def test_a_log_without_times_says_none(tmp_path: Path) -> None:
    state = write_state(tmp_path, [{"loss": 2.0, "mean_token_accuracy": 0.5}] * 9)
    assert describe_run(read_any_run(state))[0].startswith("TRL's SFT ran 9 steps: ")


def test_report_and_live_page(tmp_path: Path) -> None:
    state = write_state(tmp_path, over(20, GRPO))
    page = write_report([state]).read_text(encoding="utf-8")
    assert "TRL's GRPO" in page
    assert write_report([state / "trainer_state.json"]) == tmp_path / "report.html"
    assert has_run(state)
    with serve_run(state) as server:
        assert server.url.startswith("http://127.0.0.1")


@pytest.mark.parametrize("trainer", [each for each in TRAINERS if each.stage != "control"], ids=lambda each: each.key)
def test_advice_names_no_setting_of_kedge(trainer: Any) -> None:
    own = {each.argument for each in counterparts(trainer)}
    for case in CASES:
        if case.faulty.stage != trainer.stage:
            continue
        for finding in examine(replace(case.faulty, trainer=trainer)).findings:
            words = [word for word in finding.try_.split() if word not in own]
            assert not KEDGE_ONLY.search(" ".join(words)), (finding.rule, finding.try_)


def test_advice_has_the_values_of_the_run(tmp_path: Path) -> None:
    rows = over(20, GRPO, entropy=lambda number: 0.5 if number < 4 else 0.005)
    write_args(write_state(tmp_path, rows), learning_rate=1e-5, scale_rewards="group", entropy_coef=0.0)
    [found] = [finding for finding in diagnose_run(tmp_path) if finding.rule == "entropy_collapse"]
    assert found.try_ == "lower learning_rate from 1e-05 to 3.3e-06; set entropy_coef=0.001; set epsilon_high=0.28"


@pytest.mark.parametrize(("known", "expected"), [({}, True), ({"kl": None}, False)])
def test_a_higher_rate_is_advised_only_where_the_log_shows_small_steps(
    known: Row, expected: bool, tmp_path: Path
) -> None:
    state = write_state(tmp_path, over(20, {**GRPO, "kl": 1e-4, **known}))
    write_args(tmp_path, learning_rate=1e-6, scale_rewards="group")
    [found] = [each for each in diagnose_run(state) if each.rule == "reward_flat"]
    assert ("raise learning_rate" in found.try_) == expected


@pytest.mark.parametrize(("gain", "severity"), [(0.0, "serious"), (0.02, "note")])
def test_an_entropy_that_falls_while_the_score_rises_is_a_note(gain: float, severity: str, tmp_path: Path) -> None:
    rows = over(
        20,
        {**GRPO, "frac_reward_zero_std": 0.6},
        entropy=lambda number: 0.5 if number < 4 else 0.01,
        reward=lambda number: 0.5 + gain * number + 0.001 * (-1) ** number,
    )
    [found] = [each for each in diagnose_run(write_state(tmp_path, rows)) if each.rule == "entropy_collapse"]
    assert found.severity == severity


def test_a_number_in_another_unit_is_not_advised() -> None:
    settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-5, "num_generations": 8, "epsilon": 0.2}
    config = translate_settings(BY_KEY["trl-grpo"], settings, {})
    assert config["rollout"] == {"num_responses": 8}
    assert config["ppo"]["clip_range"] == 0.2


@pytest.mark.parametrize(("turns", "is_episode"), [(2.0, False), (5.0, True)])
def test_a_response_without_tools_is_no_episode_of_verl(turns: float, is_episode: bool, tmp_path: Path) -> None:
    """Its count of turns contains the prompt."""
    run = read_any_run(lines(tmp_path, over(16, {**VERL, "response_length/clip_ratio": 0.4, "num_turns/mean": turns})))
    assert run.metrics[0].get("episode/turns") == (2.5 if is_episode else None)
    assert "truncated_at_cap" in [each.rule for each in examine(run).findings]


@pytest.mark.parametrize(
    ("calls", "failed", "rule", "advised"),
    [
        (2.0, 0.97, "tools_fail", "read the errors among the samples; mend the tools or their docstrings"),
        (0.0, 0.0, "tools_unused", "show a call in the prompts"),
    ],
)
def test_calls_of_tools_in_trl(calls: float, failed: float, rule: str, advised: str, tmp_path: Path) -> None:
    row = {**GRPO, "tools/call_frequency": calls, "tools/failure_frequency": failed}
    [found] = [each for each in diagnose_run(write_state(tmp_path, over(16, row))) if each.rule.startswith("tools")]
    assert found.rule == rule
    assert found.try_.startswith(advised)
    assert "(" not in found.try_


def test_a_score_that_rises_on_the_training_prompts_alone_is_found_in_trl(tmp_path: Path) -> None:
    settings = tmp_path / "args.yaml"
    settings.write_text("multi_objective_aggregation: sum_then_normalize")
    rows = over(16, GRPO, reward=lambda number: 0.2 + 0.05 * number, eval_reward=lambda number: 0.2)
    for shown, expected in (rows, True), ([{**row, "eval_reward": row["reward"]} for row in rows], False):
        run = read_any_run(lines(tmp_path, shown), origin=Origin(settings=settings))
        assert ("prompts_memorized" in [each.rule for each in examine(run).findings]) == expected


def test_evaluations_between_the_rows_of_the_training_score(tmp_path: Path) -> None:
    rows = over(100, {}, reward=lambda number: number / 100 if number % 4 == 3 else None)
    for number in range(1, 100, 2):
        rows[number - 1]["eval_reward"] = min(number, 100 - number) / 50
    settings = tmp_path / "args.yaml"
    settings.write_text("multi_objective_aggregation: sum_then_normalize")
    run = read_any_run(lines(tmp_path, rows), origin=Origin("trl-grpo", settings))
    assert "proxy_up_judge_down" in [each.rule for each in examine(run).findings]


@pytest.mark.parametrize(
    ("settings", "clipped", "found", "unjudged"),
    [
        ("", 0.0, False, True),  # a single step or a frozen policy
        ("", 0.01, False, False),
        ("actor_rollout_ref: {actor: {ppo_epochs: 2}}", 0.0, True, False),
    ],
)
def test_ratios_of_one_do_not_show_that_the_policy_stands_still(
    settings: str, clipped: float, found: bool, unjudged: bool, tmp_path: Path
) -> None:
    rows = over(16, {**VERL, "actor/pg_clipfrac": clipped, "actor/ppo_kl": clipped / 10})
    (tmp_path / "config.yaml").write_text(settings or "trainer: {nnodes: 1}")
    examined = examine(read_any_run(lines(tmp_path, rows), origin=Origin(settings=tmp_path / "config.yaml")))
    assert ("steps_too_small" in [each.rule for each in examined.findings]) == found
    assert ("steps_too_small" in [each.rule for each in examined.gaps]) == unjudged


def test_a_temperature_of_1_is_raised_by_less_than_a_whole_number() -> None:
    config = translate_settings(BY_KEY["trl-grpo"], {"temperature": 1, "num_generations": 8}, {})
    assert isinstance(config["rollout"]["temperature"], float)
    assert isinstance(config["rollout"]["num_responses"], int)


def test_advice_on_a_reward_model_whose_last_row_is_an_evaluation(tmp_path: Path) -> None:
    row = {"loss": 0.6, "accuracy": 0.6, "mean_reward": 0.1, "margin": 0.1}
    rows = [*over(16, row, eval_loss=lambda number: 0.5 + 0.02 * number), {"step": 20, "eval_loss": 0.9}]
    write_args(write_state(tmp_path, rows), learning_rate=1e-4, num_train_epochs=2, max_steps=None)
    [found] = [each for each in diagnose_run(tmp_path) if each.rule == "overfitting"]
    assert found.try_ == (
        "train on more data; lower num_train_epochs from 2 to 1; lower learning_rate from 0.0001 to 3.3e-05"
    )


@pytest.mark.parametrize(
    ("in_reward", "in_loss", "coefficient", "named"),
    [
        (True, False, 0.02, "algorithm.kl_ctrl.kl_coef from 0.02 to 0.06"),
        (False, True, 0.001, "actor_rollout_ref.actor.kl_loss_coef from 0.001 to 0.003"),
        (False, False, 0.0, ""),
    ],
)
def test_the_weight_of_the_kl_that_verl_uses(
    in_reward: bool, in_loss: bool, coefficient: float, named: str, tmp_path: Path
) -> None:
    """Its configuration always has both, with defaults."""
    actor = {"use_kl_loss": in_loss, "kl_loss_coef": 0.001, "ppo_mini_batch_size": 64, "ppo_epochs": 1}
    algorithm = {"use_kl_in_reward": in_reward, "kl_ctrl": {"kl_coef": 0.02}, "adv_estimator": "grpo"}
    settings = {"actor_rollout_ref": {"actor": actor}, "algorithm": algorithm, "data": {"train_batch_size": 256}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    changes = {"critic/score/mean": lambda number: 0.05 * number,
               "response_length/clip_ratio": lambda number: 0.1 + 0.05 * number}  # fmt: skip
    rows = over(16, VERL, **changes)
    run = read_any_run(lines(tmp_path, rows), origin=Origin(settings=tmp_path / "config.yaml"))
    assert (run.setting("ppo.kl_coef"), run.setting("ppo.num_minibatches")) == (coefficient, 4)
    [found] = [each for each in examine(run).findings if each.rule == "hacking_by_not_stopping"]
    assert found.try_ == "score every response without a stop token below every response with one" + (
        f"; raise {named}" if named else ""
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"algo": {"advantage": {"estimator": "group_norm"}, "kl": {"use_loss": True, "init_coef": 0.001}}},
        {"advantage_estimator": "group_norm", "use_kl_loss": True, "init_kl_coef": 0.001},
    ],
)
def test_both_spellings_of_openrlhfs_arguments(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text(json.dumps(settings))
    run = read_any_run(lines(tmp_path, over(9, OPENRLHF)), origin=Origin("openrlhf", tmp_path / "args.yaml"))
    found = [run.setting(f"ppo.{name}") for name in ("advantage", "kl_in", "kl_coef")]
    assert found == ["grpo", "loss", 0.001]


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ("", "raise learning_rate; raise max_epochs"),
        (
            '{"learning_rate": 1e-05, "max_epochs": 1}',
            "raise learning_rate from 1e-05 to 3e-05; raise max_epochs from 1",
        ),
        ("adam: {lr: 1e-5}", "raise adam.lr from 1e-05 to 3e-05; raise max_epochs"),
    ],
)
def test_advice_on_openrlhfs_reward_model(settings: str, advised: str, tmp_path: Path) -> None:
    """Its script has no arguments of the actor, and a rate without a decimal point is a number."""
    row = {"train/loss": 0.69, "train/acc": 0.5, "train/chosen_reward": 0.1, "train/reject_reward": 0.1}
    rows = [{**row, "eval/acc_mean": 0.52, "train/global_step": number} for number in range(1, 21)]
    (tmp_path / "args.yaml").write_text(settings or "seed: 1")
    run = read_any_run(lines(tmp_path, rows), origin=Origin("openrlhf-reward", tmp_path / "args.yaml"))
    [found] = [each for each in examine(run).findings if each.rule == "reward_model_at_chance"]
    assert advised in found.try_
    assert found.seen.endswith("; on held-out pairs accuracy is 52.0%")


@pytest.mark.parametrize(
    ("batch", "mini", "minibatches"),
    [
        (256, 64, 4),
        (256, None, None),
        (256, 0, None),
        (256, "${data.train_batch_size}", None),
        ("${batch}", 64, None),
        (128, 256, None),
        (10**400, 64, None),
    ],
)
def test_settings_of_verl_that_are_no_usable_numbers_are_left_out(
    batch: Any, mini: Any, minibatches: int | None, tmp_path: Path
) -> None:
    actor = {"ppo_mini_batch_size": mini, "optim": {"lr": float("nan")}, "clip_ratio": "2e-1"}
    settings = {"data": {"train_batch_size": batch}, "actor_rollout_ref": {"actor": actor}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**settings, "hash": "12e45678", "version": "1.2.3e5"}))
    run = read_any_run(lines(tmp_path, over(16, VERL)), origin=Origin(settings=tmp_path / "config.yaml"))
    assert run.setting("ppo.num_minibatches") == minibatches
    assert run.setting("ppo.learning_rate") is None
    assert run.setting("ppo.clip_range") == 0.2
    assert [run.arguments[name] for name in ("hash", "version")] == ["12e45678", "1.2.3e5"]
