"""The logs of a PPO run: metrics, details and samples in files, progress on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kedge.algorithm.experience import Experience
from kedge.config import Config, config_at, field_advice, schedule_in_words
from kedge.inspect.diagnosis import LiveDoctor
from kedge.logs.details import DetailsLog, describe_update
from kedge.logs.evaluations import CRITIC_CHECKS_FILE, EvaluationsLog
from kedge.logs.experience_metrics import (
    describe_experience,
    describe_samples,
    describe_truncation,
    reference_error,
)
from kedge.logs.metrics import MetricsLog
from kedge.logs.progress import Progress
from kedge.logs.samples import SamplesLog
from kedge.rewards import WeightedReward
from kedge.runs.run import Run
from kedge.runs.training import open_loggers
from kedge.stages.ppo.batch import SampledBatch
from kedge.stages.ppo.roles import Roles
from kedge.training.checkpoint.resume import CheckpointedLoop
from kedge.training.update import UpdateResult

__all__ = ["PpoLog", "ppo_log"]

SHOWN = {
    "score": "reward/score_mean",
    "kl": "objective/kl",
    "entropy": "policy/entropy",
    "clipped": "policy/clip_fraction",
    "explained": "value/explained_variance",
    "constant": "group/constant",
    "eval/score": "eval/score",
    "eval/win_rate": "eval/win_rate",
}
"""The metrics of the progress display, by their displayed name."""

MAX_REFERENCE_ERROR = 0.01
"""Nats per token; over a response of 100 tokens the usual KL is a few nats."""


@dataclass(frozen=True)
class PpoLog:
    """The open logs of a run.

    Attributes:
        config: The run's configuration.
        roles: Its models.
        metrics: A row per update.
        details: Distributions per update.
        samples: Full responses.
        evaluations: The evaluations on held-out prompts.
        critic_checks: The checks of the critic.
        progress: The progress display.
        doctor: Prints serious findings as they appear.
        is_kept: False on a rank whose logs nobody reads.
    """

    config: Config
    roles: Roles
    metrics: MetricsLog
    details: DetailsLog
    samples: SamplesLog
    evaluations: EvaluationsLog
    critic_checks: EvaluationsLog
    progress: Progress
    doctor: LiveDoctor
    is_kept: bool = True

    def describe(
        self, update: int, batch: SampledBatch, experience: Experience, result: UpdateResult
    ) -> dict[str, float]:
        """The metrics of an update's experience, scores and optimizer steps."""
        return {
            **describe_experience(experience, is_exact=self.roles.engine.is_exact),
            **(reference_error(experience) | _reward_error(self.roles.reward) if update == 1 else {}),
            **(describe_truncation(experience) if self.config.rollout.max_staleness else {}),
            **batch.metrics(),
            **result.metrics(),
        }

    @contextmanager
    def saying_missing_eos(self) -> Iterator[None]:
        """Say which score `rollout.missing_eos_score=auto` has become, if this turns out in the block."""
        missing_eos, rollout = self.roles.missing_eos, self.config.rollout
        was_known = missing_eos.is_known
        yield
        score = missing_eos.metrics().get("reward/missing_eos_score")
        if not was_known and rollout.missing_eos_score == "auto" and score is not None:
            effect = f"scores {score:.4g}" if rollout.missing_eos_mode == "replace" else f"loses {-score:.4g}"
            self.progress.say(f"A response without a stop token {effect} (rollout.missing_eos_score=auto).")

    def write(
        self,
        update: int,
        metrics: Mapping[str, float],
        experience: Experience,
        prompts: Sequence[str],
        result: UpdateResult,
    ) -> None:
        """Log an update.

        Args:
            update: Its number, from 1.
            metrics: Its row of `metrics.jsonl`.
            experience: Its experience.
            prompts: One per response.
            result: The result of the PPO epochs.
        """
        self.metrics.write(update, metrics)
        if not self.is_kept:
            return
        passes, loss = result.passes, config_at(self.config, update).ppo
        clipped = loss.policy_loss == "clipped" and loss.ratio == "token"
        clip = (loss.clip_range, loss.clip_range_high or loss.clip_range) if clipped else None
        samples = describe_samples(
            experience,
            prompts,
            self.roles.tokenizer,
            count=self.config.runtime.num_samples,
            entropies=passes[0].entropies if passes else None,
            new_logprobs=passes[-1].logprobs if passes else None,
        )
        self.details.write(update, describe_update(experience, [each.logprobs for each in passes], clip=clip))
        self.samples.write(update, samples)
        self._say_reference_error(metrics.get("objective/reference_error", 0.0))
        self.progress.update(update, {name: metrics[metric] for name, metric in SHOWN.items() if metric in metrics})
        self.doctor.see(update, metrics)

    def _say_reference_error(self, error: float) -> None:
        """Warn if the KL is measured against a reference that rounding has changed."""
        held = self.config.runtime.frozen_dtype
        if error > MAX_REFERENCE_ERROR and held not in ("auto", "fp32"):
            self.progress.say(
                f"Held in {held}, the reference differs from the policy by {error:.2g} nats per token before the first "
                "step, and every KL by as much; runtime.frozen_dtype=auto rounds only what changes no result."
            )


def _reward_error(reward: WeightedReward) -> dict[str, float]:
    """`reward/rounding_error`: how much number formats change the models' scores, times their weights."""
    weights = dict(zip(reward.names, reward.weights, strict=True))
    errors = {name: each.model.rounding_error for name, each in reward.weighted_models.items()}
    known = [abs(weights[name]) * error for name, error in errors.items() if error is not None]
    return {"reward/rounding_error": sum(known)} if known else {}


@contextmanager
def ppo_log(config: Config, run: Run, roles: Roles, loop: CheckpointedLoop) -> Iterator[PpoLog]:
    """Open the logs of a run, print the schedule and the stop tokens, and flush the logs before each checkpoint."""
    with (
        Progress("ppo", total=config.ppo.num_updates, done=loop.done) as progress,
        open_loggers(config, run, warn=progress.say) as loggers,
        MetricsLog(run.folder, also=loggers.write) as metrics,
        DetailsLog(run.folder) as details,
        SamplesLog(run.folder, also=loggers.write_samples) as samples,
        EvaluationsLog(run.folder) as evaluations,
        EvaluationsLog(run.folder, CRITIC_CHECKS_FILE) as critic_checks,
    ):
        progress.say(schedule_in_words(config, len(roles.prompts), len(roles.held_out)))
        progress.say(roles.stop_tokens.line)
        loop.sync_before_saving(run, metrics, details, samples, evaluations, critic_checks)
        doctor = LiveDoctor(
            run.folder, run.facts, config.model_dump(mode="json"), say=progress.say, advice=field_advice
        )
        yield PpoLog(
            config,
            roles,
            metrics,
            details,
            samples,
            evaluations,
            critic_checks,
            progress,
            doctor,
            is_kept=run.ranks.is_first,
        )
