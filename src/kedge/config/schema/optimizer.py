"""The fields of the optimizer, which every trained stage has."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["OptimizerConfig"]


class OptimizerConfig(Section):
    """The optimizer. The stages declare learning rate and schedule themselves, because their defaults differ."""

    optimizer: Literal["adamw", "adamw8bit", "adafactor", "muon"] = field(
        "adamw",
        meaning="The optimizer, by what it keeps per trained weight: adamw 8 bytes; adamw8bit 2, the same moments in 8 "
        "bits (the extra bitsandbytes); adafactor next to nothing, the second moment by rows and columns "
        "and no momentum; muon 4, orthogonalized steps for the matrices of layers (torch 2.9) and adamw for the rest. "
        "Learning rates carry over.",
        source="kedge: adamw is what the default rates were found with",
    )

    warmup_fraction: float = field(
        0.0,
        ge=0,
        lt=1,
        meaning="Fraction of all optimizer steps over which the learning rate rises linearly from 0. In PPO, of the "
        "policy's; a critic that is trained first (ppo.value_warmup_updates) starts with a rise of the same length.",
        source="N+ trains without warmup; InstructGPT uses one",
        too_high="much of the run trains at a fraction of the learning rate",
        too_low="the first steps may be too large, because Adam's moment estimates are still poor",
    )
    max_grad_norm: float | None = field(
        1.0,
        gt=0,
        meaning="L2 norm to which the gradient is clipped before each step; null disables clipping. In PPO a separate "
        "critic's gradient is clipped apart from the policy's.",
        source="S0; Ziegler and N+ do not clip",
        too_high="a single bad batch can ruin the weights",
        too_low="every step is clipped, which in effect lowers the learning rate",
    )
    weight_decay: float = field(
        0.0,
        ge=0,
        meaning="Decoupled weight decay (as in AdamW), multiplied by the learning rate at each step.",
        source="Ziegler; N+ has PyTorch's default for AdamW, 0.01",
        too_high="the weights shrink toward 0, away from the pretrained model",
        too_low="no harm: 0 is the usual choice for fine-tuning",
    )
    adam_eps: float = field(
        1e-5,
        gt=0,
        meaning="Adam's ε, added to the denominator of the step; adafactor has none.",
        source="N+ and Ziegler",
        too_high="weights with small gradients hardly move",
        too_low="weights with tiny gradients take full-size, noisy steps",
    )
    adam_eps_mode: Literal["torch", "tf1"] = field(
        "torch",
        meaning="Where adamw adds ε: after the bias correction (torch) or before it (tf1, as in OpenAI's code).",
        source="PyTorch; the two differ by √(1 − β₂ᵗ), a factor of 31.6 at step 1",
    )
