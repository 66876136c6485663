"""PPO: sample, score, estimate advantages, improve; repeat.

    prompts ─▶ rollout ─▶ scores ─▶ experience ─▶ PPO epochs ─▶ metrics, model/

Source: PPO algorithm 1; spec §§4–6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge.config import Config
from kedge.rollout import BackgroundEngine
from kedge.runs.inputs import Rewards
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import Callback, running, stage_loop, watched
from kedge.stages.planned import PlannedMemory, compared
from kedge.stages.ppo.ahead import SamplingAhead, check_ahead, with_background
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.guarding import new_guard
from kedge.stages.ppo.log import Event, Made, PpoLog, ppo_log, write_roles
from kedge.stages.ppo.measurements import Measurements
from kedge.stages.ppo.result import PpoResult, checkpoint_model, save_result
from kedge.stages.ppo.roles import Roles, load_roles
from kedge.stages.ppo.sampling import SampledBatch, Sampling, prompt_stream
from kedge.stages.ppo.trainer import Trainer
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.checkpoint.state import TrainingState
from kedge.training.controllers import EarlyEnd
from kedge.training.guard import Guard
from kedge.training.runtime import Stopping, Stopwatch


@stage_function("ppo", PpoResult.read)
def run_ppo(
    config: Config,
    *,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
    environment: Callable[[], Any] | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    on_update: Callable[[int, Roles], None] | None = None,
    planned: PlannedMemory | None = None,
    advantage: Callable[..., object] | None = None,
    surrogate: Callable[..., object] | None = None,
) -> PpoResult:
    """Train `config.model` with PPO against `config.reward` on `config.data.prompts`.

    On Ctrl-C, SIGTERM, or an error after the first update, a checkpoint and the policy so far are saved before the
    exception is raised again; no checkpoint if an update is cut short after its first optimizer step. An error in the
    first update, such as a failing reward function, leaves no more than `reward.log` and `incidents.jsonl`.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows instead of `config.data.prompts`.
        eval_prompts: Texts or rows instead of `config.data.eval_prompts`.
        reward: Functions or models instead of `config.reward`.
        environment: A class instead of `config.environment.source`.
        resume: Resume the run in the output folder; start a new one otherwise.
        callback: Called after each update.
        on_update: Like `callback`, but called with the update's number, from 1, and all models of the run.
        planned: The planned memory, which is compared with the measured peak.
        advantage: An estimator instead of `ppo.advantage`; see `OwnAdvantage`.
        surrogate: A function instead of `ppo.policy_loss`; see `own_policy_loss`.

    Raises:
        KedgeError: An input is missing, unreadable or incompatible; raised before training starts.
        KeyboardInterrupt, Terminated: The run was interrupted; see above.
        OutOfMemoryError: Memory ran out; the state after the last whole update is saved.
    """
    config = with_saved_critic(config)
    in_memory = {
        "data.prompts": prompts,
        "data.eval_prompts": eval_prompts,
        "reward": reward,
        "environment.source": environment,
        "ppo.advantage": advantage,
        "ppo.policy_loss": surrogate,
    }
    run = open_run(config, "ppo", in_memory=in_memory, resume=resume)
    with opened_updates(run, callback=callback, on_update=on_update, planned=planned) as updates:
        train(updates)
    return PpoResult.read(run.shared_folder)


def train(updates: Updates) -> None:
    """The PPO loop: each update samples, scores, estimates advantages, and improves policy and critic."""
    sampling = open_sampling(updates)
    for update in updates.steps():
        updates.make(update, sampling.batch, Stopwatch(updates.trainer.run.device))


def open_sampling(updates: Updates) -> Sampling | SamplingAhead:
    """Open the sampling of a run's batches, on demand or ahead; it is resumed with the run."""
    trainer = updates.trainer
    prompts = prompt_stream(trainer, updates.loop)
    check, say = updates.guard.check_rollout, updates.log.progress.say
    engine = trainer.roles.engine
    if not isinstance(engine, BackgroundEngine):
        note = prompts.note if trainer.run_settings.config.data.choice_by_scores else None
        return Sampling(prompts, trainer, check=check, say=say, note=note)
    ahead = SamplingAhead(prompts, trainer, engine, check=check, say=say)
    updates.loop.register_ahead(ahead)
    return ahead


@contextmanager
def opened_updates(
    run: Run,
    *,
    has_prompts: bool = True,
    has_scores: bool = False,
    stop: Stopping | None = None,
    callback: Callback | None,
    on_update: Callable[[int, Roles], None] | None = None,
    planned: PlannedMemory | None = None,
) -> Iterator[Updates]:
    """Load a run's models, start the run, and end it after the block.

    Args:
        run: The run, opened.
        has_prompts: False for a run that gets its prompts later.
        has_scores: True for a run that can get its scores later.
        stop: Set by signals that the caller listens to; None to listen here.
        callback: Called after each update; see `run_ppo`.
        on_update: Called after each update with its number and all models; see `run_ppo`.
        planned: The planned memory; see `run_ppo`.
    """
    config = run.config
    check_ahead(config, run)
    roles = with_background(config, run, load_roles(config, run, has_prompts=has_prompts, has_scores=has_scores))
    with (
        running(run, save=partial(save_result, run, roles)) as summary,
        closing(roles),
        stage_loop(run, model=checkpoint_model(run, roles), stop=stop) as loop,
        ppo_log(trainer := Trainer.of(config, run, roles), loop) as log,
    ):
        guard = trainer.guard = new_guard(run, roles, loop, warn=log.progress.say)
        measurements = Measurements(trainer, log, loop)
        loop.at_end = measurements.at_end
        trainer.register(loop)
        ppo = config.ppo
        early_end = EarlyEnd(ppo.eval_patience, ppo.max_kl, loop)
        shows: list[Callable[[int, Mapping[str, float]], object]] = []
        if callback is not None:
            policy = roles.actor_critic.policy.causal
            shows.append(watched(callback, run, loop, ppo.num_updates, model=policy, tokenizer=roles.tokenizer))
        if on_update is not None:
            shows.append(lambda update, _: on_update(update, roles))
        yield Updates(trainer, guard, log, measurements, loop, early_end, shows)
        summary |= {**loop.summary(), **compared(planned, run.device)}


@dataclass(frozen=True)
class Updates:
    """The updates of a run.

    Attributes:
        trainer: Samples, scores, estimates and improves.
        guard: Watches every update.
        log: Describes and writes them.
        measurements: Measures policy and critic on other prompts.
        loop: Counts the updates, and keeps the best one.
        early_end: Ends the run if an update gives a reason.
        shows: The user's functions, called with the number and the metrics of each update that the guard did not drop.
    """

    trainer: Trainer
    guard: Guard
    log: PpoLog
    measurements: Measurements
    loop: CheckpointedLoop
    early_end: EarlyEnd
    shows: Sequence[Callable[[int, Mapping[str, float]], object]]

    def steps(self) -> Iterator[int]:
        """Restore a resumed run, and yield the numbers of the remaining updates, counted from 1."""
        roles = self.trainer.roles
        self.loop.restore(TrainingState({"actor_critic": roles.actor_critic}, roles.optimizer))
        write_roles(self.trainer.run, roles)
        yield from self.loop.steps(self.trainer.run_settings.ppo.num_updates)

    def make(
        self, update: int, sample: Callable[[int, Stopwatch], SampledBatch], clock: Stopwatch
    ) -> Mapping[str, float]:
        """Make an update, and return its metrics.

        Args:
            update: Its number, from 1.
            sample: Returns its prompts, responses and scores.
            clock: Times it.
        """
        trainer = self.trainer
        trainer.begin(update)
        minibatches = trainer.settings.ppo.num_minibatches
        with self.guard.watching(update, num_passes=trainer.num_passes, num_minibatches=minibatches):
            batch = sample(update, clock)
            self.measurements.at_start(clock)
            with clock.phase("experience"):
                experience = estimated = trainer.estimate(batch.trained, takes_steps=batch.takes_steps)
            if trainer.settings.masks_truncated:
                batch, experience = batch.masked(estimated)
                self.guard.evidence = experience
            with clock.phase("train"):
                result = trainer.improve(experience, takes_steps=batch.takes_steps)
            if trainer.prompt_means is not None:  # of all groups; not before, since a stopped update may be repeated
                trainer.prompt_means.add(batch.scored.prompts, batch.scored.total_scores.tolist())
        if self.guard.dropped:
            metrics = {**self.guard.metrics(), "policy/optimizer_steps": 0, **self.measurements.metrics(update)}
            event = Event(update, metrics)
        else:
            metrics = {
                **self.log.describe(batch, estimated, result),  # scores and lengths include masked responses
                **clock.metrics(num_tokens=batch.num_tokens),
                **batch.costs,
                **trainer.publish(update),
                **self.measurements.metrics(update),
            }
            event = Made(update, metrics, batch, experience, result)
        self._finish(event)
        return event.metrics

    def _finish(self, event: Event) -> None:
        """Log an update, prepare the next one, and show it to the user, whose functions come last: they may end the
        run.
        """
        trainer = self.trainer
        self.log.after_update(event)
        if isinstance(event, Made) and trainer.trains_policy and not event.result.refused:
            trainer.coefficients.adapt(event.metrics, num_responses=len(event.experience.scores))
        self.measurements.after_update(event)
        if trainer.trains_policy:  # during the critic's warm-up, the metrics are those of the start
            self.loop.observe(event.update, event.metrics)
        self.early_end.observe(event.metrics)
        if isinstance(event, Made):
            for phase in filter(None, (trainer.warmup, trainer.frozen)):
                if line := phase.observe(event.update, event.metrics):
                    self.log.progress.say(line)
                    if phase is trainer.frozen:
                        self.guard.forget_steps()  # from now on, a step trains the critic as well
            for show in self.shows:
                show(event.update, event.metrics)
