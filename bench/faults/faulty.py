"""At least one faulty run for each of the doctor's rules."""

from __future__ import annotations

from typing import Final

from bench.faults import bugs, tools
from bench.faults.base import IN_GROUPS, SHARED
from bench.faults.case import TASKS, Case, function, monitored, reward_model, sft_policy, untrained
from bench.faults.changes import eos_masked_policy, few, longer_preferred, random_labels, some_too_long
from kedge_lab.demo import recipe

AGGRESSIVE: Final = {"ppo.kl_coef": 0.05, "ppo.learning_rate": 1e-3, "ppo.schedule": "constant", "ppo.num_updates": 20}
"""A policy with the freedom and the time to find out what the reward pays for."""

HOT_HEAD: Final = {**SHARED, "ppo.value_head_rate": 900.0, "ppo.value_clip_range": None}
"""The policy's steps are sound; the values jump in the first update and come back later."""

DISTILLED: Final = {
    "ppo.advantage": "to_go",
    "ppo.gamma": 0.0,
    "ppo.kl_coef": 1.0,
    "ppo.policy_loss": "unclipped",
    "ppo.num_epochs": 1,
    "ppo.whiten_advantages": False,
    "ppo.value_gae_lambda": None,
    "ppo.num_updates": 16,
}
"""As the preset `distill`."""

BY_HEART: Final = {
    "ppo.kl_in": "loss",
    "ppo.kl_coef": 0.01,
    "ppo.learning_rate": 1e-3,
    "ppo.schedule": "constant",
    "ppo.num_updates": 24,
    "ppo.eval_every": 2,
    "rollout.missing_eos_score": -2.0,
    "ppo.eval_num_prompts": 48,
    "data.eval_fraction": 0.75,
}
"""Many passes over sixteen prompts, of which three times as many are held out."""

CHECKED: Final = {"ppo.critic_check": 12}
"""The critic's values are held against fresh continuations, at the start and at the end."""

RATES: Final = tuple(
    Case(
        f"learning rate × {factor:,}{task}",
        "steps_too_large",
        {"ppo.learning_rate": factor * recipe.SETTINGS["ppo.learning_rate"]},
        reward,
        critic=critic,
    )
    for factor in (10, 1_000)
    for task, reward, critic in TASKS
)

SAMPLER: Final = (
    Case("sampler weights up to 3 updates old, not recorded", "sampler_trainer_mismatch", bug=bugs.stale_sampler),
    Case(
        "4 updates ahead, learning rate × 10",
        "rollout_too_old",
        {"rollout.max_staleness": 4, "ppo.learning_rate": 3e-3},
    ),
    Case(
        "2 updates ahead, learning rate × 5",
        "sampler_ratios_wide",
        {"rollout.max_staleness": 2, "ppo.learning_rate": 1.5e-3},
    ),
    Case(
        "one step off, sampling row by row",
        "one_side_waits",
        {"rollout.max_staleness": 1, "rollout.micro_batch_size": 1},
    ),
    Case("trainer ignores the temperature", "sampler_trainer_mismatch", bug=bugs.temperature_ignored),
    Case("logprobs shifted by one token", "sampler_trainer_mismatch", bug=bugs.off_by_one),
    Case("dropout active in training", "sampler_trainer_mismatch", bug=bugs.dropout_on),
)

KL: Final = (
    Case(
        "teacher, learning rate / 1000",
        "teacher_not_approached",
        {**DISTILLED, "ppo.learning_rate": 3e-7},
        start=untrained,
        teacher=sft_policy,
    ),
    Case("β × 500", "beta_too_large", {"ppo.kl_coef": 50.0}),
    Case("β / 1000, learning rate × 3", "beta_too_small", {**AGGRESSIVE, "ppo.kl_coef": 1e-4}),
    Case(
        "KL sign flipped, β × 10, learning rate × 3",
        "kl_exploding",
        {**AGGRESSIVE, "ppo.kl_coef": 1.0},
        bug=bugs.kl_sign_flipped,
    ),
)

EXPLORATION: Final = (
    Case("temperature 0.01", "no_exploration", {"rollout.temperature": 0.01}),
    Case("entropy coefficient 1", "entropy_rising", {"ppo.entropy_coef": 1.0}),
    Case(
        "entropy bonus sign flipped",
        "entropy_collapse",
        {"ppo.entropy_coef": 1.0, "ppo.schedule": "constant", "ppo.num_updates": 20},
        bug=bugs.entropy_flipped,
    ),
)

STEPS: Final = (
    Case("learning rate × 100", "steps_too_large", {"ppo.learning_rate": 3e-2}),
    *RATES,
    Case(
        "learning rate 50, three updates",
        "steps_too_large",
        {**SHARED, "ppo.learning_rate": 50.0, "ppo.num_updates": 3},
    ),
    Case("head rate × 30, no value clip", "first_update_too_large", HOT_HEAD),
    Case("20 epochs", "steps_too_large", {"ppo.num_epochs": 20}),
    Case("learning rate / 1000", "steps_too_small", {"ppo.learning_rate": 3e-7}),
    Case("every 11th gradient × 1000", "gradient_spikes", bug=bugs.gradient_spikes),
    Case(
        "the same, with the spike guard",
        "steps_skipped",
        {"ppo.on_spike": {"skip": 6.0}, "ppo.num_updates": 20, "ppo.max_skips": 20},
        bug=bugs.gradient_spikes,
    ),
)

CRITIC: Final = (
    Case("critic frozen", "dead_critic", bug=bugs.critic_frozen),
    Case("value_coef 0", "dead_critic", {"ppo.value_coef": 0.0}),
    Case(
        "critic frozen, added to a baseline",
        "idle_critic",
        {"ppo.advantage": "reinforce++_critic"},
        bug=bugs.critic_frozen,
    ),
    Case("critic frozen, checked", "critic_worse_than_prompt_mean", CHECKED, bug=bugs.critic_frozen),
    Case(
        "critic that sees the prompt alone",
        "critic_blind_within_prompts",
        CHECKED,
        bug=bugs.critic_sees_the_prompt_alone,
    ),
    Case("critic of a random reward", "critic_explains_nothing", reward=function("noise"), stage="critic"),
    Case("value clip range 0.001", "value_clip_binding", {"ppo.value_clip_range": 1e-3}),
    Case(
        "reward × 100, value loss in score units",
        "value_scale_mismatch",
        {"ppo.value_unit": "score", "ppo.kl_coef": 10.0},
        lambda base: reward_model(base, weight=100.0),
    ),
)

GROUPS: Final = (
    Case(
        "score by prompt alone, RLOO",
        "groups_without_spread",
        {**IN_GROUPS, "ppo.advantage": "rloo"},
        function("by_prompt"),
    ),
    Case(
        "scores for one response per prompt, RLOO",
        "groups_of_one",
        {**IN_GROUPS, "ppo.advantage": "rloo", "ppo.num_updates": 16},
        function("first_alone"),
    ),
    Case(
        "faint scores on half of the prompts, GRPO",
        "group_std_blows_up",
        {**IN_GROUPS, "ppo.kl_in": "loss"},
        function("faint"),
    ),
    Case(
        "mean per response, GRPO", "length_bias", {**IN_GROUPS, **AGGRESSIVE, "ppo.kl_coef": 0.0}, function("tuneful")
    ),
)

REWARD: Final = (
    Case("constant reward", "reward_flat", reward=function("constant")),
    Case("random reward", "reward_flat", {"ppo.num_updates": 16}, function("noise")),
    Case("advantage sign flipped", "score_falling", bug=bugs.advantages_flipped),
    Case(
        "reward that saturates early",
        "reward_saturated",
        {"ppo.kl_coef": 0.01, "ppo.schedule": "constant", "ppo.num_updates": 20},
        function("solved"),
    ),
    Case(
        "reward function that raises",
        "reward_function_failing",
        {"reward_functions.on_error": "drop", "reward_functions.retries": 0},
        function("raising"),
    ),
    Case(
        "reward function that returns NaN",
        "not_finite",
        {"ppo.on_nonfinite": "skip", "ppo.max_skips": 20},
        function("dividing"),
    ),
    Case("reward function that mostly returns None", "responses_unscored", reward=function("picky")),
    Case("slow reward function", "reward_dominates_time", {"ppo.num_updates": 8}, function("slow")),
    Case("memory leak", "memory_growing", bug=bugs.memory_leak),
)

HACKING: Final = (
    Case("reward for length", "hacking_by_length", AGGRESSIVE, function("long")),
    Case(
        "reward for repetition",
        "hacking_by_repetition",
        {**AGGRESSIVE, "rollout.missing_eos_score": -1.0, "ppo.num_updates": 28},
        function("repeating"),
    ),
    Case(
        "bonus for truncated responses",
        "hacking_by_not_stopping",
        {**AGGRESSIVE, "rollout.missing_eos_score": 5.0, "rollout.max_new_tokens": 24},
    ),
    Case(
        "no KL penalty",
        "proxy_up_judge_down",
        {**recipe.WITHOUT_KL_SETTINGS, "ppo.num_updates": 24},
        monitored,
    ),
)

RESPONSES: Final = (
    Case("EOS masked as padding in SFT", "too_few_eos", start=eos_masked_policy),
    Case("max_new_tokens 12", "truncated_at_cap", {"rollout.max_new_tokens": 12}),
    Case("reward for brevity", "stops_at_once", AGGRESSIVE, function("short")),
    Case("16 prompts, repeated", "duplicated_prompts", change=few(16)),
    Case(
        "16 prompts with a rule for each",
        "prompts_memorized",
        {**IN_GROUPS, **BY_HEART},
        function("arbitrary"),
        change=few(64),
    ),
    Case(
        "a quarter of the prompts too long", "rows_dropped", {"data.max_rejected_fraction": 1.0}, change=some_too_long
    ),
)

EPISODES: Final = tuple(
    Case(
        name,
        rule,
        {**tools.SETTINGS, "environment.source": f"bench.faults.tools:{environment}", **more},
        tools.unpaid if environment == "changing" else tools.right,
        change=tools.products,
        start=tools.calculator,
    )
    for name, rule, environment, more in (
        ("a tool that fails", "tools_fail", "Broken", {}),
        ("a tool that the policy has never seen", "tools_unused", "Unknown", {}),
        ("a tool that takes two seconds, limit 0.2", "episodes_time_out", "Slow", {"environment.timeout": 0.2}),
        ("an agent that changes answers", "answers_changed", "changing", {}),
    )
)

SUPERVISED: Final = (
    Case(
        "second SFT, learning rate × 30",
        "loss_rising",
        {"sft.learning_rate": 0.2, "sft.schedule": {"constant": 0.5}},
        stage="sft",
        change=few(1500),
    ),
    Case(
        "SFT on 150 demonstrations, 12 epochs",
        "overfitting",
        {"sft.num_epochs": 12, "data.eval_fraction": 0.2},
        stage="sft",
        start=untrained,
        change=few(190),
    ),
    Case("reward model, random labels", "reward_model_at_chance", stage="reward", change=random_labels),
    Case(
        "reward model, longer response always preferred",
        "reward_model_barely_better_than_length",
        stage="reward",
        change=longer_preferred,
    ),
)

FAULTS: Final = (
    *SAMPLER,
    *KL,
    *EXPLORATION,
    *STEPS,
    *CRITIC,
    *GROUPS,
    *REWARD,
    *HACKING,
    *RESPONSES,
    *EPISODES,
    *SUPERVISED,
)
