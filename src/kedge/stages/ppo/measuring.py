"""What a run measures on prompts that it does not train on: fixed prompts, held-out prompts, the critic."""

from __future__ import annotations

from kedge.logs.stopwatch import Stopwatch
from kedge.stages.ppo.critic_check import CriticChecks
from kedge.stages.ppo.evaluating import HeldOutEvaluation
from kedge.stages.ppo.fixed_prompts import FixedPrompts
from kedge.stages.ppo.log import PpoLog
from kedge.stages.ppo.steps import PpoSteps
from kedge.training.checkpoint.resume import CheckpointedLoop
from kedge.training.checkpoint.run_state import Stateful
from kedge.training.controllers import Coefficients

__all__ = ["Measurements"]


class Measurements:
    """The measurements of a run: at its start, and after the updates in which they are due.

    Args:
        steps: The run's steps.
        log: The run's log.
        loop: The run's loop, which keeps the best update.
    """

    def __init__(self, steps: PpoSteps, log: PpoLog, loop: CheckpointedLoop) -> None:
        self._fixed, self._loop, self._is_start = FixedPrompts.of(steps, log), loop, loop.done == 0
        self._held_out, self._critic = HeldOutEvaluation(steps, log), CriticChecks(steps, log)

    @property
    def state(self) -> dict[str, Stateful]:
        """What is saved and resumed with the run."""
        return self._held_out.state

    def at_start(self, coefficients: Coefficients, clock: Stopwatch) -> None:
        """Measure the untrained policy and critic, once.

        Called after the first responses are scored: the score for a missing stop token can depend on them.
        """
        if self._is_start:
            self._is_start = False
            with clock.paused():
                self.sample_fixed(0, coefficients)
                self._loop.see(0, self._held_out.measure(0, coefficients))
                self._critic.measure(0, coefficients)

    def metrics(self, update: int, coefficients: Coefficients) -> dict[str, float]:
        """The measurements of policy and critic that are due after an update."""
        return {**self._held_out.measure(update, coefficients), **self._critic.measure(update, coefficients)}

    def sample_fixed(self, update: int, coefficients: Coefficients) -> None:
        """Show the responses to the fixed prompts if this is due."""
        self._fixed.sample(update, coefficients)
