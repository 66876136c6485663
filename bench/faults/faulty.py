"""A fault for each rule of the doctor, several for some."""

from __future__ import annotations

from typing import Final

from bench.faults import bugs
from bench.faults.case import Case, function, learnt, untrained, watched
from bench.faults.changes import few, labels_by_chance, longer_preferred, taught_without_end
from kedge.demo import recipe

__all__ = ["FAULTS"]

LONG_LEASH: Final = {"ppo.kl_coef": 0.05, "ppo.learning_rate": 1e-3, "ppo.schedule": "constant", "ppo.num_updates": 20}
"""A policy that is free to find out what pays, and has the time to."""

SAMPLER: Final = (
    Case("sampler's weights up to 3 updates old", "stale_rollouts", bug=bugs.old_weights_sample(4, told=True)),
    Case("the same, and nobody says so", "sampler_trainer_mismatch", bug=bugs.old_weights_sample(4, told=False)),
    Case("temperature left out of the trainer", "sampler_trainer_mismatch", bug=bugs.temperature_left_out),
    Case("logprobs read one place too early", "sampler_trainer_mismatch", bug=bugs.off_by_one),
    Case("dropout on in training", "sampler_trainer_mismatch", bug=bugs.dropout_on),
    Case("sampler sharper than its logprobs", "sampling_not_mirrored", bug=bugs.sampled_at(0.5)),
    Case("sampler hotter than its logprobs", "sampling_not_mirrored", bug=bugs.sampled_at(2.0)),
)

LEASH: Final = (
    Case("KL's sign flipped", "kl_sign_flipped", bug=bugs.kl_sign_flipped),
    Case("KL with its two sides swapped", "kl_negative", bug=bugs.kl_sides_swapped),
    Case("β × 500", "beta_too_large", {"ppo.kl_coef": 50.0}),
    Case("β / 1000, steps × 3", "beta_too_small", {**LONG_LEASH, "ppo.kl_coef": 1e-4}),
    Case(
        "KL's sign flipped, β × 10, steps × 3",
        "kl_exploding",
        {**LONG_LEASH, "ppo.kl_coef": 1.0},
        bug=bugs.kl_sign_flipped,
    ),
)

EXPLORATION: Final = (
    Case("temperature 0.01", "no_exploration", {"rollout.temperature": 0.01}),
    Case("entropy coefficient 1", "entropy_rising", {"ppo.entropy_coef": 1.0}),
    Case(
        "entropy bonus with the wrong sign",
        "entropy_collapse",
        {"ppo.entropy_coef": 1.0, "ppo.schedule": "constant", "ppo.num_updates": 20},
        bug=bugs.entropy_flipped,
    ),
)

STEPS: Final = (
    Case("learning rate × 100", "steps_too_large", {"ppo.learning_rate": 3e-2}),
    Case("learning rate × 10", "steps_too_large", {"ppo.learning_rate": 3e-3}),
    Case("20 epochs", "steps_too_large", {"ppo.num_epochs": 20}),
    Case("learning rate / 1000", "steps_too_small", {"ppo.learning_rate": 3e-7}),
    Case("gradients × 1000 now and then", "gradient_spikes", bug=bugs.gradient_spikes),
    Case(
        "the same, guarded",
        "steps_skipped",
        {"ppo.spike_sigma": 6.0, "ppo.num_updates": 20, "ppo.max_skips": 20},
        bug=bugs.gradient_spikes,
    ),
)

CRITIC: Final = (
    Case("critic frozen", "dead_critic", bug=bugs.critic_frozen),
    Case("value_coef 0", "dead_critic", {"ppo.value_coef": 0.0}),
    Case("value clip 0.001", "value_clip_binding", {"ppo.value_clip_range": 1e-3}),
    Case(
        "reward × 100, value loss in its unit",
        "value_scale_mismatch",
        {"ppo.value_unit": "score", "ppo.kl_coef": 10.0},
        lambda base: learnt(base, weight=100.0),
    ),
    Case(
        "reward next to constant, no β",
        "whitening_constant_batch",
        {"ppo.kl_coef": 0.0},
        function("nearly_constant"),
    ),
)

REWARD: Final = (
    Case("constant reward", "reward_flat", reward=function("constant")),
    Case("reward by chance", "reward_flat", {"ppo.num_updates": 16}, function("noise")),
    Case("advantages' sign flipped", "score_falling", bug=bugs.advantages_flipped),
    Case(
        "reward that is soon used up",
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
        "reward function that divides by 0",
        "not_finite",
        {"ppo.on_nonfinite": "skip", "ppo.max_skips": 20},
        function("dividing"),
    ),
    Case("slow reward function", "reward_dominates_time", {"ppo.num_updates": 8}, function("slow")),
    Case("memory kept", "memory_growing", bug=bugs.memory_kept),
)

HACKING: Final = (
    Case("reward that loves length", "hacking_by_length", LONG_LEASH, function("long")),
    Case(
        "reward that loves repetition",
        "hacking_by_repetition",
        {**LONG_LEASH, "rollout.missing_eos_score": -1.0, "ppo.num_updates": 28},
        function("repeating"),
    ),
    Case(
        "cut responses pay",
        "hacking_by_not_stopping",
        {**LONG_LEASH, "rollout.missing_eos_score": 5.0, "rollout.max_new_tokens": 24},
    ),
    Case(
        "the reward model alone, no β",
        "proxy_up_judge_down",
        {**recipe.WITHOUT_KL_SETTINGS, "ppo.num_updates": 24},
        watched,
    ),
)

RESPONSES: Final = (
    Case("padding is EOS in SFT", "too_few_eos", start=taught_without_end),
    Case("at most 12 tokens", "truncated_at_cap", {"rollout.max_new_tokens": 12}),
    Case("reward that hates length", "stops_at_once", LONG_LEASH, function("short")),
    Case("16 prompts, again and again", "duplicated_prompts", change=few(16)),
)

SUPERVISED: Final = (
    Case(
        "SFT again, learning rate × 30",
        "loss_rising",
        {"sft.learning_rate": 0.2, "sft.warmup_fraction": 0.5, "sft.schedule": "constant"},
        stage="sft",
        change=few(1500),
    ),
    Case(
        "SFT on 150 demonstrations, 12 times",
        "overfitting",
        {"sft.num_epochs": 12, "data.eval_fraction": 0.2},
        stage="sft",
        start=untrained,
        change=few(190),
    ),
    Case("reward model, labels by chance", "reward_model_at_chance", stage="reward", change=labels_by_chance),
    Case(
        "reward model, the longer answer preferred",
        "reward_model_barely_better_than_length",
        stage="reward",
        change=longer_preferred,
    ),
)

FAULTS: Final = (*SAMPLER, *LEASH, *EXPLORATION, *STEPS, *CRITIC, *REWARD, *HACKING, *RESPONSES, *SUPERVISED)
