"""`optimization`: the optimizer, which every trained stage has."""

from typing import Any, Literal

from pydantic import ValidationError, model_validator

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["OptimizationConfig"]

TRAINED = ("sft", "reward_model", "critic", "ppo")
"""The sections of the stages that train."""


class OptimizationConfig(Section):
    """The optimizer of every trained stage. Rates and schedules differ, and are the stage's own."""

    optimizer: Literal["adamw", "adamw8bit", "adafactor", "muon"] = field(
        "adamw",
        meaning="The optimizer, by what it keeps per trained weight: adamw 8 bytes; adamw8bit 2, the same moments in 8 "
        "bits (the extra bitsandbytes); adafactor next to nothing, the second moment by rows and columns "
        "and no momentum; muon 4, orthogonalized steps for the matrices of layers (torch 2.9) and adamw for the rest. "
        "Learning rates carry over.",
        source="kedge: adamw is what the default rates were found with",
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
        meaning="Adam's ε, added to the denominator of the step; not used by adafactor.",
        source="N+ and Ziegler",
        too_high="weights with small gradients hardly move",
        too_low="weights with tiny gradients take full-size, noisy steps",
    )
    adam_eps_mode: Literal["torch", "tf1"] = field(
        "torch",
        meaning="adamw adds ε after the bias correction (torch) or before it (tf1, as in OpenAI's code).",
        source="PyTorch; the two differ by √(1 − β₂ᵗ), a factor of 31.6 at step 1",
    )
    stages: dict[str, dict[str, Any]] = field(
        {},
        meaning="Other values for single stages: {sft: {adam_eps: 1e-8}}, with sft, reward_model, critic or ppo.",
        source="kedge: one optimizer for all",
        text="a mapping of stages to fields of this section",
    )

    def of(self, section: str) -> "OptimizationConfig":
        """The optimizer of the stage with this section: the values of `stages` over the others."""
        values = self.model_dump(exclude={"stages"})
        return OptimizationConfig.model_validate({**values, **self.stages.get(section, {})})

    @model_validator(mode="after")
    def _check_stages(self) -> "OptimizationConfig":
        known = type(self).model_fields.keys() - {"stages"}
        for section, values in self.stages.items():
            if section not in TRAINED:
                raise ValueError(f"optimization.stages has {section}, which is none of {', '.join(TRAINED)}")
            if unknown := [name for name in values if name not in known]:
                raise ValueError(f"optimization.stages: {unknown[0]} is none of {', '.join(sorted(known))}")
            try:
                self.of(section)
            except ValidationError as error:
                [first, *_] = error.errors()
                name = ".".join(map(str, first["loc"]))
                raise ValueError(f"optimization.stages: {section}.{name}: {first['msg']}") from None
        return self

    @model_validator(mode="after")
    def _check_form(self) -> "OptimizationConfig":
        if self.optimizer != "adamw" and self.adam_eps_mode == "tf1":
            raise ValueError(
                "optimization.adam_eps_mode=tf1 is TensorFlow's Adam, and optimization.optimizer="
                f"{self.optimizer} has no such form; use optimizer=adamw, or adam_eps_mode=torch"
            )
        return self
