"""`sft`: supervised fine-tuning."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["SftConfig"]


class SftConfig(Section):
    """Supervised fine-tuning on demonstrations: cross-entropy of the completion, EOS included."""

    learning_rate: float = field(
        3e-6,
        ge=0,
        meaning="Peak learning rate of Adam.",
        source="N+ (1B to 6.9B); small models use 10 to 1000 times as much",
        too_high="the loss jumps or diverges, and pretrained knowledge is lost",
        too_low="the loss has hardly moved by the end of the data",
    )
    schedule: Literal["cosine", "linear", "constant"] = field(
        "cosine", meaning="How the learning rate decays to 0 over the run; constant: not at all.", source="N+"
    )
    warmup_fraction: float = field(
        0.0,
        ge=0,
        lt=1,
        meaning="Fraction of all optimizer steps over which the learning rate rises linearly from 0.",
        source="N+ trains without warmup",
        too_high="much of the run trains at a fraction of the learning rate",
        too_low="the first steps may be too large, because Adam's moment estimates are still poor",
    )
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
