"""Evaluations of a control run: episodes with the most likely actions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kedge.config import Config
from kedge.gym.evaluate import play_episodes
from kedge.stages.control.parts import Parts, make_run_environments
from kedge.training.runtime import stream_seed

__all__ = ["Evaluations"]


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run, in environments of their own, always from the same seeds.

    Attributes:
        config: The run's configuration.
        parts: Its parts.
    """

    config: Config
    parts: Parts

    def metrics(self, update: int) -> dict[str, float]:
        """`eval/…` of an update after which the policy is evaluated; none of others."""
        settings = self.config.control
        every, last = settings.eval_every, settings.num_updates
        if every is None or (update % every and update != last):
            return {}
        seed = stream_seed(self.config.runtime.seed, "evaluation")
        # As many as in training, also for fewer episodes: a function may make a fixed number.
        environments = make_run_environments(self.config, self.parts.spec, settings.num_envs, seed)
        try:
            played = play_episodes(
                environments, self.parts.policy, self.parts.normalization, num_episodes=settings.eval_episodes
            )
        finally:
            environments.close()
        returns = [episode.total for episode in played]
        return {
            "eval/return_mean": float(np.mean(returns)),
            "eval/return_std": float(np.std(returns)),
            "eval/length_mean": float(np.mean([episode.length for episode in played])),
        }
