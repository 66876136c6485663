"""A few fixed prompts, sampled repeatedly during a run to show how the responses change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kedge.data import Prompt
from kedge.errors import NonfiniteScoreError, UnscoredError
from kedge.logs.experience_metrics import describe_samples
from kedge.stages.ppo.log import PpoLog
from kedge.stages.ppo.steps import PpoSteps
from kedge.training.controllers import Coefficients

__all__ = ["FixedPrompts"]

TIMES = 10
"""Number of times they are sampled in a run, not counting the start."""

MIN_INTERVAL = 5
"""Minimum number of updates in between, because sampling a few rows takes as long as sampling many."""


@dataclass(frozen=True)
class FixedPrompts:
    """Samples the fixed prompts and writes the responses to `samples.jsonl`. They are not trained on.

    Attributes:
        prompts: The prompts.
        every: Interval in updates.
        steps: The run's steps.
        log: The run's log.
    """

    prompts: Sequence[Prompt]
    every: int
    steps: PpoSteps
    log: PpoLog

    @classmethod
    def of(cls, steps: PpoSteps, log: PpoLog) -> FixedPrompts:
        """The first prompts of the run's data; their number is `runtime.num_fixed_prompts`."""
        config, prompts = steps.config, steps.roles.prompts
        return cls(
            prompts[: config.runtime.num_fixed_prompts],
            max(MIN_INTERVAL, math.ceil(config.ppo.num_updates / TIMES)),
            steps,
            log,
        )

    def sample(self, update: int, coefficients: Coefficients) -> None:
        """Sample if this update is due, always with the same random numbers, so that only the policy differs.

        Args:
            update: Updates that the policy has completed; 0 is the start.
            coefficients: The current coefficients.
        """
        last = self.steps.config.ppo.num_updates
        if not self.prompts or (update % self.every and update != last):
            return
        rollout = self.steps.roll_out(self.prompts, range(len(self.prompts)), "fixed prompts", policy_version=update)
        try:
            scored = self.steps.score(rollout, self.prompts, update)
        except (UnscoredError, NonfiniteScoreError):  # unlike a training batch without scores, this is not an error
            return
        experience = self.steps.collect(scored, coefficients)
        samples = describe_samples(experience, scored.prompts, self.steps.roles.tokenizer, count=len(scored.prompts))
        numbers = scored.rollout.group.tolist()
        self.log.samples.write(update, [sample.as_fixed(n) for n, sample in zip(numbers, samples, strict=True)])
