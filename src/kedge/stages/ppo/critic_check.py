"""Checks of the critic during PPO, every `ppo.critic_check` updates."""

from __future__ import annotations

import time

from kedge.errors import NonfiniteScoreError, UnscoredError
from kedge.logs.critic_checks import check_line, check_row, describe_check
from kedge.stages.ppo.log import PpoLog
from kedge.stages.ppo.prefixes import NOTHING_TO_CHECK, sample_prefixes
from kedge.stages.ppo.steps import PpoSteps
from kedge.training.checkpoint.state import random_state, restore_random_state
from kedge.training.controllers import Coefficients

__all__ = ["CriticChecks"]


class CriticChecks:
    """Checks the critic on the held-out prompts every `ppo.critic_check` updates, at the start and at the end.

    The same random numbers are used each time, and the global generators are restored afterwards, so that training does
    not depend on it.

    Args:
        steps: The run's steps.
        log: The run's log.
    """

    def __init__(self, steps: PpoSteps, log: PpoLog) -> None:
        self._steps, self._log = steps, log
        self._settings = steps.config.ppo

    def measure(self, update: int, coefficients: Coefficients) -> dict[str, float]:
        """The metrics of the critic after an update, if a check is due; its details are also logged by themselves.

        Args:
            update: Updates completed; 0 is the start.
            coefficients: The current coefficients.

        Raises:
            RewardError: A reward failed.
        """
        settings, last = self._settings, self._steps.config.ppo.num_updates
        if settings.critic_check is None or (update % settings.critic_check and update != last):
            return {}
        started, generators = time.perf_counter(), random_state()
        try:
            metrics = self._measure(update, coefficients)
        finally:
            restore_random_state(*generators)
        return {**metrics, "time/critic_check": time.perf_counter() - started}

    def _measure(self, update: int, coefficients: Coefficients) -> dict[str, float]:
        settings, steps = self._settings, self._steps.at(max(1, update), coefficients)
        try:
            sample = sample_prefixes(
                steps,
                steps.roles.held_out[: settings.critic_check_prompts],
                coefficients,
                num_prefixes=settings.critic_check_prefixes,
                num_continuations=settings.critic_check_continuations,
                policy_version=update,
            )
        except (UnscoredError, NonfiniteScoreError) as error:  # not an error, because nothing is trained on it
            self._log.progress.say(f"The critic was not checked after update {update}: {error}")
            return {}
        if not sample.num:
            self._log.progress.say(f"The critic was not checked after update {update}: {NOTHING_TO_CHECK}")
            return {}
        test = sample.test()
        self._log.critic_checks.write(update, check_row(test, sample.listed()))
        self._log.progress.say(check_line(test, update))
        return describe_check(test)
