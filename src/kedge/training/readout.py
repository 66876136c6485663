"""A critic without a loss: a read-out of the policy's states, refitted to their returns after every update."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.experience import Experience, Rollout
from kedge.algorithm.readout import ReadoutSums, fit_readout
from kedge.training.learner import LanguageLearner
from kedge.training.supervised.returns import Head


class Readout:
    """Fits the value head to the hidden states and returns of recent updates.

    w, b = the ridge regression of the returns on the states, where an update has (k − 1)/(k + 1) times the weight of
    the next

    The states are those that the policy's first epoch computes anyway: they need no further pass and are not
    kept, only sums over them. The penalty is the one with which each half of the prompts predicts the other best.

    Old states become stale as the policy moves, so their sums decay instead of counting fully for k updates and then
    not at all. With this factor, the sums have the mean age, (k − 1)/2 updates, and the effective number of examples
    of the last k batches, so neither lag nor noise differs; but they need the memory of one batch for any k, and a
    single batch never drops out at once.

    Args:
        learner: Has the policy, whose head is fitted; `actor_critic.readout` keeps the sums.
        experience: The update's responses with their returns.
        num_batches: k.

    Source: POISE (arXiv 2605.07579) reads values from the policy's own states; `fit_readout`.
    """

    def __init__(self, learner: LanguageLearner, experience: Experience, *, num_batches: int) -> None:
        self._learner = learner
        self._experience = experience
        self._decay = (num_batches - 1) / (num_batches + 1)
        self._is_second = second_half(experience.rollout)
        self._is_read = torch.zeros_like(self._is_second)
        head = learner.actor_critic.value_head
        assert head is not None
        self._dim = head.in_features
        self._sums = [ReadoutSums.empty(self._dim) for _ in range(2)]

    @torch.no_grad()
    def read(self, rows: Int[Tensor, " rows"], states: Float[Tensor, "slots dim"]) -> None:
        """Add the states of rows that have not been added yet.

        Args:
            rows: Numbers of the rows.
            states: The state of each of their slots, row by row.
        """
        mask = self._experience.reward_mask[rows]
        states = states[mask[mask | self._experience.action_mask[rows]]]  # with credit by turn, not every action counts
        returns = self._experience.returns[rows][mask]
        is_new = ~self._is_read[rows]
        for sums, is_second in zip(self._sums, (False, True), strict=True):
            chosen = is_new & (self._is_second[rows] == is_second)
            slots = chosen[:, None].expand(mask.shape)[mask]
            sums.add(states[slots], returns[slots])
        self._is_read[rows] = True

    def read_all(self) -> None:
        """Add the states of all rows in separate passes, for an update that trains nothing else."""
        learner = self._learner

        def attempt() -> None:
            for rows, part in learner.micro_batches(self._experience):
                states = learner.value_states(part)
                if len(rows):
                    self.read(rows, states)

        learner.repeated(self._experience, attempt)

    @torch.no_grad()
    def fit(self) -> None:
        """Fit the head to all sums; leaves it as it is if a state or a return is not finite."""
        kept = self._learner.actor_critic.readout
        assert kept is not None
        added = self._learner.ranks.summed(torch.stack([sums.flat() for sums in self._sums]))
        if not added.isfinite().all():
            return
        kept.mul_(self._decay).add_(added)
        halves = [ReadoutSums.of(each, self._dim) for each in kept]
        if halves := [sums for sums in halves if sums.count >= 1]:
            fitted = fit_readout(halves)
            Head(self._learner.actor_critic).set(fitted.weight, fitted.offset)


def second_half(rollout: Rollout) -> Bool[Tensor, " batch"]:
    """Mask of half of the responses: of every second prompt, so that the halves differ in prompts as batches do; or
    every second response, if one of these halves would be empty.
    """
    odd = rollout.group % 2 == 1
    return odd if odd.any() and not odd.all() else torch.ones_like(odd).cumsum(0) % 2 == 0
