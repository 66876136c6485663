"""`sft` and `reward_model`: the two supervised stages."""

from typing import Literal

from kedge.config.schema.field import knob
from kedge.config.schema.optimizer import Optimiser

__all__ = ["RewardModel", "Sft"]

_RATE_TOO_HIGH = "the loss jumps or diverges, and what the model knew is forgotten"
_RATE_TOO_LOW = "the loss has hardly moved when the data is used up"
_EPOCHS_TOO_HIGH = "the rows are learnt by heart: training loss falls while held-out loss rises"
_EPOCHS_TOO_LOW = "the loss is still falling at the end"
_BATCH_TOO_HIGH = "few steps are left in an epoch"
_BATCH_TOO_LOW = "noisy steps, which need a smaller learning rate"


class Sft(Optimiser):
    """Supervised fine-tuning on demonstrations: cross-entropy of the completion, EOS included."""

    learning_rate: float = knob(
        3e-6,
        ge=0,
        meaning="Peak step size of Adam.",
        source="N+ (1B to 6.9B); small models take 10 to 1000 times as much",
        too_high=_RATE_TOO_HIGH,
        too_low=_RATE_TOO_LOW,
    )
    schedule: Literal["cosine", "linear", "constant"] = knob(
        "cosine", meaning="How the learning rate falls to 0 over the run, or stays.", source="N+"
    )
    num_epochs: int = knob(
        1,
        ge=1,
        meaning="Passes over the demonstrations.",
        source="N+",
        too_high=_EPOCHS_TOO_HIGH,
        too_low=_EPOCHS_TOO_LOW,
    )
    batch_size: int = knob(
        128,
        ge=1,
        meaning="Sequences per optimiser step.",
        source="N+",
        too_high=_BATCH_TOO_HIGH,
        too_low=_BATCH_TOO_LOW,
    )


class RewardModel(Optimiser):
    """The reward model: pairwise or K-wise ranking loss on comparisons."""

    base: str | None = knob(
        None,
        meaning="Folder or id of the model to start from; null takes `model` (in rlhf, the SFT model).",
        source="Stiennon: the reward model starts from the SFT model",
    )
    learning_rate: float = knob(
        3e-6,
        ge=0,
        meaning="Peak step size of Adam.",
        source="N+ (1B to 6.9B); small models take 10 to 1000 times as much",
        too_high=_RATE_TOO_HIGH,
        too_low=_RATE_TOO_LOW,
    )
    schedule: Literal["cosine", "linear", "constant"] = knob(
        "cosine", meaning="How the learning rate falls to 0 over the run, or stays.", source="N+"
    )
    num_epochs: int = knob(
        1,
        ge=1,
        meaning="Passes over the comparisons.",
        source="N+ and InstructGPT, whose reward models overfit in a second epoch",
        too_high="the comparisons are learnt by heart: held-out accuracy falls and scores grow overconfident",
        too_low=_EPOCHS_TOO_LOW,
    )
    batch_size: int = knob(
        64,
        ge=1,
        meaning="Comparisons per optimiser step: pairs, or whole ranked lists.",
        source="N+",
        too_high=_BATCH_TOO_HIGH,
        too_low=_BATCH_TOO_LOW,
    )
    normalize: Literal["demonstrations", "comparisons", "none"] | None = knob(
        None,
        meaning="On which texts the mean score is made 0: demonstrations, or the chosen responses of the comparisons; "
        "null takes demonstrations where they are given, comparisons otherwise.",
        source="Stiennon and N+: a mean of 0 on the reference summaries",
    )
    normalize_scale: bool = knob(
        False,
        meaning="Whether the scores are also divided by their standard deviation on those texts.",
        source="off in Stiennon and N+, on in Ziegler",
    )
