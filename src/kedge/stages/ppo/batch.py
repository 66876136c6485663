"""The responses of an update: those that were sampled, and those of them that it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.algorithm.experience import Rollout
from kedge.algorithm.group_advantages import GroupScores, group_scores
from kedge.data import Prompt
from kedge.logs.experience_metrics import describe_responses
from kedge.logs.group_metrics import describe_groups
from kedge.rewards.score import ScoredRollout

__all__ = ["SampledBatch"]


@dataclass(frozen=True)
class SampledBatch:
    """The responses of an update.

    Attributes:
        prompts: The prompts that were drawn; the groups are numbered by their places.
        rollouts: Everything that was sampled, greedy responses included.
        num_sampled: Responses that were sampled, without the greedy ones.
        scored: Those of them that have a score and, where it is needed, a greedy response that has one.
        trained: Those of them that the update trains on; where `is_flat`, those that it only evaluates.
        is_flat: Groups without spread were to be left out, and no other group was found: no step is taken.
        num_rounds: Rounds of sampling.
    """

    prompts: Sequence[Prompt]
    rollouts: Sequence[Rollout]
    num_sampled: int
    scored: ScoredRollout
    trained: ScoredRollout
    is_flat: bool = False
    num_rounds: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and responses that were sampled, without padding."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def num_scored(self) -> int:
        """Responses that have a score, and could be trained on."""
        return self.scored.rollout.num_responses

    @property
    def num_unused(self) -> int:
        """Responses that have a score, and that the update does not train on."""
        return self.num_scored if self.is_flat else self.num_scored - self.trained.rollout.num_responses

    @property
    def groups(self) -> GroupScores:
        """The scores by prompt."""
        return group_scores(self.scored.total_scores, self.scored.rollout.group)

    def metrics(self) -> dict[str, float]:
        """Terms of the reward, spread of the groups, and figures of all responses if not all are trained on."""
        rollout, scores = self.scored.rollout, self.scored.total_scores
        groups = describe_groups(rollout, scores)
        if groups:
            groups |= {
                "group/resamples": self.num_rounds - 1,
                "group/sampled": self.num_sampled,
                "group/unused": self.num_unused,
            }
        return {
            **(describe_responses(rollout, scores) if self.num_unused else {}),
            **self.scored.metrics(),
            "reward/unscored": float(self.num_sampled - self.num_scored),
            **groups,
        }
