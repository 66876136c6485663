"""PPO-ptx: adds pretraining cross-entropy to the PPO steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.data import EncodedExample
from kedge.system.ranks import ALONE, PassTokens, Ranks
from kedge.training.runtime import stream
from kedge.training.supervised.losses import CompletionLoss


@dataclass(frozen=True)
class PretrainingMix:
    """γ_ptx · cross-entropy of pretraining texts, with a new batch per optimizer step.

    Args:
        loss: The cross-entropy on the policy.
        examples: The encoded texts.
        coef: γ_ptx; 27.8 in InstructGPT.
        batch_size: Texts per optimizer step.
        micro_batch_tokens: Tokens per forward pass; None uses the whole batch.
        seed: Seed of the draws.
        ranks: They share the texts of a batch.

    Source: InstructGPT §3.5; spec §6.33.
    """

    loss: CompletionLoss
    examples: Sequence[EncodedExample]
    coef: float
    batch_size: int
    micro_batch_tokens: PassTokens
    seed: int
    ranks: Ranks = ALONE

    def draw(self, update: int) -> PretrainingDraws:
        """The batches of one update, from its own random stream, so they do not depend on earlier updates."""
        return PretrainingDraws(self, stream(self.seed, "pretraining", update))


@dataclass(frozen=True)
class PretrainingDraws:
    """Called once per optimizer step: draws a batch with replacement."""

    mix: PretrainingMix
    generator: torch.Generator

    def __call__(self) -> PretrainingBatch:
        """The loss of the next batch."""
        mix = self.mix
        rows = torch.randint(len(mix.examples), (mix.batch_size,), generator=self.generator).tolist()
        return PretrainingBatch(mix, [mix.examples[row] for row in rows])


@dataclass(frozen=True)
class PretrainingBatch:
    """The loss of a batch, in parts that sum to it over all ranks; each iteration computes it again."""

    mix: PretrainingMix
    batch: Sequence[EncodedExample]

    def __iter__(self) -> Iterator[Tensor]:
        """This rank's share of the loss, one micro-batch at a time."""
        mix = self.mix
        batch = self.batch
        total = sum(mix.loss.weight(example) for example in batch)
        for part in mix.ranks.plan([mix.loss.length(example) for example in batch], mix.micro_batch_tokens):
            loss = mix.coef * mix.loss.sums([batch[row] for row in part.rows])["loss"] / total
            yield loss if part.counts else loss * 0.0
