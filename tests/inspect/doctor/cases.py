"""For each rule a synthetic run that it finds something in, and one just short of its threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kedge_inspect.record import RunRecord
from tests.inspect.doctor.synthetic import run_with, synthetic_run, towards

FUNCTION = [{"source": "mine.py:brief", "weight": 1.0, "name": None}]
JUDGED = [{"source": "runs/reward/model", "weight": 1.0}, {"source": "gold.py:gold", "weight": 0, "name": None}]
AHEAD = {"rollout.max_staleness": 1, "rollout.engine": "builtin"}
GROUPS = {"ppo.advantage": "grpo", "ppo.kl_in": "loss", "ppo.aggregation": "sequence", "rollout.num_responses": 8}
ADDS = {"ppo.advantage": "reinforce++_critic", "ppo.critic": "shared"}
TAUGHT = {"ppo.reference": "teacher", "reward": []}
"""A run that learns from a teacher alone."""
NO_SCORES = dict.fromkeys(("reward/score_mean", "reward/score_std", "reward/length_correlation", "score/model"))

TOOLS = {"episode/turns": 3.0, "tools/calls": 2.0}

CLOSE = {"policy/sampler_ratio_p01": 0.95, "policy/sampler_ratio_p99": 1.05,
         "policy/sampler_response_p01": 1.0, "policy/sampler_response_p99": 1.0}  # fmt: skip


class Case(NamedTuple):
    """A rule, the severity of its finding, a run that shows the problem, and one that just does not."""

    rule: str
    severity: str
    faulty: RunRecord
    healthy: RunRecord


def metrics(rule: str, severity: str, faulty: dict[str, Any], healthy: dict[str, Any], **common: Any) -> Case:
    """Two runs that differ in their metrics."""
    return Case(rule, severity, synthetic_run(metrics=faulty, **common), synthetic_run(metrics=healthy, **common))


def approached(left: float) -> dict[str, Any]:
    """The KL to a teacher, 2 nats per token at first, of which a share is left; and no scores."""
    return {"objective/kl": [40.0] * 8 + [40.0 * left] * 8, "response/length": [20.0] * 16, **NO_SCORES}


def spike(height: float) -> list[float]:
    return [height if update == 9 else 0.35 for update in range(16)]


def supervised(stage: str, **columns: Any) -> RunRecord:
    names = {"loss": "loss", "eval_loss": "eval/loss", "accuracy": "accuracy"}
    return run_with(40, {names[name]: column for name, column in columns.items()}, facts={"stage": stage})


def reward_model(value: float, length: float, *, error: float = 0.05, length_error: float = 0.0) -> RunRecord:
    rated = {"value": value, "low": value - error, "high": value + error}
    return run_with(
        40,
        {"loss": towards(0.7, 0.5), "accuracy": towards(0.5, 0.75)},
        facts={"stage": "reward"},
        summary={
            "accuracy": rated,
            "length_accuracy": {"value": length, "low": length - length_error},
            "num_pairs": 300,
        },
    )


def fitted_critic(value: float, error: float = 0.02, *, held_out: bool = True) -> RunRecord:
    return run_with(
        40,
        {"loss": towards(0.5, 0.3), "explained_variance": towards(0.1, 0.5)},
        facts={"stage": "critic"},
        summary={
            "explained_variance": {"value": value, "low": value - error, "high": value + error},
            "measured_on": "held-out prompts" if held_out else "training prompts",
        },
    )


def played(returns: Any = None, moved: Any = 0.01) -> RunRecord:
    """A control run of 40 updates."""
    learned = towards(20.0, 400.0) if returns is None else returns
    columns = {"episode/return_mean": learned, "policy/distance_moved": moved}
    settings = {"control.learning_rate": 3e-4, "control.policy_loss": "unclipped", "control.num_epochs": 10}
    return run_with(40, columns, facts={"stage": "control"}, settings=settings)


def hill(kept: float) -> Any:
    """Up to 400 in the middle of a run, then down to a share of the gain."""
    return lambda done: 20 + 380 * (min(1.0, 2 * done) if done < 0.5 else max(kept, 3 - 4 * done))


def dropped(count: int, reason: str = "prompt longer than data.max_prompt_tokens=512") -> RunRecord:
    """A run that could not use some of its 400 prompts."""
    usage = {"rows": 400, "used": 400 - count, "dropped": {reason: count} if count else {}}
    limits = {"data.max_prompt_tokens": 512, "data.truncate": "never"}
    return synthetic_run(data={"prompts": usage}, settings=limits)


def between(value: float, reach: float = 0.05) -> dict[str, float]:
    return {"value": value, "low": value - reach, "high": value + reach}


def checked(
    *,
    gain: float = 0.2,
    prompt: float = 0.3,
    across: float = 0.8,
    within: float = 0.7,
    ceiling: float = 0.8,
    update: int = 16,
) -> RunRecord:
    """A run whose critic was checked at the start and after an update."""
    figures = {"explained_variance": between(prompt + gain), "prompt_explained_variance": between(prompt)}
    pairs = {"pairs_across": between(across), "pairs_within": between(within), "ceiling_within": ceiling}
    rows = [
        {"update": at, "gain": between(gain if at else -0.5), "num_continuations": 8.0, **figures, **pairs}
        for at in (0, update)
    ]
    return synthetic_run(critic_checks=rows)


def nothing_held_out(accuracy: float, loss: float, *, steps: int = 40, batch_size: int = 32) -> RunRecord:
    """A reward model of which only the training figures are known."""
    return run_with(
        steps,
        {"loss": [loss] * steps, "accuracy": [accuracy] * steps},
        facts={"stage": "reward"},
        settings={"reward_model.batch_size": batch_size},
        summary={"num_comparisons": 1280},
    )


def held_out(*losses: float) -> list[float | None]:
    """A held-out loss measured five times in forty steps."""
    return [losses[step // 8] if step % 8 == 7 else None for step in range(40)]


MISMATCH = {"update": 3, "kind": "mismatch", "what": "a token's probabilities are 2 to 1", "consequence": "warn"}
DAMAGED = {"update": 5, "kind": "nonfinite", "what": "the score is nan", "consequence": "skip"}


def judged(stage: str, **figures: Any) -> RunRecord:
    """A finished evaluation or generate run with these figures."""
    config = {"evaluate": {"judge_mode": "pairwise", "num_prompts": 60}, "generate": {"temperature": 0.01}}
    return RunRecord(Path("runs") / stage, {"stage": stage}, config, summary=figures)


def rate(value: float, reach: float) -> dict[str, float]:
    return {"value": value, "low": value - reach, "high": value + reach}


def biased(contradicted: float) -> dict[str, float]:
    return {"first_rate": 0.5 + contradicted / 2, "contradicted": contradicted}


CASES = [
    metrics("rollout_too_old", "warning", {"policy/sampler_share": 0.49}, {"policy/sampler_share": 0.51},
            settings=AHEAD),
    metrics("rollout_too_old", "warning", {"policy/sampler_share": 0.9, "policy/sampler_truncated": 0.06},
            {"policy/sampler_share": 0.9, "policy/sampler_truncated": 0.04}, settings=AHEAD),
    metrics("rollout_too_old", "warning", {"policy/sampler_share": 0.9, "policy/sampler_masked": 0.51},
            {"policy/sampler_share": 0.9, "policy/sampler_masked": 0.49}, settings=AHEAD),
    metrics("sampler_ratios_wide", "warning", {"policy/sampler_ratio_p01": 0.48, "policy/sampler_ratio_p99": 1.1},
            {"policy/sampler_ratio_p01": 0.52, "policy/sampler_ratio_p99": 1.95}),
    metrics("sampler_ratios_wide", "warning", {"policy/sampler_ratio_p01": 0.9, "policy/sampler_ratio_p99": 2.05},
            {"policy/sampler_ratio_p01": 0.9, "policy/sampler_ratio_p99": [2.5] * 8 + [1.9] * 8}, settings=AHEAD),
    metrics("sampler_ratios_wide", "note", {**CLOSE, "policy/sampler_response_p01": 0.97, "response/length": 110.0},
            {**CLOSE, "policy/sampler_response_p01": 0.97, "response/length": 90.0}),
    metrics("sampler_ratios_wide", "note", {**CLOSE, "policy/sampler_response_p99": 1.03, "response/length": 200.0},
            {**CLOSE, "response/length": 200.0}),
    metrics("one_side_waits", "note", {"time/waiting_for_rollout": 0.7, "time/rollout_waiting": 0.0},
            {"time/waiting_for_rollout": 0.6, "time/rollout_waiting": 0.6}, settings=AHEAD),
    metrics("one_side_waits", "note", {"time/waiting_for_rollout": 0.0, "time/rollout_waiting": 0.7},
            {"time/waiting_for_rollout": 0.0, "time/rollout_waiting": 0.6}, settings=AHEAD),
    metrics(
        "sampler_trainer_mismatch",
        "serious",
        {"policy/sampler_ratio_max": [1.0] * 15 + [1.6], "policy/staleness": 0.0},
        {"policy/sampler_ratio_max": ([1.0] + [1.6] * 7) * 2, "policy/staleness": ([0.0] + [1.0] * 7) * 2},  # extended
        settings=AHEAD,
    ),
    metrics(  # sampling ahead until update 8, and no more from then on
        "sampler_trainer_mismatch",
        "serious",
        {"policy/sampler_ratio_max": [1.0] * 15 + [1.6], "policy/staleness": [0.0] + [1.0] * 7 + [0.0] * 8},
        {"policy/sampler_ratio_max": [1.0] + [1.6] * 7 + [1.0] * 8, "policy/staleness": [0.0] + [1.0] * 7 + [0.0] * 8},
    ),
    metrics(
        "sampler_trainer_mismatch",
        "serious",
        {"policy/first_ratio_max": [1.6] + [1.0] * 15, "policy/staleness": [0.0] + [1.0] * 15},
        {"policy/first_ratio_max": [1.0] + [1.6] * 15, "policy/staleness": [0.0] + [1.0] * 15},
        settings={**AHEAD, "ppo.old_logprobs": "sampler"},
    ),
    metrics(
        "sampler_trainer_mismatch",
        "serious",
        {"policy/first_ratio_max": [1.0] * 15 + [1.011]},
        {"policy/first_ratio_max": [1.009] * 16},
    ),
    metrics(
        "sampler_trainer_mismatch",
        "serious",
        {"policy/sampler_ratio_max": [1.0] * 15 + [2.1]},
        {"policy/sampler_ratio_max": [1.0] * 15 + [1.9]},
        facts={"precision": "bf16"},
    ),
    Case("sampler_trainer_mismatch", "serious", synthetic_run(incidents=[MISMATCH]), synthetic_run()),
    Case(
        "not_finite",
        "warning",
        synthetic_run(incidents=[DAMAGED]),
        synthetic_run(incidents=[{**DAMAGED, "kind": "spike"}]),
    ),
    Case("not_finite", "serious", synthetic_run(incidents=[{**DAMAGED, "consequence": "stop"}]), synthetic_run()),
    metrics(
        "reward_function_failing",
        "warning",
        {"reward/mine_failures": [0.0] * 15 + [1.0], "reward/mine_given_up": [0.0] * 15 + [100.0]},
        {"reward/mine_failures": 0.0, "reward/mine_given_up": 0.0},
    ),
    metrics(
        "reward_function_failing",
        "serious",
        {"reward/unscored": [13.0] * 16, "reward/mine_given_up": [13.0] * 16},
        {"reward/unscored": [13.0] * 16},
    ),
    metrics("tools_fail", "warning", {**TOOLS, "tools/failed": [0.6] * 16}, {**TOOLS, "tools/failed": [0.4] * 16}),
    metrics(  # calls are learned in the first, and in the second there is no result to learn from
        "tools_fail",
        "serious",
        {**TOOLS, "tools/failed": [1.0] * 16},
        {**TOOLS, "tools/failed": towards(1.0, 0.6)},
    ),
    metrics("tools_unused", "warning", {**TOOLS, "tools/calls": 0.0, "reward/score_mean": 0.9},
            {"episode/turns": 1.0, "reward/score_mean": 0.9}),
    metrics("tools_unused", "note", {**TOOLS, "tools/calls": 0.01}, {**TOOLS, "tools/calls": 0.1}),
    metrics("episodes_time_out", "warning", {"episode/turns": 3.0, "episode/timeout": [0.2] * 16},
            {"episode/turns": 3.0, "episode/timeout": [0.05] * 16}),
    metrics("answers_changed", "note", {"episode/turns": 4.0, "episode/changed": 1.0},
            {"episode/turns": 20.0, "episode/changed": 1.0}),
    metrics("answers_changed", "warning", {"episode/turns": 4.0, "episode/changed": 3.0}, {"episode/turns": 4.0}),
    metrics("responses_unscored", "note", {"reward/unscored": [20.0] * 16}, {"reward/unscored": [12.0] * 16}),
    metrics(
        "responses_unscored",
        "note",
        {"reward/unscored": [40.0] * 16, "group/sampled": [256.0] * 16},
        {"reward/unscored": [20.0] * 16, "group/sampled": [256.0] * 16},  # of several rounds of sampling
    ),
    metrics(
        "responses_unscored",
        "warning",
        {"reward/unscored": [80.0] * 16},
        {"reward/unscored": [80.0] * 16, "reward/mine_given_up": [80.0] * 16},
    ),
    metrics(
        "first_update_too_large",
        "note",
        {"policy/clip_fraction": [0.3] + [0.01] * 15},
        {"policy/clip_fraction": [0.01, 0.3] + [0.01] * 14},
    ),
    Case("rows_dropped", "note", dropped(20), dropped(19)),
    Case("rows_dropped", "warning", dropped(80), dropped(0)),
    metrics(
        "reward_flat",
        "serious",
        {"reward/score_std": 2e-3, "reward/score_mean": 2.2},
        {"reward/score_std": 3e-3, "reward/score_mean": 2.2},
    ),
    metrics(
        "reward_flat",
        "warning",
        {"reward/score_mean": towards(0.9, 1.03), "reward/score_std": [1.0] * 16},
        {"reward/score_mean": towards(0.9, 1.08), "reward/score_std": [1.0] * 16},
    ),
    metrics("groups_of_one", "serious", {"group/single": [1.0] * 16}, {"group/single": [0.5] * 16}, settings=GROUPS),
    metrics(
        "groups_without_spread",
        "warning",
        {"group/constant": towards(0.3, 0.95)},
        {"group/constant": towards(0.1, 0.45)},
        settings=GROUPS,
    ),
    Case(
        "groups_without_spread",
        "note",
        synthetic_run(metrics={"group/constant": towards(0.3, 0.7)}, settings=GROUPS),
        synthetic_run(metrics={"group/constant": towards(0.3, 0.7)}, settings={"rollout.num_responses": 8}),
    ),
    metrics(
        "group_std_blows_up",
        "warning",
        {"group/small_spread": [0.21] * 16},
        {"group/small_spread": [0.19] * 16},
        settings=GROUPS,
    ),
    metrics(  # the low-scored responses grow, alone or with the others
        "length_bias",
        "warning",
        {"group/length_below": towards(20.0, 30.0), "group/length_above": towards(20.0, 22.0)},
        {"group/length_below": towards(20.0, 30.0), "group/length_above": towards(20.0, 28.0)},
        settings=GROUPS,
    ),
    metrics("no_exploration", "serious", {"policy/entropy": [0.03] * 16, "reward/score_mean": 0.9},
            {"policy/entropy": [0.034] * 16, "reward/score_mean": 0.9}),
    metrics("duplicated_prompts", "warning", {"prompt/distinct": [0.75] * 16}, {"prompt/distinct": [0.85] * 16}),
    metrics("duplicated_prompts", "serious", {"prompt/distinct": [0.35] * 16}, {"prompt/distinct": [0.85] * 16}),
    metrics(  # a game has one prompt, and each episode its own seed
        "duplicated_prompts",
        "serious",
        {"prompt/distinct": [0.01] * 16},
        {"prompt/distinct": [0.01] * 16, "episode/turns": [3.0] * 16},
    ),
    metrics(  # the training prompts gain 1.06
        "prompts_memorized",
        "warning",
        {"eval/score": towards(0.9, 1.4)},
        {"eval/score": towards(0.9, 1.7)},
        settings={"ppo.eval_every": 1},
    ),
    metrics(
        "proxy_up_judge_down",
        "serious",
        {"score/gold": towards(0.6, 0.5)},
        {"score/gold": towards(0.5, 0.6)},
        settings={"reward": JUDGED},
    ),
    metrics(  # the judge gains 0.4 and loses 0.11 of it again, or 0.09
        "proxy_up_judge_down",
        "warning",
        {"score/gold": [0.4, 0.6, *[0.8] * 6, *[0.69] * 8]},
        {"score/gold": [0.4, 0.6, *[0.8] * 6, *[0.71] * 8]},
        settings={"reward": JUDGED},
    ),
    metrics(
        "hacking_by_length",
        "serious",
        {"response/length": towards(20.0, 37.0), "reward/length_correlation": [0.55] * 16},
        {"response/length": towards(20.0, 37.0), "reward/length_correlation": [0.45] * 16},
    ),
    metrics(
        "hacking_by_length",
        "warning",
        {"response/length": towards(20.0, 29.0), "reward/length_correlation": [0.55] * 16},
        {"response/length": towards(20.0, 27.0), "reward/length_correlation": [0.55] * 16},
    ),
    metrics(
        "hacking_by_length",
        "serious",
        {"response/length": towards(20.0, 7.0), "reward/length_correlation": [-0.55] * 16},
        {"response/length": towards(20.0, 13.0), "reward/length_correlation": [-0.55] * 16},
    ),
    metrics(
        "hacking_by_repetition",
        "serious",
        {"response/repetition": towards(0.02, 0.3)},
        {"response/repetition": towards(0.02, 0.1)},
    ),
    metrics(
        "hacking_by_not_stopping",
        "serious",
        {"response/eos_rate": towards(1.0, 0.6)},
        {"response/eos_rate": towards(1.0, 0.8)},
    ),
    metrics(
        "entropy_rising",
        "serious",
        {"policy/entropy": towards(0.2, 0.5)},
        {"policy/entropy": towards(0.2, 0.24)},
        settings={"ppo.entropy_coef": 0.01},
    ),
    metrics("entropy_rising", "warning", {"policy/entropy": towards(0.2, 0.5)}, {"policy/entropy": towards(0.2, 0.27)}),
    metrics(
        "beta_too_large",
        "serious",
        {"objective/kl_coef": [2.2] * 16, "reward/score_mean": towards(0.9, 1.2), "reward/score_std": [1.0] * 16},
        {"objective/kl_coef": [1.8] * 16, "reward/score_mean": towards(0.9, 1.2), "reward/score_std": [1.0] * 16},
        settings={"ppo.kl_coef": 2.2},
    ),
    metrics(
        "steps_too_small",
        "serious",
        {"policy/clip_fraction": 0.0, "policy/approx_kl": 8e-6, "objective/kl": 0.05, "reward/score_mean": 0.9},
        {"policy/clip_fraction": 0.0, "policy/approx_kl": 2e-5, "objective/kl": 0.05, "reward/score_mean": 0.9},
    ),
    metrics(
        "steps_too_large",
        "warning",
        {"policy/clip_fraction": towards(0.26, 0.01, 1.0)},
        {"policy/clip_fraction": towards(0.18, 0.01, 1.0)},
    ),
    metrics(
        "steps_too_large",
        "serious",
        {"policy/approx_kl": towards(0.25, 0.01, 1.0)},
        {"policy/approx_kl": towards(0.05, 0.01, 1.0)},
    ),
    metrics(
        "beta_too_small",
        "warning",
        {"objective/kl": towards(0.0, 8.0), "objective/kl_coef": [0.005] * 16},
        {"objective/kl": towards(0.0, 8.0), "objective/kl_coef": [0.007] * 16},
    ),
    metrics(
        "beta_too_small",
        "serious",
        {"objective/kl": towards(0.0, 18.0), "objective/kl_coef": 0.0},
        {"objective/kl": towards(0.0, 4.5), "objective/kl_coef": 0.0},
    ),
    metrics("kl_exploding", "warning", {"objective/kl": towards(0.0, 15.0)}, {"objective/kl": towards(0.0, 11.0)}),
    metrics("kl_exploding", "serious", {"objective/kl": towards(0.0, 30.0)}, {"objective/kl": towards(0.0, 11.0)}),
    metrics(
        "kl_exploding",
        "serious",
        {"objective/kl": towards(0.0, 15.0), "reward/total": towards(0.9, -0.3)},
        {"objective/kl": towards(0.0, 9.0), "reward/total": towards(0.9, -0.3)},
    ),
    metrics(
        "kl_exploding",
        "warning",
        {"objective/kl": towards(0.0, 12.0)},
        {"objective/kl": towards(0.0, 9.5)},
        settings={"ppo.kl_controller": {"ziegler": {"target": 3.0}}},
    ),
    metrics("teacher_not_approached", "warning", approached(0.95), approached(0.85), settings=TAUGHT),
    metrics("teacher_not_approached", "serious", approached(1.15), approached(0.5), settings=TAUGHT),
    metrics(
        "entropy_collapse",
        "warning",
        {"policy/entropy": [1.3] * 4 + [0.24] * 12, "response/length": [48.0] * 16},
        {"policy/entropy": [1.3] * 4 + [0.28] * 12, "response/length": [48.0] * 16},
    ),
    metrics(
        "entropy_collapse",
        "serious",
        {"policy/entropy": [1.3] * 4 + [0.12] * 12, "response/length": [48.0] * 16},
        {"policy/entropy": [1.3] * 4 + [0.28] * 12, "response/length": [48.0] * 16},
    ),
    metrics(
        "entropy_collapse",
        "warning",
        {"policy/entropy": [0.15] * 4 + [0.053] * 12, "response/length": [20.0] * 16},
        {"policy/entropy": [0.15] * 4 + [0.057] * 12, "response/length": [20.0] * 16},
    ),
    metrics(
        "entropy_collapse",
        "serious",
        {"policy/entropy": [0.3] * 4 + [0.15] * 12, "response/length": [20.0] * 4 + [7.0] * 12},
        {"policy/entropy": [0.3] * 4 + [0.18] * 12, "response/length": [20.0] * 4 + [7.0] * 12},
    ),
    metrics(
        "stops_at_once",
        "serious",
        {"response/length": [20.0] * 4 + [3.9] * 12},
        {"response/length": [20.0] * 4 + [4.1] * 12},
    ),
    metrics("too_few_eos", "serious", {"response/eos_rate": [0.08] * 16}, {"response/eos_rate": [0.55] * 16}),
    metrics("too_few_eos", "warning", {"response/eos_rate": [0.45] * 16}, {"response/eos_rate": [0.55] * 16}),
    metrics(
        "too_few_eos",
        "note",
        {"response/eos_rate": 0.0},
        {"response/eos_rate": [0.55] * 16},
        settings={"reward": FUNCTION},
    ),
    metrics("truncated_at_cap", "warning", {"response/eos_rate": [0.85] * 16}, {"response/eos_rate": [0.92] * 16}),
    metrics(
        "truncated_at_cap",
        "serious",
        {"response/eos_rate": [0.0] * 16},
        {"response/eos_rate": [0.92] * 16},
        settings={"rollout.missing_eos_score": "mask"},
    ),
    metrics(
        "value_scale_mismatch",
        "serious",
        {"value/std": [3.5] * 16, "value/returns_std": [1.0] * 16},
        {"value/std": [2.5] * 16, "value/returns_std": [1.0] * 16},
    ),
    metrics(
        "value_scale_mismatch",
        "serious",
        {"value/returns_std": [6.0] * 16},
        {"value/returns_std": [4.0] * 16},
        settings={"ppo.value_unit": "score"},
    ),
    metrics(
        "value_scale_mismatch",
        "serious",
        {"value/mean": [3.0] * 16, "value/returns_mean": [4.2] * 16, "value/returns_std": [1.0] * 16},
        {"value/mean": [3.0] * 16, "value/returns_mean": [3.8] * 16, "value/returns_std": [1.0] * 16},
        settings={"ppo.value_unit": "score"},
    ),
    metrics(
        "value_clip_binding", "warning", {"value/clip_fraction": [0.51] * 16}, {"value/clip_fraction": [0.49] * 16}),
    metrics(
        "dead_critic",
        "serious",
        {"value/mean": 0.0, "value/returns_mean": [1.1] * 16, "value/returns_std": [1.0] * 16},
        {"value/mean": 0.0, "value/returns_mean": [0.9] * 16, "value/returns_std": [1.0] * 16},
    ),
    metrics(
        "dead_critic",
        "serious",
        {"value/explained_variance": [-1.02] * 16},
        {"value/explained_variance": [0.06] * 16},
    ),
    metrics(
        "dead_critic",
        "serious",
        {"value/explained_variance": 0.0, "value/std": 1e-4},
        {"value/explained_variance": [0.06] * 16, "value/std": 1e-4},
    ),
    metrics(
        "dead_critic",
        "note",
        {"value/explained_variance": [-0.98] * 16},
        {"value/explained_variance": [0.06] * 16},
    ),
    metrics(
        "idle_critic",
        "note",
        {"advantage/variance_saved": [0.019] * 16, "advantage/critic_weight": [0.1] * 16},
        {"advantage/variance_saved": [0.021] * 16, "advantage/critic_weight": [0.1] * 16},
        settings=ADDS,
    ),
    metrics(
        "score_falling",
        "serious",
        {"reward/score_mean": towards(0.9, 0.3), "reward/score_std": [1.0] * 16},
        {"reward/score_mean": towards(0.9, 0.5), "reward/score_std": [1.0] * 16},
    ),
    metrics(
        "reward_saturated",
        "warning",
        {"reward/score_std": [1.0] * 4 + [0.08] * 12},
        {"reward/score_std": [1.0] * 4 + [0.12] * 12},
    ),
    metrics(
        "steps_skipped",
        "warning",
        {"guard/skipped_steps": [0.0] * 15 + [3.0]},
        {"guard/skipped_steps": 0.0},
    ),
    metrics("steps_skipped", "serious", {"guard/skipped_steps": [0.0] * 13 + [3.0] * 3}, {"guard/skipped_steps": 0.0}),
    metrics("gradient_spikes", "warning", {"policy/grad_norm": spike(3.0)}, {"policy/grad_norm": spike(2.5)}),
    metrics(
        "gradient_spikes",
        "warning",
        {"policy/grad_norm": [0.3 * 1.22**update for update in range(16)]},
        {"policy/grad_norm": [0.3 * 1.19**update for update in range(16)]},
    ),
    Case(
        "loss_rising",
        "serious",
        supervised("sft", loss=towards(2.0, 4.0)),
        supervised("sft", loss=towards(4.0, 2.0)),
    ),
    Case("reward_model_at_chance", "serious", reward_model(0.54, 0.4), reward_model(0.56, 0.4)),
    Case("reward_model_at_chance", "serious", nothing_held_out(0.5, 0.6931), nothing_held_out(0.6, 0.65)),
    Case("reward_model_barely_better_than_length", "warning", reward_model(0.68, 0.66), reward_model(0.68, 0.64)),
    Case("reward_model_barely_better_than_length", "serious", reward_model(0.62, 0.68), reward_model(0.68, 0.64)),
    Case("critic_explains_nothing", "serious", fitted_critic(0.02), fitted_critic(0.06)),
    Case("critic_explains_nothing", "warning", fitted_critic(0.02, 0.04), fitted_critic(0.02, held_out=False)),
    Case(
        "overfitting",
        "warning",
        supervised("sft", loss=towards(4.0, 1.0), eval_loss=held_out(1.5, 1.2, 1.0, 1.02, 1.05)),
        supervised("sft", loss=towards(4.0, 1.0), eval_loss=held_out(1.5, 1.2, 1.0, 1.01, 1.02)),
    ),
    Case(
        "overfitting",
        "serious",
        supervised("reward", loss=towards(0.7, 0.1), accuracy=0.7, eval_loss=held_out(0.6, 0.55, 0.5, 0.6, 0.7)),
        supervised("reward", loss=towards(0.7, 0.1), accuracy=0.7, eval_loss=held_out(0.6, 0.55, 0.5, 0.5, 0.51)),
    ),
    metrics(
        "memory_growing",
        "warning",
        {"memory/process": [1.0 + 0.02 * update for update in range(16)]},
        {"memory/process": [1.0 + 0.01 * update for update in range(16)]},
    ),
    metrics("reward_dominates_time", "warning", {"time/reward": [1.1] * 16, "time/update": [2.0] * 16},
            {"time/reward": [0.9] * 16, "time/update": [2.0] * 16}),
    *(
        Case(rule, severity, judged(stage, **faulty), judged(stage, **healthy))
        for rule, severity, stage, faulty, healthy in (
            ("judge_contradicts_itself", "warning", "evaluate", {"position_bias": biased(0.25)},
             {"position_bias": biased(0.24)}),
            ("judge_contradicts_itself", "serious", "evaluate", {"position_bias": biased(0.5)},
             {"position_bias": None}),
            ("unjudged_responses", "warning", "evaluate", {"num_prompts": 20, "num_judged": 18},
             {"num_prompts": 20, "num_judged": 19}),
            ("unjudged_responses", "serious", "generate", {"num_responses": 20, "num_scored": 10},
             {"num_responses": 20}),
            ("responses_cut_off", "warning", "generate", {"eos_rate": 0.49, "length": 60.0},
             {"eos_rate": 0.5, "length": 60.0}),
            ("responses_alike", "warning", "generate", {"num_distinct": 3, "num_prompts": 8},
             {"num_distinct": 3, "num_prompts": 7}),
            ("mostly_ties", "warning", "evaluate", {"tied": 10, "num_judged": 20}, {"tied": 9, "num_judged": 20}),
            ("mostly_ties", "warning", "evaluate", {"tied": 10, "num_judged": 20, "num_equal": 10},
             {"tied": 9, "num_judged": 20, "num_equal": 9}),
            ("judge_prefers_length", "note", "evaluate", {"longer_wins": rate(0.7, 0.1), "num_unequal_lengths": 20,
             "length": 9.0, "length_against": 7.0}, {"longer_wins": rate(0.69, 0.1), "num_unequal_lengths": 20}),
            ("judge_prefers_length", "note", "evaluate", {"longer_wins": rate(0.8, 0.1), "num_unequal_lengths": 20},
             {"longer_wins": rate(0.8, 0.1), "num_unequal_lengths": 19}),
            ("judge_prefers_length", "note", "evaluate", {"longer_wins": rate(0.8, 0.1), "num_unequal_lengths": 20},
             {"longer_wins": rate(0.8, 0.3), "num_unequal_lengths": 20}),
            ("win_rate_undecided", "note", "evaluate", {"win_rate": rate(0.6, 0.11), "num_judged": 60},
             {"win_rate": rate(0.6, 0.09), "num_judged": 60}),
        )
    ),
    Case("critic_worse_than_prompt_mean", "note", checked(gain=-0.06), checked(gain=-0.04)),
    Case("critic_worse_than_prompt_mean", "warning", checked(gain=-0.06, prompt=0.1), checked(gain=-0.04, prompt=0.1)),
    Case("critic_worse_than_prompt_mean", "serious", checked(gain=-0.06, across=0.54), checked(gain=-0.06, update=7)),
    Case("critic_blind_within_prompts", "note", checked(within=0.54), checked(within=0.56)),
    Case("critic_blind_within_prompts", "note", checked(within=0.54), checked(within=0.54, ceiling=0.59)),
    Case("updates_too_large", "warning", played(moved=0.2), played(moved=0.09)),
    Case("updates_too_large", "serious", played(moved=2.4), played(moved=0.09)),
    Case("return_collapsed", "serious", played(hill(0.2)), played(hill(0.6))),
    Case("return_flat", "warning", played(lambda done: 20.0), played()),
]  # fmt: skip
