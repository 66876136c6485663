"""The work of an update, and the cards for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.cluster.cards import Card
from bench.cluster.shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """One update of PPO.

    Attributes:
        policy: The policy's shape.
        responses: Per update, all prompts together.
        prompt: Mean tokens of a prompt.
        longest_prompt: Tokens.
        response: Mean tokens of a response.
        longest_response: Tokens; where the sampler stops.
        epochs: PPO epochs over the batch.
        minibatches: Optimizer steps per epoch.
        critic: On the policy's trunk, a model of the policy's size, or none.
        reference: Whether a frozen copy of the policy computes log probabilities.
        reward: The reward model's shape; None for a function.
        old_logprobs: Whether the trainer computes the log probabilities of the samples again.
    """

    policy: ModelShape
    responses: int
    prompt: float
    longest_prompt: float
    response: float
    longest_response: float
    epochs: int = 1
    minibatches: int = 1
    critic: Literal["shared", "separate", "none"] = "none"
    reference: bool = True
    reward: ModelShape | None = None
    old_logprobs: bool = True

    @property
    def length(self) -> float:
        """Mean tokens of a row."""
        return self.prompt + self.response

    @property
    def longest(self) -> float:
        """Tokens of the longest possible row."""
        return self.longest_prompt + self.longest_response

    @property
    def tokens(self) -> float:
        """Tokens of the batch."""
        return self.responses * self.length


@dataclass(frozen=True)
class Layout:
    """The division of the work among cards.

    Attributes:
        card: The kind of all cards.
        cards: All of them.
        rollout_cards: Cards of the servers; 0 if they take turns with the trainer on all cards.
        tensor_parallel: Cards of one server.
        staleness: 0: the trainer waits for its batch. 1: the next batch is sampled at the same time. Above 1: servers
            never wait for a batch's longest response.
    """

    card: Card
    cards: int
    rollout_cards: int = 0
    tensor_parallel: int = 1
    staleness: int = 0

    @property
    def apart(self) -> bool:
        """True if servers and trainer have cards of their own."""
        return self.rollout_cards > 0

    @property
    def sampling_cards(self) -> int:
        """Cards that sample."""
        return self.rollout_cards or self.cards

    @property
    def training_cards(self) -> int:
        """Cards that train."""
        return self.cards - self.rollout_cards

    @property
    def servers(self) -> int:
        """Copies of the policy that sample; cards left over idle."""
        return max(1, self.sampling_cards // self.tensor_parallel)

    def between(self, cards: int) -> float:
        """Bandwidth between `cards` cards, byte/s: the link within a machine, the network between machines."""
        return self.card.link if cards <= self.card.linked else self.card.network
