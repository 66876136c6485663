"""A few prompts that are asked again and again: how the answers to one question change as the policy learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kedge.data import Prompt
from kedge.errors import UnscoredError
from kedge.logs.experience_metrics import describe_samples
from kedge.pipelines.ppo.coefficients import Coefficients
from kedge.pipelines.ppo.log import PpoLog
from kedge.pipelines.ppo.steps import PpoSteps

__all__ = ["FixedPrompts"]

TIMES = 10
"""How often they are asked in a run, besides its start."""

CLOSEST = 5
"""Updates between two times, at least: a few rows are sampled no faster than many."""


@dataclass(frozen=True)
class FixedPrompts:
    """Asks, and writes the answers to `samples.jsonl`. Nothing is learnt from them.

    Attributes:
        prompts: What is asked.
        every: Updates from one time to the next.
        steps: The run's.
        log: Where the answers go.
    """

    prompts: Sequence[Prompt]
    every: int
    steps: PpoSteps
    log: PpoLog

    @classmethod
    def of(cls, steps: PpoSteps, log: PpoLog) -> FixedPrompts:
        """The first prompts of the run's data, as many as are configured."""
        config, prompts = steps.config, steps.roles.prompts
        return cls(
            prompts[: config.runtime.num_fixed_prompts],
            max(CLOSEST, math.ceil(config.ppo.loop.num_updates / TIMES)),
            steps,
            log,
        )

    def ask(self, update: int, coefficients: Coefficients) -> None:
        """Ask if it is time, with the same random numbers each time: what differs is the policy.

        Args:
            update: How many updates the policy has seen; 0 is the start.
            coefficients: What a token's KL costs.
        """
        last = self.steps.config.ppo.loop.num_updates
        if not self.prompts or (update % self.every and update != last):
            return
        rollout = self.steps.roll_out(self.prompts, update, "fixed prompts")
        try:
            scored = self.steps.score(rollout, self.prompts, update)
        except UnscoredError:  # the reward has nothing to say of these few; the run's own batches are another matter
            return
        experience = self.steps.weigh(scored, coefficients)
        samples = describe_samples(experience, scored.prompts, self.steps.roles.tokenizer, count=len(scored.prompts))
        texts = [prompt.text for prompt in self.prompts]
        self.log.samples.write(update, [sample.as_fixed(texts.index(sample.prompt)) for sample in samples])
