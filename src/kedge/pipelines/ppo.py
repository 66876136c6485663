"""PPO: sample, score, weigh every token, improve; again.

    prompts ─▶ rollout ─▶ scores ─▶ experience ─▶ PPO epochs ─▶ metrics, model/

Source: PPO algorithm 1; spec §§4–6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kedge.config import Config, schedule_in_words
from kedge.data import PromptStream, encode_prompt
from kedge.errors import KedgeError
from kedge.pipelines.coefficients import Coefficients
from kedge.pipelines.guarding import ACTOR_CRITIC, guarded_update, new_guard
from kedge.pipelines.keeping import keeping
from kedge.pipelines.ppo_result import PpoResult, keep_what_was_learnt
from kedge.pipelines.ppo_setup import Roles, load_roles
from kedge.pipelines.run import Resume, Run, finished_run, open_run
from kedge.pipelines.scorers import Rewards
from kedge.pipelines.scoring import score_rollout
from kedge.report.experience_metrics import describe_experience, describe_samples
from kedge.report.metrics import MetricsLog, read_metrics
from kedge.report.progress import Progress
from kedge.report.samples import SamplesLog
from kedge.report.stopwatch import Stopwatch
from kedge.rollout import collect_experience
from kedge.training.keeper import Keeper, Resumable
from kedge.training.optimiser import learning_rate_at, set_learning_rate
from kedge.training.ppo_update import distance_moved, first_pass, ppo_update
from kedge.training.runtime import stream, stream_seed

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
    try:
        with keeping(config, run) as keeper:
            train(config, run, roles, keeper, on_update)
    except KedgeError:
        run.abandon()
        raise
    finally:
        metrics = keep_what_was_learnt(config, run, roles)
    run.finish({"updates": len(metrics)})
    return PpoResult(run.folder, metrics)


def train(config: Config, run: Run, roles: Roles, keeper: Keeper, on_update: Callable[[int, Roles], None]) -> None:
    """The loop of PPO. Longer than other functions on purpose: the algorithm is to be read in one piece."""
    ppo, sampling, seed = config.ppo, config.rollout, config.runtime.seed
    policy_and_critic, reference = roles.actor_critic, roles.reference
    prompts = PromptStream(roles.prompts, seed=stream_seed(seed, "prompts"))
    coefficients = Coefficients.start(config)

    def progress_made() -> dict[str, Any]:
        return {"prompts": prompts.state(), "coefficients": coefficients.state(), "guard": guard.state()}

    made = keeper.restore(Resumable({ACTOR_CRITIC: policy_and_critic}, roles.optimizer, progress_made))
    numerics: dict[str, Any] = {
        "temperature": sampling.temperature,
        "precision": run.precision,
        "micro_batch_tokens": config.runtime.micro_batch_tokens,
    }

    with (
        Progress("ppo", total=ppo.num_updates, done=keeper.done) as progress,
        MetricsLog(run.folder) as log,
        SamplesLog(run.folder) as kept,
    ):
        progress.say(schedule_in_words(config, len(roles.prompts)))
        keeper.sync_before_saving(log, kept)
        guard = new_guard(config, run, roles, keeper, warn=progress.say)
        if made:
            prompts.restore(made["prompts"])
            coefficients = coefficients.restore(made["coefficients"])
            guard.restore(made["guard"])
        for update in keeper.steps(ppo.num_updates):
            with guarded_update(config, update, guard, keeper, log):
                clock = Stopwatch(run.device)

                with clock.phase("rollout"):
                    batch = [
                        prompt for prompt in prompts.next(sampling.num_prompts) for _ in range(sampling.num_responses)
                    ]
                    seeds = [stream_seed(seed, "rollout", update, row) for row in range(len(batch))]
                    prompt_ids = [encode_prompt(roles.tokenizer, prompt.text) for prompt in batch]
                    rollout = roles.engine.generate(prompt_ids, seeds=seeds, policy_version=update - 1)
                    guard.check_rollout(rollout)

                with clock.phase("reward"):
                    scored = score_rollout(
                        rollout,
                        batch,
                        roles.reward,
                        roles.tokenizer,
                        max_new_tokens=sampling.max_new_tokens,
                        missing_eos_score=roles.missing_eos_score,
                        missing_eos_mode=sampling.missing_eos_mode,
                        seed=stream_seed(seed, "reward", update),
                    )

                with clock.phase("experience"):
                    train_policy = update > ppo.value_warmup_updates
                    begun = first_pass(
                        policy_and_critic,
                        scored.rollout,
                        num_minibatches=ppo.num_minibatches,
                        train_policy=train_policy,
                        entropy_gradient=coefficients.entropy_coef != 0,
                        value_after_last=ppo.score_at == "after_last",
                        **numerics,
                    )
                    experience = collect_experience(
                        scored.rollout,
                        scored.scores,
                        policy_and_critic,
                        reference,
                        first_pass=begun,
                        kl_coef=coefficients.reward_kl_coef,
                        kl_estimator=ppo.resolved_kl_estimator,
                        kl_scope=ppo.kl_scope,
                        score_at=ppo.score_at,
                        gamma=ppo.gamma,
                        gae_lambda=ppo.gae_lambda,
                        advantage=ppo.advantage,
                        num_steps=ppo.advantage_steps,
                        whiten_rewards=ppo.whiten_rewards,
                        whiten_advantages=ppo.whiten_advantages,
                        reuse_sampled=roles.engine.is_exact,
                        **numerics,
                    )
                    guard.check_experience(experience)

                with clock.phase("train"):
                    keeper.weights_change()
                    learning_rate = learning_rate_at(
                        update - 1,
                        ppo.num_updates,
                        learning_rate=ppo.learning_rate,
                        schedule=ppo.schedule,
                        warmup_steps=round(ppo.warmup_fraction * ppo.num_updates),
                    )
                    set_learning_rate(roles.optimizer, learning_rate)
                    result = ppo_update(
                        policy_and_critic,
                        roles.optimizer,
                        experience,
                        coefficients.objective(experience),
                        num_epochs=ppo.num_epochs,
                        num_minibatches=ppo.num_minibatches,
                        max_grad_norm=ppo.max_grad_norm,
                        early_stop_kl=ppo.early_stop_kl,
                        generator=stream(seed, "minibatches", update),
                        train_policy=train_policy,
                        first_pass=begun,
                        extra_loss=roles.pretraining.draw(update) if roles.pretraining else None,
                        judge=guard.allows,
                        **numerics,
                    )
                    figures = result.mean()
                    if ppo.policy_loss == "kl_penalty_adaptive":
                        figures["policy/distance_moved"] = distance_moved(policy_and_critic, experience, **numerics)

                metrics = {
                    **describe_experience(experience),
                    **scored.metrics(),
                    **figures,
                    **coefficients.metrics(),
                    **guard.metrics(),
                    "policy/learning_rate": learning_rate,
                    "policy/optimiser_steps": result.num_steps,
                }
                log.write(
                    update, {**metrics, **clock.metrics(num_tokens=int(rollout.prompt_mask.sum()) + rollout.num_tokens)}
                )
                kept.write(
                    update,
                    describe_samples(experience, scored.prompts, roles.tokenizer, count=config.runtime.num_samples),
                )
                progress.update(update, {name: metrics[metric] for name, metric in SHOWN.items() if metric in metrics})
                if not result.refused:
                    coefficients = coefficients.adapt(metrics, num_responses=experience.rollout.num_responses)
                on_update(update, roles)


SHOWN = {
    "score": "reward/score_mean",
    "kl": "objective/kl",
    "entropy": "policy/entropy",
    "clipped": "policy/clip_fraction",
    "explained": "value/explained_variance",
}
"""What the progress display calls the metrics that it shows."""
