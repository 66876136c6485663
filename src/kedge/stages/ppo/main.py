"""PPO: sample, score, estimate advantages, improve; repeat.

    prompts ─▶ rollout ─▶ scores ─▶ experience ─▶ PPO epochs ─▶ metrics, model/

Source: PPO algorithm 1; spec §§4–6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias

from kedge.config import Config
from kedge.data import PromptStream
from kedge.errors import KedgeError, OutOfMemoryError
from kedge.logs.metrics import read_metrics
from kedge.logs.stopwatch import Stopwatch
from kedge.plan.machine import MachinePlan
from kedge.runs.ending import end_stage, resumable
from kedge.runs.inputs import Rewards
from kedge.runs.out_of_memory import ends_in_one_line
from kedge.runs.resuming import finished_run
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.training import Callback, Watcher, stage_loop
from kedge.stages.planning.compared import compared
from kedge.stages.ppo.ahead import SamplingAhead, check_ahead, choose_sampling, with_background
from kedge.stages.ppo.costs import write_roles
from kedge.stages.ppo.early_end import EarlyEnd
from kedge.stages.ppo.engines import Publisher
from kedge.stages.ppo.guarding import guarded_update, marking_changes, new_guard
from kedge.stages.ppo.log import ppo_log
from kedge.stages.ppo.measuring import Measurements
from kedge.stages.ppo.result import PpoResult, checkpoint_model, save_result
from kedge.stages.ppo.roles import Roles, load_roles
from kedge.stages.ppo.saved_critic import with_saved_critic
from kedge.stages.ppo.settings import coefficients_of, value_warmup_of
from kedge.stages.ppo.steps import PpoSteps
from kedge.system.ranks import adaptive_part
from kedge.training.checkpoint.resume import CheckpointedLoop
from kedge.training.checkpoint.run_state import TrainingState
from kedge.training.runtime import memory_in_use, stream_seed

__all__ = ["PpoResult", "run_ppo"]

AfterUpdate: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Called with each update that was not dropped, and its metrics."""


@ends_in_one_line("ppo")
def run_ppo(
    config: Config,
    *,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    on_update: Callable[[int, Roles], None] = lambda update, roles: None,
    planned: MachinePlan | None = None,
) -> PpoResult:
    """Train `config.model` with PPO against `config.reward` on `config.data.prompts`.

    On Ctrl-C, SIGTERM, or an error after the first update, a checkpoint and the policy so far are saved before the
    exception is raised again. An error in the first update, such as a failing reward function, leaves no folder.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows in place of `config.data.prompts`.
        eval_prompts: Texts or rows in place of `config.data.eval_prompts`.
        reward: Functions or models in place of `config.reward`.
        resume: Resume the run in the output folder; start it if there is none.
        callback: Called after each update.
        on_update: The same with the update's number, from 1, and all models of the run.
        planned: What it should hold, to be compared with what it held.

    Raises:
        KedgeError: An input is missing, unreadable or incompatible; one line, before training starts.
        KeyboardInterrupt, Terminated: The run was interrupted; policy and checkpoint are saved.
        OutOfMemoryError: Memory ran out; the state after the last whole update is saved.
    """
    if resume and (out := finished_run(config)):
        return PpoResult(out, read_metrics(out))
    config = with_saved_critic(config)
    in_memory = {"data.prompts": prompts, "data.eval_prompts": eval_prompts, "reward": reward}
    run = open_run(config, "ppo", in_memory=in_memory, resume=resume)
    check_ahead(config, run)
    roles = load_roles(config, run, prompts=prompts, eval_prompts=eval_prompts, reward=reward)
    roles = with_background(config, run, roles)
    run.start()
    write_roles(run, roles)
    outcome: dict[str, object] = {}
    fits = has_results = True
    with resumable(config, run.folder, "ppo"), closing(roles.engine):
        try:
            with stage_loop(config, run, model=checkpoint_model(config, run, roles)) as loop:
                train(config, run, roles, loop, _watching(config, run, roles, loop, callback, on_update))
                outcome = loop.summary()
        except KedgeError as error:
            fits = not isinstance(error, OutOfMemoryError)
            has_results = not run.abandon()
            raise
        finally:
            metrics = save_result(config, run, roles, interrupted=not outcome, model=fits) if has_results else []
    end_stage(config, run, {**outcome, **compared(planned, run.device)})
    return PpoResult(run.shared_folder, metrics if run.ranks.is_first else read_metrics(run.shared_folder))


def train(
    config: Config,
    run: Run,
    roles: Roles,
    loop: CheckpointedLoop,
    after_update: AfterUpdate,
) -> None:
    """The PPO loop: each update samples, scores, estimates advantages, and improves policy and critic."""
    warmup = value_warmup_of(config)
    steps, coefficients = PpoSteps(config, run, roles, warmup), coefficients_of(config)
    seed = stream_seed(config.runtime.seed, "prompts")
    prompts = PromptStream(roles.prompts, seed=seed, curriculum=config.data.curriculum, mixture=roles.mixture)
    with ppo_log(config, run, roles, loop) as log:
        guard = new_guard(config, run, roles, loop, warn=log.progress.say)
        allows = marking_changes(guard, loop)
        sampling = choose_sampling(prompts, steps, check=guard.check_rollout, say=log.progress.say)
        ahead = sampling if isinstance(sampling, SamplingAhead) else None
        measurements, ending = Measurements(steps, log, loop), EarlyEnd(config, loop.best)
        publisher = Publisher(roles.engine, roles.actor_critic.policy, merged=config.rollout.engine == "vllm")
        resumed = {"prompts": prompts, "coefficients": coefficients, "guard": guard, "missing EOS": roles.missing_eos}
        resumed |= {**measurements.state, **ending.state, **warmup.state}
        added = adaptive_part(run.micro_batch_tokens)
        loop.restore(TrainingState({"actor_critic": roles.actor_critic}, roles.optimizer, resumed, ahead, added))

        for update in loop.steps(config.ppo.num_updates, until=ending.reason):
            metrics: dict[str, float] = {}
            with guarded_update(config, update, warmup, guard, loop, log.metrics):
                clock, now = Stopwatch(run.device), steps.at(update, coefficients)
                published = publisher.catch_up(update - 1)

                with log.saying_missing_eos():
                    batch = sampling.batch(now, update, clock)  # prompts, responses and their scores
                measurements.at_start(coefficients, clock)

                with clock.phase("experience"):
                    learner = now.learner(update, coefficients)
                    learner.find_tokens(batch.trained.rollout, roles.optimizer)
                    reused = None if batch.is_flat else learner  # whose pass no step would use
                    experience = now.collect(batch.trained, coefficients, learner=reused)
                    guard.check_experience(experience)

                with clock.phase("train"):
                    result = now.improve(
                        learner, experience, coefficients, update, check_step=allows, is_flat=batch.is_flat
                    )
                    moved = now.distance_moved(learner, experience)
                published |= publisher.publish(update)

                metrics = {
                    **log.describe(update, batch, experience, result),
                    **moved,
                    **coefficients.metrics(),
                    **roles.missing_eos.metrics(),
                    **guard.metrics(),
                    **now.costs(batch, learner, result, update),
                    **now.metrics(update, batch),
                    **clock.metrics(num_tokens=batch.num_tokens),
                    **published,
                    **sampling.metrics(),
                    **memory_in_use(run.device),
                    **measurements.metrics(update, coefficients),
                }
                log.write(update, metrics, experience, batch.trained.prompts, result)
                if now.trains_policy(update) and not result.refused:
                    coefficients.adapt(metrics, num_responses=experience.num_rows)
                measurements.sample_fixed(update, coefficients)
                loop.see(update, metrics)
                ending.see(metrics)
                if line := warmup.see(update, metrics):
                    log.progress.say(line)
            if not guard.dropped:
                after_update(update, metrics)


def _watching(
    config: Config,
    run: Run,
    roles: Roles,
    loop: CheckpointedLoop,
    callback: Callback | None,
    on_update: Callable[[int, Roles], None],
) -> AfterUpdate:
    """Calls both functions with an update."""
    watcher, total = Watcher(callback, roles.actor_critic.policy.causal, roles.tokenizer), config.ppo.num_updates

    def see(update: int, metrics: Mapping[str, float]) -> None:
        watcher.see(loop, update, metrics, stage="ppo", num_updates=total, folder=run.shared_folder)
        on_update(update, roles)

    return see
