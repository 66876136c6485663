"""`sft` and `reward_model`: the supervised stages before PPO."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.optimizer import Schedule, TrainedSection, schedule_field


class SftConfig(TrainedSection):
    """Supervised fine-tuning on demonstrations: cross-entropy of the completion, EOS included."""

    learning_rate: float = field(
        3e-6,
        ge=0,
        meaning="Peak learning rate of Adam.",
        source="N+ (1B to 6.9B); small models use 10 to 1000 times as much",
        too_high="the loss jumps or diverges, and pretrained knowledge is lost",
        too_low="the loss has hardly moved by the end of the data",
    )
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
    learning_rate: float = field(
        3e-6,
        ge=0,
        meaning="Peak learning rate of Adam.",
        source="N+ (1B to 6.9B); small models use 10 to 1000 times as much",
        too_high="the loss jumps or diverges, and pretrained knowledge is lost",
        too_low="the loss has hardly moved by the end of the data",
    )
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
