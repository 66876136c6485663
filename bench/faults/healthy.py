"""Healthy runs, each with different settings."""

from __future__ import annotations

from typing import Final

from bench.faults.base import CRITIC_FREE, IN_GROUPS, SHARED
from bench.faults.case import TASKS, Case, function, gold_judge, monitored, reward_model, untrained
from bench.faults.changes import few

PENALTY: Final = {"source": "kedge.rewards.penalties:repetitive"}

HEALTHY: Final = (
    Case("demo settings"),
    Case("monitored by the gold judge", reward=monitored),
    Case("critic from the policy", settings={"ppo.critic_init": "policy"}),
    Case("value head on the policy's trunk", settings={**SHARED, "ppo.value_coef": 1.0, "ppo.num_updates": 32}),
    Case("KL in the loss", settings={"ppo.kl_in": "loss"}),
    Case("no reference", settings={"ppo.kl_coef": 0.0}),
    Case("whitened rewards", settings={"ppo.whiten_rewards": True}),
    Case("Ziegler's controller", settings={"ppo.kl_controller": {"ziegler": {"target": 3.0}}}),
    Case("programmatic reward", reward=function("tuneful")),
    Case(
        "gold judge as the reward",
        reward=gold_judge,
        critic=lambda base: base.critic,
    ),
    Case("reward model plus a repetition penalty", reward=lambda base: [*reward_model(base), PENALTY]),
    Case("4 responses per prompt, 16 prompts", settings={"rollout.num_prompts": 16, "rollout.num_responses": 4}),
    Case(
        "1 minibatch, 4 epochs, early stop",
        settings={"ppo.num_minibatches": 1, "ppo.num_epochs": 4, "ppo.early_stop_kl": 0.02},
    ),
    Case("small entropy bonus", settings={"ppo.entropy_coef": 0.001}),
    Case(
        "clip-higher, dual clip, sequence aggregation",
        settings={"ppo.clip_range_high": 0.28, "ppo.policy_loss": {"dual_clip": 3.0}, "ppo.aggregation": "sequence"},
    ),
    Case(
        "score after the last token, Monte Carlo",
        settings={"ppo.score_at": "after_last", "ppo.advantage": "monte_carlo"},
    ),
    Case("bf16", settings={"runtime.precision": "bf16"}),
    Case("RLOO", settings={**IN_GROUPS, "ppo.advantage": "rloo"}),
    Case("REINFORCE++", settings={**CRITIC_FREE, "ppo.advantage": "reinforce++"}),
    *(
        Case(f"learning rate × 3{task}", settings={"ppo.learning_rate": 1e-3}, reward=reward, critic=critic)
        for task, reward, critic in TASKS
    ),
    Case("critic before PPO", stage="critic"),
    Case("SFT", stage="sft", start=untrained, change=few(4000)),
    Case("reward model", stage="reward"),
)
