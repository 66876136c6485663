"""Counts what the training of a critic holds: PPO's sampling, the fit of the head, and the critic's own passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kedge.config import Config
from kedge.models import ActorCritic, Precision
from kedge.models.hollow import Blueprint, hollow_models
from kedge.models.packing.packed import attention_of_accelerator
from kedge.plan.critic_memory import CriticWork, critic_flops, critic_phases, kept_bytes
from kedge.plan.machine import Phase, Speed
from kedge.plan.workload import Rows, quantiles
from kedge.stages.critic.inputs import as_first_update
from kedge.stages.planning.counting import Figures, count_pass, count_training
from kedge.stages.planning.lengths import Lengths
from kedge.stages.planning.ppo import PpoCount, named, planned_optimizer, rollout_of, split_rows
from kedge.training.supervised.returns import FIT_TOKENS

__all__ = ["CriticCount"]


@dataclass(frozen=True)
class CriticCount:
    """The training of a critic whose passes are counted; attributes as of `PpoCount`, rows of one part.

    Attributes:
        num_rows: Prompts of the data; None if it has more than were read.
    """

    config: Config
    blueprints: Mapping[str, Blueprint]
    rows: Rows
    precision: Precision
    accelerator: bool = False
    num_rows: int | None = None

    stage: ClassVar = "critic"

    @property
    def layers(self) -> dict[str, int]:
        """Blocks of each role."""
        return self.first.layers

    @property
    def first(self) -> PpoCount:
        """PPO's first update, whose responses are sampled in the same way."""
        config = as_first_update(self.config, holds_out=False)
        return PpoCount(config, self.blueprints, self.rows, self.precision, self.accelerator)

    @property
    def work(self) -> CriticWork:
        """The responses of a part, for the sums."""
        settings, step, fit = self.config.critic, self._step, self._pass(FIT_TOKENS)
        sampled = (sum(self.num_prompts) or self.config.rollout.num_prompts) * settings.num_responses
        return CriticWork(
            sampling=replace(self.first.work, reuses_pass=False),
            role="critic" if "critic" in self.blueprints else "policy",
            kept=kept_bytes(max(self.rows.prompts), max(self.rows.responses), sampled),
            fitted=self.rows.tokens / fit.tokens_of(fit.largest),
            passes=settings.num_epochs * self.rows.tokens / step.tokens_of(step.largest),
            steps=settings.num_epochs * self.rows.count / step.count,
            accumulates=len(step.parts) > 1,
            optimizer=planned_optimizer(
                self.config, self.config.optimization.of("critic").optimizer, on_gpu=self.accelerator
            ),
        )

    @property
    def num_prompts(self) -> tuple[int, int]:
        """Prompts that responses are sampled to, and held-out ones; 0 where the number is not known."""
        chosen = self.config.critic.num_prompts or 0
        if self.num_rows is None:
            return chosen, 0
        held_out = 0 if self.config.data.eval_prompts else round(self.num_rows * self.config.data.eval_fraction)
        return chosen or self.num_rows - held_out, held_out

    def phases(self, figures: Figures, speed: Speed | None) -> tuple[Phase, ...]:
        """The phases of the stage."""
        return critic_phases(figures, self.work, speed)

    def num_units(self, lengths: Lengths) -> int | None:
        """Parts of the run; None if the number of prompts is not known."""
        if not self.num_prompts[0]:
            return None
        return sum(math.ceil(each / self.config.rollout.num_prompts) for each in self.num_prompts)

    def sft_steps(self, figures: Figures) -> float | None:
        """The cost of a part in steps of fine-tuning on the same tokens."""
        work = self.work
        return critic_flops(figures, work) / (3 * figures["policy.forward flops"] * work.sampling.scored)

    def figures(self, layers: Mapping[str, int]) -> Figures:
        """The figures of models with so many blocks; see `kedge.plan.critic_memory`."""
        first = self.first
        with hollow_models() as hollow, attention_of_accelerator() if self.accelerator else nullcontext():
            actor_critic, figures = first.actor_critic(hollow, layers)
            policy, critic = actor_critic.policy, actor_critic.critic
            sampling = actor_critic if critic is None else ActorCritic(policy)
            figures |= first.sampling(hollow, sampling, layers)
            figures |= self._fit(actor_critic) | self._values(actor_critic)
            if critic is None:
                head = policy.value_head
                assert head is not None, "a critic without a model is a value head"
                figures["policy.trained"] = float(sum(each.nbytes for each in head.parameters()))
            else:
                figures["policy.trained"] = 0.0
                loss = partial(self._loss, actor_critic, self._step)
                training = count_training([critic], loss, accumulates=len(self._step.parts) > 1)
                figures |= named("train", training)
        return figures

    def _fit(self, actor_critic: ActorCritic) -> Figures:
        rows = self._pass(FIT_TOKENS)
        shapes: list[torch.Size] = []

        def states() -> Tensor:
            found = actor_critic.value_states(rollout_of(rows, rows.largest), **self._numerics).float()
            shapes.append(found.shape)
            return found

        figures = count_pass([actor_critic], states)
        # The sums are in the CPU's memory.
        square = 0.0 if self.accelerator else 8.0 * shapes[0][1] ** 2
        return named("fit", {**figures, "square": square})

    def _values(self, actor_critic: ActorCritic) -> Figures:
        rows = self._pass(None, self.num_prompts[1])
        return named("values", count_pass([actor_critic], partial(self._loss, actor_critic, rows)))

    def _loss(self, actor_critic: ActorCritic, rows: Rows) -> Tensor:
        """As `ReturnsLoss`, whose other numbers are one per token."""
        return actor_critic.values(rollout_of(rows, rows.largest), **self._numerics).square().sum()

    @property
    def _step(self) -> Rows:
        """The responses of an optimizer step."""
        return self._like(self.config.critic.batch_size, self.config.runtime.first_pass_tokens)

    def _pass(self, otherwise: int | None, prompts: int = 0) -> Rows:
        """As many responses as fill a pass, if there are so many.

        Args:
            otherwise: Tokens of a pass where the run sets no limit.
            prompts: Of which they are; 0 for those that are trained on.
        """
        budget = self.config.runtime.first_pass_tokens or otherwise
        there = (prompts or self.num_prompts[0]) * self.config.critic.num_responses
        if budget is None:
            return self._like(there or self.rows.count, None)
        filling = budget // min(self.rows.lengths) + 1
        return self._like(min(there or filling, filling), budget)

    def _like(self, count: int, budget: int | None) -> Rows:
        """So many responses as of a part."""
        return split_rows(quantiles(self.rows.prompts, count), (max(self.rows.responses),) * count, budget)

    @property
    def _numerics(self) -> dict[str, Any]:
        after_last = self.config.ppo.score_at == "after_last"
        return {"precision": self.precision, "value_after_last": after_last}
