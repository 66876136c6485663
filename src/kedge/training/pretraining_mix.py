"""PPO-ptx: adds pretraining cross-entropy to the PPO steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kedge.data import EncodedExample
from kedge.ranks import ALONE, PassTokens, Ranks
from kedge.training.runtime import stream
from kedge.training.supervised.losses import CompletionLoss
from kedge.training.update import ExtraLoss


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

    def draw(self, update: int) -> ExtraLoss:
        """Draw texts with replacement, and return the losses of an update's steps.

        An update has its own random stream, so that its draws do not depend on earlier updates.
        """
        generator = stream(self.seed, "pretraining", update)
        while True:
            rows = torch.randint(len(self.examples), (self.batch_size,), generator=generator).tolist()
            yield partial(self.shares, [self.examples[row] for row in rows])

    def shares(self, batch: Sequence[EncodedExample]) -> Iterator[Tensor]:
        """Yield this rank's shares of a batch's loss, one micro-batch at a time; over all ranks, they sum to it."""
        total = sum(map(self.loss.weight, batch)) or 1  # rows without a learned token have no weight
        for part in self.ranks.plan(list(map(self.loss.length, batch)), self.micro_batch_tokens):
            loss = self.coef * self.loss.sums([batch[row] for row in part.rows])["loss"] / total
            yield loss if part.counts else loss * 0.0
