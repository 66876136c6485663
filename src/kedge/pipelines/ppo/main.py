"""PPO: sample, score, weigh every token, improve; again.

    prompts ─▶ rollout ─▶ scores ─▶ experience ─▶ PPO epochs ─▶ metrics, model/

Source: PPO algorithm 1; spec §§4–6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kedge.config import Config
from kedge.data import PromptStream
from kedge.errors import KedgeError
from kedge.logs.experience_metrics import describe_experience
from kedge.logs.metrics import read_metrics
from kedge.logs.stopwatch import Stopwatch
from kedge.pipelines.ppo.coefficients import Coefficients
from kedge.pipelines.ppo.costs import Costs, write_roles
from kedge.pipelines.ppo.fixed_prompts import FixedPrompts
from kedge.pipelines.ppo.guarding import ACTOR_CRITIC, guarded_update, new_guard
from kedge.pipelines.ppo.log import ppo_log
from kedge.pipelines.ppo.result import PpoResult, keep_what_was_learnt
from kedge.pipelines.ppo.roles import Roles, load_roles
from kedge.pipelines.ppo.steps import PpoSteps
from kedge.runs.ending import say_findings
from kedge.runs.load_rewards import Rewards
from kedge.runs.run import Resume, Run, finished_run, open_run
from kedge.runs.stage_loop import keeping
from kedge.training.checkpoint.resume import Keeper, Resumable
from kedge.training.runtime import memory_in_use, stream_seed

__all__ = ["PpoResult", "run_ppo"]


def run_ppo(
    config: Config,
    *,
    prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
    resume: Resume | None = None,
    on_update: Callable[[int, Roles], None] = lambda update, roles: None,
) -> PpoResult:
    """Train `config.model` with PPO against `config.reward` on `config.data.prompts`.

    Ctrl-C, SIGTERM, or an error after the first update, saves a checkpoint and the policy as far as it has learnt, and
    is raised again. A mistake that shows in the first update, such as a reward function that fails, leaves no folder
    behind.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows that take the place of `config.data.prompts`.
        reward: Functions or models that take the place of `config.reward`.
        resume: Go on with the run in the output folder; where there is none, begin it.
        on_update: Called after each update with its number, from 1, and the models.

    Raises:
        KedgeError: What is missing, cannot be read or does not fit, in one line, before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the policy is saved, and a checkpoint.
    """
    if resume and (out := finished_run(config)):
        return PpoResult(out, read_metrics(out))
    run = open_run(config, "ppo", given={"data.prompts": prompts, "reward": reward}, resume=resume)
    roles = load_roles(config, run, prompts=prompts, reward=reward)
    run.start()
    write_roles(run, roles)
    try:
        with keeping(config, run) as keeper:
            train(config, run, roles, keeper, on_update)
    except KedgeError:
        run.abandon()
        raise
    finally:
        metrics = keep_what_was_learnt(config, run, roles)
    run.finish({"updates": len(metrics)})
    say_findings(run.folder)
    return PpoResult(run.folder, metrics)


def train(config: Config, run: Run, roles: Roles, keeper: Keeper, on_update: Callable[[int, Roles], None]) -> None:
    """The loop of PPO: each update samples, scores, weighs every token, and improves policy and critic."""
    ppo, steps = config.ppo, PpoSteps(config, run, roles)
    costs = Costs.of(roles, recomputes=config.runtime.activation_checkpointing)
    prompts = PromptStream(roles.prompts, seed=stream_seed(config.runtime.seed, "prompts"))
    coefficients = Coefficients.start(config)

    def progress_made() -> dict[str, Any]:
        return {"prompts": prompts.state(), "coefficients": coefficients.state(), "guard": guard.state()}

    made = keeper.restore(Resumable({ACTOR_CRITIC: roles.actor_critic}, roles.optimizer, progress_made))
    with ppo_log(config, run, roles, keeper) as log:
        guard = new_guard(config, run, roles, keeper, warn=log.progress.say)
        fixed = FixedPrompts.of(steps, log)
        if made:
            prompts.restore(made["prompts"])
            coefficients = coefficients.restore(made["coefficients"])
            guard.restore(made["guard"])

        for update in keeper.steps(ppo.loop.num_updates):
            with guarded_update(config, update, guard, keeper, log.metrics):
                if update == 1:
                    fixed.ask(0, coefficients)
                clock = Stopwatch(run.device)

                with clock.phase("rollout"):
                    drawn = prompts.next(config.rollout.num_prompts)
                    batch = [prompt for prompt in drawn for _ in range(config.rollout.num_responses)]
                    rollout = steps.roll_out(batch, update - 1, "rollout", update)
                    guard.check_rollout(rollout)

                with clock.phase("reward"):
                    scored = steps.score(rollout, batch, update)

                with clock.phase("experience"):
                    begun = steps.begin(scored, coefficients, update)
                    experience = steps.weigh(scored, coefficients, begun=begun)
                    guard.check_experience(experience)

                with clock.phase("train"):
                    keeper.weights_change()
                    result = steps.improve(experience, coefficients, update, begun=begun, judge=guard.allows)
                    moved = steps.distance_moved(experience)

                metrics = {
                    **describe_experience(experience),
                    **scored.metrics(),
                    **result.figures(),
                    **moved,
                    **coefficients.metrics(),
                    **guard.metrics(),
                    **costs.metrics(
                        rollout,
                        evaluated_anew=begun is None and not roles.engine.is_exact,
                        num_passes=result.num_steps / ppo.loop.num_minibatches,
                        train_policy=steps.trains_policy(update),
                    ),
                    "policy/learning_rate": steps.learning_rate(update),
                    "policy/staleness": update - 1 - rollout.policy_version,
                    "prompt/distinct": len({prompt.text for prompt in drawn}) / len(drawn),
                    **clock.metrics(num_tokens=int(rollout.prompt_mask.sum()) + rollout.num_tokens),
                    **memory_in_use(run.device),
                }
                log.write(update, metrics, experience, scored.prompts, result)
                if not result.refused:
                    coefficients = coefficients.adapt(metrics, num_responses=experience.rollout.num_responses)
                fixed.ask(update, coefficients)
                on_update(update, roles)
