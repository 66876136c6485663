"""A few fixed prompts, sampled several times in a run: how the responses change as the policy learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kedge.data import Prompt
from kedge.errors import UnscoredError
from kedge.logs.experience_metrics import describe_samples
from kedge.pipelines.ppo.log import PpoLog
from kedge.pipelines.ppo.steps import PpoSteps
from kedge.training.controllers import Coefficients

__all__ = ["FixedPrompts"]

TIMES = 10
"""How often they are sampled in a run, besides the start."""

CLOSEST = 5
"""Fewest updates between two times: a few rows take as long to sample as many."""


@dataclass(frozen=True)
class FixedPrompts:
    """Samples the fixed prompts and writes the responses to `samples.jsonl`. They are not trained on.

    Attributes:
        prompts: The prompts.
        every: Updates between two times.
        steps: The run's.
        log: Receives the responses.
    """

    prompts: Sequence[Prompt]
    every: int
    steps: PpoSteps
    log: PpoLog

    @classmethod
    def of(cls, steps: PpoSteps, log: PpoLog) -> FixedPrompts:
        """The first prompts of the run's data, as many as configured."""
        config, prompts = steps.config, steps.roles.prompts
        return cls(
            prompts[: config.runtime.num_fixed_prompts],
            max(CLOSEST, math.ceil(config.ppo.loop.num_updates / TIMES)),
            steps,
            log,
        )

    def sample(self, update: int, coefficients: Coefficients) -> None:
        """Sample if it is time, with the same random numbers each time: only the policy differs.

        Args:
            update: Updates that the policy has seen; 0 is the start.
            coefficients: The current price of the KL.
        """
        last = self.steps.config.ppo.loop.num_updates
        if not self.prompts or (update % self.every and update != last):
            return
        rollout = self.steps.roll_out(self.prompts, range(len(self.prompts)), update, "fixed prompts")
        try:
            scored = self.steps.score(rollout, self.prompts, update)
        except UnscoredError:  # the reward may skip these few; that says nothing about the run's own batches
            return
        experience = self.steps.collect(scored, coefficients)
        samples = describe_samples(experience, scored.prompts, self.steps.roles.tokenizer, count=len(scored.prompts))
        texts = [prompt.text for prompt in self.prompts]
        self.log.samples.write(update, [sample.as_fixed(texts.index(sample.prompt)) for sample in samples])
