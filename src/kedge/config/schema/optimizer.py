"""The fields that every trained stage has, whatever it trains."""

from typing import Literal

from kedge.config.schema.field import Section, knob

__all__ = ["Optimiser"]


class Optimiser(Section):
    """Adam and its step. The stages declare learning rate and schedule themselves, since their defaults differ."""

    warmup_fraction: float = knob(
        0.0,
        ge=0,
        lt=1,
        meaning="Share of all optimiser steps in which the learning rate rises from 0.",
        source="N+ trains without warm-up; InstructGPT warms up",
        too_high="much of the run learns at a fraction of the rate",
        too_low="the first steps, on Adam's untrained averages, can be too large",
    )
    max_grad_norm: float | None = knob(
        1.0,
        gt=0,
        meaning="L2 norm to which the gradient is clipped before a step; null never clips.",
        source="S0",
        too_high="one odd batch can throw the weights off",
        too_low="every step is clipped, so that the learning rate is in effect smaller",
    )
    weight_decay: float = knob(
        0.0,
        ge=0,
        meaning="Decoupled weight decay, per step and unit of learning rate.",
        source="none in the papers; PyTorch's AdamW would silently decay by 0.01",
        too_high="weights are pulled to 0, away from the pretrained model",
        too_low="none is the usual choice for fine-tuning",
    )
    adam_eps: float = knob(
        1e-5,
        gt=0,
        meaning="Adam's ε, in the denominator of the step.",
        source="N+ and Ziegler",
        too_high="steps shrink for weights with small gradients",
        too_low="weights with tiny gradients take full-size, noisy steps",
    )
    adam_eps_mode: Literal["torch", "tf1"] = knob(
        "torch",
        meaning="Where ε enters: after the bias correction (torch) or before it (tf1, as OpenAI's code ran).",
        source="PyTorch; the two differ by √(1 − β₂ᵗ), 31.6× at step 1",
    )
