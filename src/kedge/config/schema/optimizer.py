"""`optimization`: the optimizer of every stage that trains."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt, Len, Lt
from pydantic import ValidationError

from kedge.config.schema.field import Choice, field
from kedge.config.schema.section import Section, check

TRAINED = ("sft", "reward_model", "critic", "ppo")
"""The sections of the stages that train."""


Decay = Literal["linear", "cosine", "constant"]
Schedule = Choice[Decay, Decay, Annotated[float, Gt(0), Lt(1)]]


class TrainedSection(Section):
    """A section with a learning rate and its schedule."""

    if TYPE_CHECKING:
        schedule: Schedule

    @property
    def decay(self) -> Decay:
        """How the learning rate decays to 0 after its warm-up."""
        return self.schedule.name

    @property
    def warmup_fraction(self) -> float:
        """Share of all steps in which the learning rate rises."""
        return self.schedule.parameter or 0.0


class OptimizationConfig(Section):
    """The optimizer of every trained stage. Learning rates and schedules belong to each stage."""

    optimizer: Literal["adamw", "adamw8bit", "adafactor", "muon"] = "adamw"
    """The optimizer, by what it keeps per trained weight: adamw 8 bytes; adamw8bit 2, the same moments in 8 bits (the
    extra bitsandbytes); adafactor next to nothing, without momentum; muon 4, orthogonalized steps for the matrices of
    layers (torch 2.9) and adamw for the rest. Learning rates carry over.

    Source: kedge: adamw is what the default rates were found with
    """

    max_grad_norm: float | None = field(1.0, gt=0)
    """L2 norm to which the gradient is clipped before each step; null disables clipping. In PPO a separate critic's
    gradient is clipped apart from the policy's.

    Source: S0; Ziegler and N+ do not clip
    Too high: a single bad batch can ruin the weights
    Too low: every step is clipped, which in effect lowers the learning rate
    """
    weight_decay: float = field(0.0, ge=0)
    """Decoupled weight decay (as in AdamW), multiplied by the learning rate at each step.

    Source: Ziegler; N+ has PyTorch's default for AdamW, 0.01
    Too high: the weights shrink toward 0, away from the pretrained model
    Too low: no harm: 0 is the usual choice for fine-tuning
    """
    adam_eps: Annotated[float, Gt(0)] | Annotated[dict[Literal["tf1"], Annotated[float, Gt(0)]], Len(1, 1)] = 1e-5
    """Adam's ε, added to the denominator of the step; not used by adafactor. adamw adds it after the bias correction;
    {tf1: 1e-5}: before it, as in OpenAI's code, a factor of 31.6 at step 1.

    Source: N+ and Ziegler
    Too high: weights with small gradients hardly move
    Too low: weights with tiny gradients take full-size, noisy steps
    """
    stages: dict[str, dict[str, Any]] = field({})
    """Other values for single stages: {sft: {adam_eps: 1e-8}}, with sft, reward_model, critic or ppo.

    Source: kedge: one optimizer for all
    Text: a mapping of stages to fields of this section
    """

    def of(self, section: str) -> "OptimizationConfig":
        """The optimizer of the stage with this section: values in `stages` override the others."""
        values = self.model_dump(exclude={"stages"})
        return OptimizationConfig.model_validate({**values, **self.stages.get(section, {})})

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields, with Adam's ε and its place as separate entries."""
        values = self.model_dump(exclude={"stages"})
        if isinstance(self.adam_eps, dict):
            return {**values, "adam_eps": self.adam_eps["tf1"], "adam_eps_mode": "tf1"}
        return {**values, "adam_eps_mode": "torch"}

    @check
    def _check_stages(self) -> None:
        known = type(self).model_fields.keys() - {"stages"}
        for section, values in self.stages.items():
            if section not in TRAINED:
                raise ValueError(f"optimization.stages has {section}, which is not one of {', '.join(TRAINED)}")
            if unknown := [name for name in values if name not in known]:
                raise ValueError(f"optimization.stages: {unknown[0]} is not one of {', '.join(sorted(known))}")
            try:
                self.of(section)
            except ValidationError as error:
                [first, *_] = error.errors()
                name = ".".join([section, *map(str, first["loc"][:1])])  # an error about several fields names none
                reason = first["msg"].removeprefix("Value error, ")
                raise ValueError(f"optimization.stages: {name}: {reason}") from None

    @check
    def _check_form(self) -> None:
        if self.optimizer != "adamw" and isinstance(self.adam_eps, dict):
            raise ValueError(
                f"optimization.adam_eps={{tf1: {self.adam_eps['tf1']:g}}} is TensorFlow's Adam, and "
                f"optimization.optimizer={self.optimizer} has no such form; use optimizer=adamw, or a number"
            )
