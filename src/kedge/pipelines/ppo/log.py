"""What a PPO run tells of its updates: metrics, details and samples on the disk, a line on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kedge.algorithm.experience import Experience
from kedge.config import Config, field_advice, schedule_in_words
from kedge.inspect.diagnosis import LiveDoctor
from kedge.logs.details import DetailsLog, describe_update
from kedge.logs.experience_metrics import describe_samples
from kedge.logs.metrics import MetricsLog
from kedge.logs.progress import Progress
from kedge.logs.samples import SamplesLog
from kedge.pipelines.ppo.roles import Roles
from kedge.runs.loggers import open_loggers
from kedge.runs.run import Run
from kedge.training.checkpoint.resume import Keeper
from kedge.training.update import UpdateResult

__all__ = ["PpoLog", "ppo_log"]

SHOWN = {
    "score": "reward/score_mean",
    "kl": "objective/kl",
    "entropy": "policy/entropy",
    "clipped": "policy/clip_fraction",
    "explained": "value/explained_variance",
}
"""What the progress display calls the metrics that it shows."""


@dataclass(frozen=True)
class PpoLog:
    """The files of a run, open, and its progress.

    Attributes:
        config: The run's configuration.
        roles: Who takes part.
        metrics: A row per update.
        details: What one number does not tell.
        samples: Responses to read.
        progress: What a terminal shows.
        doctor: Says on it what is wrong, as soon as it shows.
    """

    config: Config
    roles: Roles
    metrics: MetricsLog
    details: DetailsLog
    samples: SamplesLog
    progress: Progress
    doctor: LiveDoctor

    def write(
        self,
        update: int,
        metrics: Mapping[str, float],
        experience: Experience,
        prompts: Sequence[str],
        result: UpdateResult,
    ) -> None:
        """Tell of an update.

        Args:
            update: Its number, from 1.
            metrics: Its figures.
            experience: What it learnt from.
            prompts: One per response.
            result: What it did.
        """
        ppo, passes = self.config.ppo, result.passes
        clip = (
            (ppo.objective.clip_range, ppo.objective.clip_range_high or ppo.objective.clip_range)
            if ppo.objective.policy_loss == "clipped"
            else None
        )
        samples = describe_samples(
            experience,
            prompts,
            self.roles.tokenizer,
            count=self.config.runtime.num_samples,
            entropies=passes[0].entropies if passes else None,
            new_logprobs=passes[-1].logprobs if passes else None,
        )
        self.metrics.write(update, metrics)
        self.details.write(update, describe_update(experience, [each.logprobs for each in passes], clip=clip))
        self.samples.write(update, samples)
        self.progress.update(update, {name: metrics[metric] for name, metric in SHOWN.items() if metric in metrics})
        self.doctor.see(update, metrics)


@contextmanager
def ppo_log(config: Config, run: Run, roles: Roles, keeper: Keeper) -> Iterator[PpoLog]:
    """The log of a run, which says first what is going to happen. No checkpoint knows of rows that the disk lacks."""
    with (
        Progress("ppo", total=config.ppo.loop.num_updates, done=keeper.done) as progress,
        open_loggers(config, run, warn=progress.say) as loggers,
        MetricsLog(run.folder, also=loggers.write) as metrics,
        DetailsLog(run.folder) as details,
        SamplesLog(run.folder, also=loggers.write_samples) as samples,
    ):
        progress.say(schedule_in_words(config, len(roles.prompts)))
        keeper.sync_before_saving(metrics, details, samples)
        doctor = LiveDoctor(
            run.folder, run.facts, config.model_dump(mode="json"), say=progress.say, advice=field_advice
        )
        yield PpoLog(config, roles, metrics, details, samples, progress, doctor)
