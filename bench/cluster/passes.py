"""Seconds of passes through models, and of sending the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.cluster.practice import Practice
from bench.cluster.rollout import attention_flops
from bench.cluster.shape import ModelShape
from bench.cluster.work import Layout, Workload

GATHERED = 2.0
"""Bytes per parameter that a card receives when sharded weights are gathered in bf16."""

REDUCED = 4.0
"""Bytes per parameter that a card sends when gradients are summed in fp32."""


@dataclass(frozen=True)
class Pass:
    """Seconds of one kind of pass over the batch.

    Attributes:
        arithmetic: At the practical share of the peak.
        communication: Gathering weights and summing gradients, which runs at the same time.
    """

    arithmetic: float
    communication: float

    @property
    def seconds(self) -> float:
        """The greater of the two: they overlap."""
        return max(self.arithmetic, self.communication)

    @property
    def limit(self) -> Literal["arithmetic", "the network"]:
        """The one of the two that takes longer."""
        return "arithmetic" if self.arithmetic >= self.communication else "the network"


def token_flops(shape: ModelShape, length: float) -> float:
    """FLOPs of a forward pass per token: two per weight, and attention, which sees half the row on average."""
    return 2.0 * shape.active + attention_flops(shape.layers, shape.hidden, length / 2.0)


def experience_time(work: Workload, layout: Layout, practice: Practice, micro_batch: float) -> Pass:
    """Forward passes over the batch: old log probabilities, reference, values of a separate critic, reward model."""
    models = [work.policy] * (work.old_logprobs + work.reference + (work.critic == "separate"))
    models += [work.reward] if work.reward else []
    cards = max(1, layout.training_cards)
    flops = sum(work.tokens * token_flops(model, work.length) for model in models)
    arithmetic = flops / (cards * layout.card.flops * practice.forward)
    rounds = max(1.0, work.tokens / cards / micro_batch)
    received = sum(rounds * GATHERED * model.parameters for model in models)
    return Pass(arithmetic, _communication(received, layout, practice))


def training_time(work: Workload, layout: Layout, practice: Practice, micro_batch: float) -> Pass:
    """All epochs of the policy and of a separate critic: three times a forward pass, and what FSDP moves."""
    models = 2 if work.critic == "separate" else 1
    cards = max(1, layout.training_cards)
    flops = 3.0 * work.tokens * token_flops(work.policy, work.length)
    arithmetic = models * work.epochs * flops / (cards * layout.card.flops * practice.train)
    # Every optimizer step has at least one round. Weights are gathered for both directions of each round; gradients
    # are also summed once per round, since only a shard of them is kept.
    rounds = work.minibatches * max(1.0, work.tokens / work.minibatches / cards / micro_batch)
    moved = rounds * (2 * GATHERED + REDUCED) * work.policy.parameters
    return Pass(arithmetic, _communication(models * work.epochs * moved, layout, practice))


def sync_time(work: Workload, layout: Layout, practice: Practice) -> float:
    """Seconds to bring the weights to the servers in bf16: over the link within a machine, else over the network."""
    return 2.0 * work.policy.parameters / (layout.between(layout.cards) * practice.sync)


def _communication(received: float, layout: Layout, practice: Practice) -> float:
    cards = layout.training_cards
    if cards <= 1:
        return 0.0
    return received * (cards - 1) / cards / (layout.between(cards) * practice.collective)
