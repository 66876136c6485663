"""The looks of kedge's own stages: tables of rows and charts."""

from __future__ import annotations

from dataclasses import replace

from kedge.inspect.look import Look, Panel, Row
from kedge.inspect.page import sentences
from kedge.inspect.record import RunRecord

PPO_ROWS = (
    Row("reward/score_mean", "Score", good="up"),
    Row("reward/total", "Score less KL cost", good="up"),
    Row("objective/kl", "KL to the reference", "nats per response"),
    Row("policy/entropy", "Entropy", "nats per token"),
    Row("policy/clip_fraction", "Clip fraction", "share"),
    Row("policy/approx_kl", "Approximate KL of an update", "nats per token"),
    Row("policy/grad_norm", "Gradient norm"),
    Row("value/explained_variance", "Explained variance", "share", "up"),
    Row("value/loss", "Value loss", good="down"),
    Row("episode/turns", "Turns", "per episode"),
    Row("response/length", "Response length", "tokens"),
    Row("response/eos_rate", "EOS rate", "share", "up"),
    Row("response/repetition", "Repetition", "share", "down"),
    Row("group/constant", "Prompts without spread", "share"),
    Row("tokens_per_second", "Tokens per second", "1/s"),
)
SUPERVISED_ROWS = (
    Row("loss", "Loss", "nats", "down"),
    Row("eval/loss", "Loss, held out", "nats", "down"),
    Row("accuracy", "Accuracy", "share", "up"),
    Row("eval/accuracy", "Accuracy, held out", "share", "up"),
    Row("token_accuracy", "Accuracy of tokens", "share", "up"),
    Row("eval/token_accuracy", "Accuracy of tokens, held out", "share", "up"),
    Row("grad_norm", "Gradient norm"),
    Row("tokens_per_second", "Tokens per second", "1/s"),
)
CRITIC_ROWS = (
    Row("explained_variance", "Explained variance", "share", "up"),
    Row("eval/explained_variance", "Explained variance, held out", "share", "up"),
    Row("loss", "Loss", "variances of the returns", "down"),
    Row("eval/loss", "Loss, held out", "variances of the returns", "down"),
    *SUPERVISED_ROWS[-2:],
)

PHASES = {
    "time/rollout": "rollout",
    "time/reward": "reward",
    "time/experience": "experience",
    "time/train": "training",
}
NATS = "nats per token"
PPO_PANELS = (
    Panel("Reward and distance", "Score", "score", {"reward/score_mean": "mean"}, "Rises, then levels off.", key=True),
    Panel(
        "Reward and distance",
        "KL to the reference",
        "nats per response",
        {"objective/kl": "KL"},
        "From 0 to a few nats, or a few tens; to a teacher, it falls. Estimates near 0 can be negative.",
        level=0.0,
        key=True,
    ),
    Panel(
        "Reward and distance",
        "Score on held-out prompts",
        "score",
        {"reward/score_mean": "training prompts", "eval/score": "held-out prompts"},
        "Both rise. A growing gap: the policy memorizes the training prompts.",
        fewest=2,
    ),
    Panel(
        "Reward and distance",
        "Win rate against the start",
        "share",
        {"eval/win_rate": "held-out prompts"},
        "Rises from ½. Falls while the score rises: the reward is over-optimized.",
        level=0.5,
    ),
    Panel(
        "Reward and distance",
        "Rewards",
        "score",
        {
            "reward/total": "score minus KL cost",
            "reward/kl": "KL cost",
            "reward/score_std": "standard deviation of the scores",
        },
        "The reward that PPO maximizes, less the cost of the KL if that is in the reward; and the spread of scores.",
    ),
    Panel(
        "Reward and distance",
        "Score by source",
        "unit of the source",
        {"score/*": "*"},
        "Each term and judge, unweighted.",
        fewest=2,
        key=True,
    ),
    Panel(
        "Reward and distance",
        "Verdicts",
        "share of responses",
        {"verdict/*": "*"},
        "The reasons that a verifier gives. `right` grows; the largest of the others is what to work on.",
        key=True,
    ),
    Panel(
        "Policy step",
        "Entropy",
        NATS,
        {"policy/entropy": "entropy"},
        "Falls slowly. Near 0, exploration is over.",
        key=True,
    ),
    Panel(
        "Policy step",
        "Clip fraction",
        "share of tokens",
        {"policy/clip_fraction": "policy", "value/clip_fraction": "value"},
        "0 to 0.2. Always 0: steps are too small. Above: too large.",
    ),
    Panel(
        "Policy step",
        "Approximate KL",
        NATS,
        {"policy/approx_kl": "approx. KL"},
        "The move of the policy in an update; below about 0.02.",
    ),
    Panel(
        "Policy step",
        "Ratio range",
        "ρ",
        {"policy/ratio_max": "largest", "policy/ratio_mean": "mean", "policy/ratio_min": "smallest"},
        "The mean stays near 1.",
        level=1.0,
        logarithmic=True,
    ),
    Panel("Policy step", "Policy loss", "loss", {"policy/loss": "loss"}, "Around 0. Its size means little.", level=0.0),
    Panel(
        "Policy step",
        "Gradient norm",
        "before clipping",
        {"policy/grad_norm": "policy", "value/grad_norm": "separate critic"},
        "Finite, without a lasting rise.",
        logarithmic=True,
    ),
    Panel(
        "Critic",
        "Explained variance",
        "share",
        {"value/explained_variance": "explained"},
        "Rises from about 0 toward 1. Below 0, the critic does harm.",
        level=0.0,
        floor=-1.0,
        key=True,
    ),
    Panel(
        "Critic",
        "Ordered pairs",
        "share",
        {
            "critic/pairs_across": "different prompts",
            "critic/pairs_within": "same prompt",
            "critic/pairs_across_prompt_mean": "prompt's mean return, different prompts",
        },
        "Rises from ½, chance. Values of prefixes against the returns of fresh continuations.",
        level=0.5,
    ),
    Panel(
        "Critic",
        "Value loss",
        "loss",
        {"value/loss": "loss"},
        "Falls. ½ is only as good as predicting the mean; a histogram's is at least 1.2.",
    ),
    Panel(
        "Critic",
        "Values and returns",
        "reward",
        {"value/mean": "values", "value/returns_mean": "returns"},
        "Values follow returns.",
    ),
    Panel(
        "Critic",
        "Spread",
        "reward",
        {"advantage/std": "advantages", "value/std": "values", "value/returns_std": "returns"},
        "The spread of advantages shrinks as the critic learns.",
    ),
    Panel(
        "Groups",
        "Prompts without spread",
        "share of prompts",
        {"group/constant": "all responses score the same"},
        "Their advantages are 0. Rises as prompts are solved.",
    ),
    Panel(
        "Groups",
        "Spread within groups",
        "score",
        {"group/score_std": "within groups", "reward/score_std": "all responses"},
        "The signal that a group's baseline leaves.",
        fewest=2,
    ),
    Panel(
        "Groups",
        "Length by score",
        "tokens",
        {"group/length_above": "above the group's mean", "group/length_below": "below it"},
        "Close to each other, unless length matters.",
    ),
    Panel(
        "Episodes",
        "Endings",
        "share of episodes",
        {"episode/completed": "completed", "episode/max_turns": "max turns", "episode/max_tokens": "max tokens"},
        "Completed episodes grow where a task has an end.",
    ),
    Panel(
        "Episodes",
        "Cut off",
        "share of episodes",
        {
            "episode/truncated": "by the environment",
            "episode/context_overflow": "context overflow",
            "episode/timeout": "timeout",
        },
        "Near 0, unless the environment itself limits episodes.",
    ),
    Panel(
        "Episodes",
        "Turns",
        "per episode",
        {"episode/turns": "turns of the policy", "tools/calls": "calls of tools"},
        "Fall where a task is solved sooner.",
    ),
    Panel(
        "Episodes",
        "Length of episodes",
        "tokens",
        {"episode/length": "both sides", "response/length": "the policy's own"},
        "The limit, rollout.max_new_tokens, counts both sides.",
        fewest=2,
    ),
    Panel("Episodes", "Failed calls", "share of calls", {"tools/failed": "failed"}, "Falls as the policy learns them."),
    Panel(
        "Responses",
        "Response length",
        "tokens",
        {
            "response/length": "mean",
            "response/length_max": "longest",
            "response/length_right": "right",
            "response/length_wrong": "wrong",
        },
        "Rising along with the score: the reward favors length.",
        key=True,
    ),
    Panel(
        "Responses",
        "EOS rate",
        "share of responses",
        {"response/eos_rate": "stopped"},
        "Near 1 if responses should end.",
    ),
    Panel(
        "Responses",
        "Repetition",
        "share",
        {"response/repetition": "repeated 4-grams", "prompt/distinct": "distinct prompts"},
        "Repetition rising along with the score: the reward is being hacked.",
    ),
    Panel(
        "Responses",
        "Score and length",
        "correlation",
        {"reward/length_correlation": "correlation"},
        "Near ±1, the score measures length.",
        level=0.0,
    ),
    Panel("Speed and memory", "Time by phase", "seconds per update", PHASES, "", stacked=True),
    Panel("Speed and memory", "Tokens per second", "1/s", {"tokens_per_second": "tokens"}, "Prompts and responses."),
    Panel(
        "Speed and memory",
        "Memory",
        "GiB",
        {"memory/process": "process", "memory/device": "device"},
        "Constant after the first updates.",
    ),
    Panel("Schedules", "Learning rate", "", {"policy/learning_rate": "learning rate"}),
    Panel("Schedules", "KL coefficient β", "score per nat", {"objective/kl_coef": "β"}),
)
SUPERVISED_PANELS = (
    Panel("Learning", "Loss", "nats", {"loss": "training", "eval/loss": "held out"}, "Both fall.", key=True),
    Panel(
        "Learning",
        "Accuracy",
        "share",
        {
            "accuracy": "training",
            "eval/accuracy": "held out",
            "token_accuracy": "training, tokens",
            "eval/token_accuracy": "held out, tokens",
        },
        "Held-out accuracy stays close to training.",
        key=True,
    ),
    Panel("Learning", "Gradient norm", "before clipping", {"grad_norm": "norm"}, "Finite.", logarithmic=True),
    Panel("Learning", "Learning rate", "", {"learning_rate": "learning rate"}, "As scheduled."),
    Panel("Speed and memory", "Time of a step", "seconds", {"time/update": "step"}, ""),
    Panel("Speed and memory", "Tokens per second", "1/s", {"tokens_per_second": "tokens"}, "Prompts included."),
)
CRITIC_PANELS = (
    Panel(
        "Learning",
        "Explained variance",
        "share",
        {"explained_variance": "training", "eval/explained_variance": "held out"},
        "Above 0, and the held-out one close to training: PPO starts from it.",
        level=0.0,
        key=True,
    ),
    replace(SUPERVISED_PANELS[0], unit="half the squared error, in variances of the returns"),
    *SUPERVISED_PANELS[2:],
)


def _updates(record: RunRecord) -> int | None:
    total = record.setting("ppo.num_updates")
    return total if isinstance(total, int) else None


OTHER = Look(rows=SUPERVISED_ROWS, sentences=sentences.of_fine_tuning)
"""The look of a stage without its own."""

PPO = Look(
    rows=PPO_ROWS,
    panels=PPO_PANELS,
    sentences=sentences.of_ppo,
    parts=frozenset({"clipping", "frontier", "held_out", "critic", "samples", "policy_scores"}),
    size=("rollout.num_prompts", "rollout.num_responses"),
    items="responses",
    total=_updates,
    goals=("eval/score", "reward/score_mean", "eval/total", "reward/total"),
)
SFT = replace(OTHER, panels=SUPERVISED_PANELS, size=("sft.batch_size",), goals=("eval/loss", "loss"))
LOOKS = {
    "sft": SFT,
    "reward": replace(
        SFT,
        sentences=sentences.of_reward_model,
        parts=frozenset({"reward_model"}),
        size=("reward_model.batch_size",),
        goals=("eval/accuracy", "accuracy"),
    ),
    "critic": Look(
        rows=CRITIC_ROWS,
        panels=CRITIC_PANELS,
        sentences=sentences.of_critic,
        size=("critic.batch_size",),
        goals=("eval/explained_variance", "explained_variance"),
    ),
    "ppo": PPO,
    "evaluate": replace(OTHER, sentences=sentences.of_evaluation, parts=frozenset({"evaluation"})),
    "generate": replace(OTHER, sentences=sentences.of_generation, parts=frozenset({"generation"})),
}
"""By stage, in the order of a chain."""
