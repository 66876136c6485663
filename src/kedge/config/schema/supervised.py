"""`sft`, `reward_model` and `critic`: the models that are trained before PPO."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.optimizer import Schedule, TrainedSection, schedule_field
from kedge.config.schema.rollout import check_responses
from kedge.config.schema.section import check

LEARNING_RATE: float = field(
    3e-6,
    ge=0,
    meaning="Peak learning rate of Adam.",
    source="N+ (1B to 6.9B); small models use 10 to 1000 times as much",
    too_high="the loss jumps or diverges, and pretrained knowledge is lost",
    too_low="the loss has hardly moved by the end of the data",
)
"""The default for fine-tuning a language model, and for training one as a reward model."""


class SftConfig(TrainedSection):
    """Supervised fine-tuning on demonstrations: cross-entropy of the completion, EOS included."""

    learning_rate: float = LEARNING_RATE
    schedule: Schedule = schedule_field("cosine", source="N+")
    num_epochs: int = field(
        1,
        ge=1,
        meaning="Passes over the demonstrations.",
        source="N+",
        too_high="overfitting: the training loss falls while the held-out loss rises",
        too_low="the loss is still falling at the end",
    )
    batch_size: int = field(
        128,
        ge=1,
        meaning="Sequences per optimizer step.",
        source="N+",
        too_high="few steps per epoch",
        too_low="noisy steps, which need a lower learning rate",
    )


class RewardModelConfig(TrainedSection):
    """Reward-model training: pairwise or K-wise ranking loss on comparisons."""

    base: str | None = field(
        None,
        meaning="Folder or id of the model to start from; null uses `model` (in rlhf, the SFT model).",
        source="Stiennon: the reward model starts from the SFT model",
        text="a folder, a hub id or a run",
    )
    learning_rate: float = LEARNING_RATE
    schedule: Schedule = schedule_field("cosine", source="N+")
    num_epochs: int = field(
        1,
        ge=1,
        meaning="Passes over the comparisons.",
        source="N+ and InstructGPT, whose reward models overfit in a second epoch",
        too_high="overfitting: held-out accuracy falls and the scores become overconfident",
        too_low="the loss is still falling at the end",
    )
    batch_size: int = field(
        64,
        ge=1,
        meaning="Comparisons per optimizer step: pairs, or whole ranked lists.",
        source="N+",
        too_high="few steps per epoch",
        too_low="noisy steps, which need a lower learning rate",
    )
    normalize: Literal["demonstrations", "comparisons", "none"] | None = field(
        None,
        meaning="Texts whose mean score is shifted to 0: the demonstrations, or the chosen responses of the "
        "comparisons; null uses the demonstrations if there are any, else the comparisons. 512 of them, evenly "
        "spread, if there are more.",
        source="Stiennon and N+: a mean of 0 on the reference summaries",
    )
    normalize_scale: bool = field(
        False,
        meaning="Also divide the scores by their standard deviation on those texts.",
        source="off in Stiennon and N+, on in Ziegler",
    )
    ties: Literal["drop", "davidson", "rao_kupper"] = field(
        "drop",
        meaning="Equal ranks: drop them, or learn from them as a third outcome, by Davidson's model of ties or by Rao "
        "and Kupper's. Both learn one more number, which scoring does not need.",
        source="drop in Stiennon and InstructGPT; Davidson 1970, Rao and Kupper 1967",
    )


class CriticConfig(TrainedSection):
    """A critic fitted to the Monte Carlo returns of the policy's responses, before PPO."""

    kind: Literal["separate", "shared"] = field(
        "separate",
        meaning="A separate model, all of it trained; or a value head on the policy's trunk, which stays as it is.",
        source="VC-PPO and VAPO pretrain a separate one; kedge for the head",
    )
    base: Literal["auto", "reward", "policy"] | str = field(
        "auto",
        meaning="What a separate critic starts from, as ppo.critic_init; a reward model can also be named. Its head is "
        "fitted again.",
        source="Stiennon, N+: the reward model",
        text="a folder, a hub id or a run",
    )
    num_prompts: int | None = field(
        None,
        ge=1,
        meaning="Prompts to sample responses to, besides the held-out ones; null takes each prompt of the data once.",
        source="kedge",
        too_high="sampling takes longer than it helps",
        too_low="the critic learns the prompts by heart",
    )
    num_responses: int = field(
        4,
        ge=1,
        meaning="Responses per prompt, held-out prompts included.",
        source="kedge: further prompts teach more than further responses to the same ones, where there are any",
        too_high="sampling takes longer than it helps",
        too_low="with few prompts, the returns are too few to fit a critic",
    )
    learning_rate: float = field(
        9e-6,
        ge=0,
        meaning="Peak learning rate of Adam, for a separate critic.",
        source="the default of OpenRLHF's critic; small models use 10 to 1000 times as much",
        too_high="the held-out loss rises from the first evaluation on",
        too_low="the critic stays the least-squares fit that it starts as",
    )
    schedule: Schedule = schedule_field("cosine", source="N+, reward model")
    num_epochs: int = field(
        1,
        ge=1,
        meaning="Passes over the sampled responses, for a separate critic.",
        source="kedge: as the reward model, which overfits in a second pass",
        too_high="overfitting: the held-out explained variance falls",
        too_low="the loss is still falling at the end",
    )
    batch_size: int = field(
        64,
        ge=1,
        meaning="Responses per optimizer step.",
        source="N+, reward model",
        too_high="few steps per epoch",
        too_low="noisy steps, which need a lower learning rate",
    )

    @check
    def _check_base(self) -> None:
        if self.kind == "shared" and self.base not in ("auto", "policy"):
            raise ValueError(
                "critic.base is what a separate critic starts from; critic.kind=shared has the policy's trunk"
            )
        check_responses("critic", self.num_prompts or 1, self.num_responses)

    @property
    def names_base(self) -> bool:
        """True if `base` is the name of a model."""
        return self.base not in ("auto", "reward", "policy")
