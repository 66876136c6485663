"""Control: play, estimate advantages, improve; repeat. The update is the one that trains language models.

    environments ─▶ steps ─▶ experience ─▶ PPO epochs ─▶ metrics, model/

Source: PPO algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

from kedge.config import Config
from kedge.gym.experience import experience_of
from kedge.gym.rollout import collect_steps
from kedge.logs.stopwatch import Stopwatch
from kedge.runs.out_of_memory import stage_function
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.training import Callback, logged_steps, running, stage_loop, watched
from kedge.stages.control.describe import SHOWN, describe
from kedge.stages.control.evaluating import Evaluations
from kedge.stages.control.improving import improve
from kedge.stages.control.parts import Given, Parts, load_parts
from kedge.stages.control.result import ControlResult, checkpoint_model, save_result
from kedge.stages.control.video import check_video, record_video
from kedge.system.ranks import adaptive_part, budget_metrics
from kedge.training.checkpoint.resume import CheckpointedLoop
from kedge.training.checkpoint.run_state import TrainingState
from kedge.training.runtime import memory_in_use, stream

__all__ = ["run_control"]

AfterUpdate = Callable[[int, Mapping[str, float]], None]
"""Called with each update and its metrics."""


@stage_function("control", ControlResult.read)
def run_control(
    config: Config, *, given: Given | None = None, resume: Resume | None = None, callback: Callback | None = None
) -> ControlResult:
    """Train a policy in `config.control.env`.

    On Ctrl-C, SIGTERM or an error after the first update, a checkpoint and the policy so far are saved before the
    exception is raised again. An error in the first update, such as a failing environment, leaves no folder.

    Args:
        config: The resolved configuration.
        given: Functions from Python in place of configured names.
        resume: Resume the run in the output folder; start it if there is none. Every episode begins from a seed of its
            own, so that those under way are played again up to where they were.
        callback: Called after each update.

    Raises:
        KedgeError: The environment cannot be made, or its spaces are not supported; one line, before training starts.
        KeyboardInterrupt, Terminated: The run was interrupted; policy and checkpoint are saved.
        OutOfMemoryError: Memory ran out; the state after the last whole update is saved.
    """
    given = given or Given()
    run = open_run(config, "control", in_memory=given.named(), resume=resume)
    parts = load_parts(config, run, given)
    if config.control.video:
        check_video(config, parts)
    with closing(parts.environments), running(config, run, save=partial(save_result, config, run, parts)) as summary:
        with stage_loop(config, run, model=checkpoint_model(config, parts)) as loop:
            after_update = watched(callback, run, loop, config.control.num_updates, model=parts.policy)
            train(config, run, parts, loop, after_update)
            summary |= loop.summary()
        if config.control.video:
            record_video(config, parts, run.folder)
    return ControlResult.read(run.folder)


def train(config: Config, run: Run, parts: Parts, loop: CheckpointedLoop, after_update: AfterUpdate) -> None:
    """The loop: each update plays, estimates advantages, and improves policy and critic."""
    settings, gae = config.control, config.control
    with logged_steps(config, run, loop, settings.num_updates, shown=SHOWN) as log:
        added = adaptive_part(run.micro_batch_tokens)
        loop.restore(TrainingState({"actor_critic": parts.policy}, parts.optimizer, parts.resumed(), added=added))
        evaluations = Evaluations(config, parts)
        for update in loop.steps(settings.num_updates):
            clock = Stopwatch(run.device)

            with clock.phase("rollout"):
                steps = collect_steps(
                    parts.environments,
                    parts.policy,
                    parts.normalization,
                    num_steps=settings.num_steps,
                    generator=stream(config.runtime.seed, "actions", update),
                    memory=parts.memory,
                )
                finished = parts.episodes.add(steps)

            with clock.phase("experience"):
                parts.normalization.observe_rewards(steps)
                experience = experience_of(
                    steps,
                    parts.policy,
                    parts.normalization,
                    gamma=gae.gamma,
                    gae_lambda=gae.gae_lambda,
                    sequence_length=settings.sequence_length,
                    micro_batch=run.micro_batch_tokens,
                )

            with clock.phase("train"):
                result, moved = improve(config, parts, experience, update, before_changes=loop.begin_changes)
            parts.normalization.observe(steps)

            metrics = {
                **parts.episodes.metrics(finished),
                **describe(experience),
                **result.metrics(),
                **moved,
                **parts.coefficients.metrics(),
                **clock.metrics(num_tokens=steps.num_transitions),
                **memory_in_use(run.device),
                **budget_metrics(run.micro_batch_tokens),
                **evaluations.metrics(update),
                "control/steps": update * settings.steps_per_update,
            }
            log(update, metrics)
            parts.coefficients.adapt(metrics, num_responses=len(finished))
            after_update(update, metrics)
