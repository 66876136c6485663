"""Counts what fine-tuning and the training of a reward model hold."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kedge.config import Config
from kedge.data import EncodedExample
from kedge.models import Precision, TokenRows, autocast
from kedge.models.hollow import Blueprint, hollow_models
from kedge.models.packing.packed import attention_of_accelerator
from kedge.plan.machine import Phase, Speed
from kedge.plan.supervised_memory import SupervisedWork, supervised_phases
from kedge.plan.workload import Rows, quantiles
from kedge.runs.frozen import adapter_of
from kedge.stages.planning.counting import Figures, count_training
from kedge.stages.planning.lengths import Lengths
from kedge.stages.planning.ppo import hold_base, named, planned_optimizer, sizes_of
from kedge.system.ranks import ALONE
from kedge.training.supervised.loop import count_steps
from kedge.training.supervised.losses import CompletionLoss

__all__ = ["Supervised", "SupervisedCount", "supervised_rows"]

Supervised = Literal["sft", "reward"]


def supervised_rows(config: Config, stage: Supervised, lengths: Lengths) -> Rows:
    """The examples of a step; a comparison is one of twice the length."""
    count = config.sft.batch_size if stage == "sft" else config.reward_model.batch_size
    each = 1 if stage == "sft" else 2
    prompts = tuple(each * length for length in quantiles(lengths.prompts, count))
    answers = tuple(each * length for length in quantiles(lengths.completions, count))
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    parts = ALONE.plan(whole, config.runtime.first_pass_tokens)
    return Rows(prompts, answers, tuple(tuple(part.rows) for part in parts))


@dataclass(frozen=True)
class SupervisedCount:
    """A supervised stage whose passes are counted; attributes as of `PpoCount`."""

    config: Config
    stage: Supervised
    blueprints: Mapping[str, Blueprint]
    rows: Rows
    precision: Precision
    accelerator: bool = False

    @property
    def role(self) -> str:
        """The model that is trained."""
        return next(iter(self.blueprints))

    @property
    def layers(self) -> dict[str, int]:
        """Its blocks."""
        return {role: each.layers for role, each in self.blueprints.items()}

    @property
    def work(self) -> SupervisedWork:
        """The step, for the sums."""
        section = "sft" if self.stage == "sft" else "reward_model"
        passes = self.rows.tokens / self.rows.tokens_of(self.rows.largest)
        optimizer = planned_optimizer(
            self.config, self.config.optimization.of(section).optimizer, on_gpu=self.accelerator
        )
        return SupervisedWork(self.role, passes, len(self.rows.parts) > 1, optimizer)

    def phases(self, figures: Figures, speed: Speed | None) -> tuple[Phase, ...]:
        """The phases of a step."""
        return supervised_phases(figures, self.work, speed)

    def num_units(self, lengths: Lengths) -> int | None:
        """Optimizer steps of the run; None if the number of examples is not known."""
        if lengths.rows is None:
            return None
        settings = self.config.sft if self.stage == "sft" else self.config.reward_model
        return count_steps(lengths.rows, num_epochs=settings.num_epochs, batch_size=settings.batch_size)

    def sft_steps(self, figures: Figures) -> float | None:
        """Not told: a step is one."""
        return None

    def figures(self, layers: Mapping[str, int]) -> Figures:
        """The figures of a model with so many blocks."""
        with hollow_models() as hollow, attention_of_accelerator() if self.accelerator else nullcontext():
            blueprint, adapter = self.blueprints[self.role], adapter_of(self.config)
            config = blueprint.with_layers(layers[self.role])
            places, rows = self.rows.largest, self.rows
            if self.stage == "sft":
                model = hollow.language(config, adapter=adapter)
                hold_base(self.config, model, blueprint)
                policy_loss = CompletionLoss(model, self.precision)
                examples = [EncodedExample([1] * rows.prompts[row], [1] * rows.responses[row]) for row in places]

                def loss() -> Tensor:
                    return policy_loss.sums(examples)["loss"]
            else:
                model = hollow.scalar(config, adapter=adapter)
                hold_base(self.config, model, blueprint)
                lengths = [(rows.prompts[row] + rows.responses[row]) // 2 for row in places for _ in range(2)]
                texts = TokenRows.of([[1] * length for length in lengths])

                def loss() -> Tensor:
                    with autocast(self.precision, model.device):
                        return model.scores(texts).sum()  # the loss itself has a number per text

            figures = sizes_of(self.role, model)
            return figures | named("train", count_training([model], loss, accumulates=len(rows.parts) > 1))
