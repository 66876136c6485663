"""Lists the functions that are called after each PPO update, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kedge.runs.training import Callback, watched
from kedge.stages.ppo.log import Event, Made, PpoLog
from kedge.stages.ppo.measurements import Measurements
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.trainer import Trainer
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.controllers import EarlyEnd


def observers_of(
    trainer: Trainer,
    log: PpoLog,
    measurements: Measurements,
    loop: CheckpointedLoop,
    *,
    callback: Callback | None,
    on_update: Callable[[int, Roles], None] | None,
) -> Iterator[Callable[[Event], object]]:
    """The functions to call after each update, in order: log it, prepare the next one, and show it to the user.

    The user's functions come last, because they may end the run; they see no update that the guard dropped.
    """
    settings = trainer.run_settings.ppo
    roles = trainer.roles
    early_end = EarlyEnd(settings.eval_patience, settings.max_kl, loop)
    warmup = trainer.warmup

    def adapt_coefficients(event: Event) -> None:
        if isinstance(event, Made) and trainer.trains_policy and not event.result.refused:
            trainer.coefficients.adapt(event.metrics, num_responses=len(event.experience.scores))

    def compare_with_best(event: Event) -> None:
        if trainer.trains_policy:  # until the critic's warm-up ends, the metrics are the start's
            loop.observe(event.update, event.metrics)

    yield log.after_update
    yield adapt_coefficients
    yield measurements.after_update
    yield compare_with_best
    yield lambda event: early_end.observe(event.metrics)
    if warmup is not None:

        def end_warmup(event: Event) -> None:
            if isinstance(event, Made) and (line := warmup.observe(event.update, event.metrics)):
                log.progress.say(line)

        yield end_warmup
    if callback is not None:
        policy = roles.actor_critic.policy.causal
        show = watched(callback, trainer.run, loop, settings.num_updates, model=policy, tokenizer=roles.tokenizer)
        yield lambda event: show(event.update, event.metrics) if isinstance(event, Made) else None
    if on_update is not None:
        yield lambda event: on_update(event.update, roles) if isinstance(event, Made) else None
