"""PPO-ptx: pretraining cross-entropy mixed into the PPO steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.data import EncodedExample
from kedge.models import budget_batches
from kedge.training.runtime import stream
from kedge.training.supervised.losses import CompletionLoss

__all__ = ["PretrainingMix"]


@dataclass(frozen=True)
class PretrainingMix:
    """γ_ptx · cross-entropy of pretraining texts, one fresh batch per optimiser step.

    Args:
        loss: The cross-entropy on the policy.
        examples: The encoded texts.
        coef: γ_ptx; InstructGPT takes 27.8.
        batch_size: Texts per optimiser step.
        micro_batch_tokens: Tokens per forward pass; None takes the whole batch.
        seed: Of the draws.

    Source: InstructGPT §3.5; spec §6.33.
    """

    loss: CompletionLoss
    examples: Sequence[EncodedExample]
    coef: float
    batch_size: int
    micro_batch_tokens: int | None
    seed: int

    def draw(self, update: int) -> PretrainingDraws:
        """The batches of one update, an own random stream: what is drawn does not depend on the updates before."""
        return PretrainingDraws(self, stream(self.seed, "pretraining", update))


@dataclass(frozen=True)
class PretrainingDraws:
    """Called once per optimiser step: the step's loss in parts that add up to it."""

    mix: PretrainingMix
    generator: torch.Generator

    def __call__(self) -> Iterator[Tensor]:
        """Draw a batch, with replacement, and yield its loss part by part."""
        mix = self.mix
        rows = torch.randint(len(mix.examples), (mix.batch_size,), generator=self.generator).tolist()
        batch = [mix.examples[row] for row in rows]
        total = sum(mix.loss.weight(example) for example in batch)
        for part in budget_batches([mix.loss.length(example) for example in batch], mix.micro_batch_tokens):
            yield mix.coef * mix.loss.sums([batch[row] for row in part])["loss"] / total
