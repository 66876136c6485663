"""The trainers of other libraries whose logs kedge reads: how their logs and settings are recognized."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trainer:
    """A trainer of another library.

    Attributes:
        key: As for `--library`: `trl-grpo`.
        title: In sentences: `TRL's GRPO`.
        stage: The corresponding stage of kedge.
        marks: Names of metrics; a log with all names of one of these groups was written by it.
        library: Its library in the table of settings.
        tables: The titles of the tables with its settings there; all if empty.
        setting: The name of a setting that only it has; empty if there is none.
    """

    key: str
    title: str
    stage: str
    marks: tuple[frozenset[str], ...]
    library: str = ""
    tables: tuple[str, ...] = ()
    setting: str = ""

    @property
    def name(self) -> str:
        """As its library calls it: `GRPO`."""
        return self.title.rpartition(" ")[2]


def _marks(*groups: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(group.split()) for group in groups)


ARGUMENTS = "TrainingArguments"

TRAINERS = (
    Trainer("trl-ppo", "TRL's PPO", "ppo", _marks("objective/scores policy/approxkl_avg"), "TRL",
            ("PPOConfig", ARGUMENTS), "num_ppo_epochs"),
    Trainer("trl-grpo", "TRL's GRPO", "ppo", _marks("reward reward_std completions/mean_length",
            "reward reward_std completion_length"), "TRL", ("GRPO and RLOO", "PPOConfig", ARGUMENTS), "scale_rewards"),
    Trainer("trl-rloo", "TRL's RLOO", "ppo", _marks("reward reward_std completions/mean_length"), "TRL",
            ("GRPO and RLOO", "PPOConfig", ARGUMENTS), "normalize_advantages"),
    Trainer("trl-reward", "TRL's Reward", "reward", _marks("loss mean_reward margin"), "TRL",
            ("SFT and reward models", ARGUMENTS), "center_rewards_coefficient"),
    Trainer("trl-sft", "TRL's SFT", "sft", _marks("loss mean_token_accuracy"), "TRL",
            ("SFT and reward models", ARGUMENTS), "completion_only_loss"),
    Trainer("verl", "verl", "ppo",
            _marks("critic/score/mean response_length/mean", "actor/pg_loss actor/ppo_kl"), "verl"),
    Trainer("openrlhf", "OpenRLHF", "ppo", _marks("policy_loss reward response_length"), "OpenRLHF"),
    Trainer("openrlhf-sft", "OpenRLHF's SFT", "sft", _marks("gpt_loss lr"), "OpenRLHF"),
    Trainer("openrlhf-reward", "OpenRLHF's reward", "reward", _marks("acc chosen_reward reject_reward"), "OpenRLHF"),
    Trainer("sb3-ppo", "Stable-Baselines3's PPO", "control", _marks("train/approx_kl train/clip_fraction"),
            "Stable-Baselines3"),
)  # fmt: skip
"""The first that matches a log's names is taken: GRPO's and RLOO's are alike, unless settings or a model card say."""
