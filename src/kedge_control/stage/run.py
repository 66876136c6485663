"""Control: play, estimate advantages, improve; repeat. The update is that of language models.

    environments ─▶ steps ─▶ experience ─▶ PPO epochs ─▶ metrics, model/

Source: PPO algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

from kedge.algorithm.critic import explained_variance
from kedge.algorithm.masking import masked_whiten
from kedge.config import Config
from kedge.ranks import budget_metrics
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import Callback, logged_steps, running, stage_loop, watched
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.checkpoint.state import TrainingState
from kedge.training.guard import BadValue, refuse_nonfinite
from kedge.training.optimizer import learning_rate_at, set_learning_rate
from kedge.training.runtime import Stopwatch, memory_in_use, stream
from kedge.training.update import PpoUpdate, UpdateResult, distance_moved
from kedge_control.experience import ControlExperience, experience_of
from kedge_control.rollout import collect_steps
from kedge_control.stage.parts import Parts, load_parts, objective_of
from kedge_control.stage.result import ControlResult, check_video, checkpoint_model, record_video, save_result
from kedge_control.trpo import TrustRegion, trpo_update

SHOWN = ("episode/return_mean", "episode/length_mean", "policy/approx_kl", "policy/entropy", "value/explained_variance")
"""The metrics of the progress display."""

AfterUpdate = Callable[[int, Mapping[str, float]], None]
"""Called with each update and its metrics."""


@stage_function("control", ControlResult.read)
def run_control(
    config: Config,
    *,
    env: Callable[..., Any] | None = None,
    network: Callable[..., Any] | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
) -> ControlResult:
    """Train a policy in `config.control.env`.

    On Ctrl-C, SIGTERM or an error after the first update, a checkpoint and the policy so far are saved before the
    exception is raised again. An error in the first update, such as a failing environment, leaves no folder.

    Args:
        config: The resolved configuration.
        env: A function from Python that makes an environment, instead of `control.env`.
        network: A function from Python that makes a network from the spaces, instead of `control.network`.
        resume: Resume the run in the output folder; start a new one otherwise. Every episode starts from its own
            seed, so the episodes under way are replayed up to the checkpoint.
        callback: Called after each update.

    Raises:
        KedgeError: The environment cannot be made, or its spaces are not supported; raised before training starts.
        KeyboardInterrupt, Terminated: The run was interrupted; policy and checkpoint are saved.
        OutOfMemoryError: Memory ran out; the state after the last whole update is saved.
    """
    functions = {"control.env": env, "control.network": network}
    run = open_run(config, "control", in_memory=functions, resume=resume)
    parts = load_parts(config, run, env=env, network=network)
    if parts.settings.video:
        check_video(parts)
    with closing(parts.environments), running(run, save=partial(save_result, run, parts)) as summary:
        with stage_loop(run, model=checkpoint_model(parts)) as loop:
            train(run, parts, loop, watched(callback, run, loop, parts.settings.num_updates, model=parts.policy))
            summary |= loop.summary()
        if parts.settings.video:
            record_video(parts, run.folder)
    return ControlResult.read(run.folder)


def train(run: Run, parts: Parts, loop: CheckpointedLoop, after_update: AfterUpdate) -> None:
    """The loop: each update plays, estimates advantages, and improves policy and critic."""
    config = parts.config
    use = parts.settings
    with logged_steps(run, loop, use.num_updates, shown=SHOWN) as log:
        loop.restore(TrainingState({"actor_critic": parts.policy}, parts.optimizer, parts.resumed()))
        for update in loop.steps(use.num_updates):
            clock = Stopwatch(run.device)

            with clock.phase("rollout"):
                steps = collect_steps(
                    parts.environments,
                    parts.policy,
                    parts.normalization,
                    num_steps=use.num_steps,
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
                    gamma=use.gamma,
                    gae_lambda=use.gae_lambda,
                    micro_batch=run.micro_batch_tokens,
                )

            with clock.phase("train"):
                result, moved = improve(parts, experience, update, begin_changes=loop.begin_changes)
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
                **parts.evaluation(update),
                "control/steps": update * use.steps_per_update,
            }
            log(update, metrics)
            parts.coefficients.adapt(metrics, num_responses=len(finished))
            after_update(update, metrics)


def describe(experience: ControlExperience) -> dict[str, float]:
    """Compute the experience's metrics: values, returns and advantages in the critic's unit."""
    mask = experience.action_mask
    found = {"value/explained_variance": float(explained_variance(experience.values, experience.returns, mask))}
    tables = {
        "value/": experience.values,
        "value/returns_": experience.returns,
        "advantage/": experience.advantages,
    }
    for prefix, table in tables.items():
        found[f"{prefix}mean"] = float(table[mask].mean())
        found[f"{prefix}std"] = float(table[mask].std(correction=0))
    return found


def improve(
    parts: Parts, experience: ControlExperience, update: int, *, begin_changes: Callable[[], None]
) -> tuple[UpdateResult, dict[str, float]]:
    """Train policy and critic on an update's experience: PPO's epochs or TRPO's step.

    Args:
        parts: The run's.
        experience: The update's.
        update: Its number, from 1.
        begin_changes: Called before the weights change.

    Returns:
        The result, and metrics: the learning rate, and how far the policy moved.

    Raises:
        NumericsError: A loss or gradient is not finite; the step was not taken.
    """
    use = parts.settings
    learner = parts.learner
    optimizer = parts.optimizer
    rate = learning_rate_at(update - 1, use.num_updates, learning_rate=use.learning_rate, schedule=use.schedule)
    set_learning_rate(optimizer, rate)
    remaining = rate / use.learning_rate if use.learning_rate and use.anneal_clip_range else 1.0
    numbers = {"clip_range": use.clip_range * remaining, "kl_coef": parts.coefficients.surrogate_kl_coef}
    objective = objective_of(use, **numbers)
    if use.whiten_advantages == "batch":
        experience = experience.with_advantages(masked_whiten(experience.advantages, experience.action_mask))

    def check(step: int, figures: Mapping[str, float], search: Callable[[], BadValue]) -> bool:
        allowed = refuse_nonfinite(step, figures, search)
        begin_changes()
        return allowed

    epochs = {
        "num_epochs": use.num_epochs,
        "num_minibatches": use.num_minibatches,
        "generator": stream(parts.config.runtime.seed, "minibatches", update),
        "max_grad_norm": use.max_grad_norm,
        "check_step": check,
    }
    if parts.compiled is not None:
        begin_changes()
        result = parts.compiled(experience, numbers, **epochs)
    else:
        ppo = PpoUpdate(learner, optimizer, experience, objective, early_stop_kl=use.early_stop_kl, **epochs)
        result = trpo_update(ppo, TrustRegion(max_kl=use.kl_target)) if use.is_trpo else ppo.run()
    optimizer.zero_grad(set_to_none=True)
    # This is the input of an adaptive penalty, and shows if an update went too far; it takes one more pass.
    distance = distance_moved(learner, experience)
    return result, {"policy/distance_moved": distance, "policy/learning_rate": rate}
