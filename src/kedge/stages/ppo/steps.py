"""The steps of a PPO update, each with its settings: sample, score, collect experience, improve."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch

from kedge.algorithm.advantages import Advantage, RewardToGo
from kedge.algorithm.experience import Experience, Rollout
from kedge.config import Config, config_at, scheduled_values
from kedge.data import Prompt, encode_prompt
from kedge.rewards.score import ScoredRollout, score_rollout
from kedge.rollout import collect_experience, still_to_evaluate
from kedge.runs.run import Run
from kedge.stages.ppo.batch import SampledBatch
from kedge.stages.ppo.costs import Costs
from kedge.stages.ppo.engines import importance_cap_of
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.settings import (
    advantage_of,
    controllers_of,
    follow_schedules,
    objective_of,
    process_advantage_of,
    reward_kl_coef,
)
from kedge.system.ranks import budget_metrics
from kedge.training.controllers import Coefficients
from kedge.training.guard.guard import StepCheck
from kedge.training.learner import LanguageLearner
from kedge.training.optimizer import learning_rate_at, set_learning_rate
from kedge.training.runtime import stream, stream_seed
from kedge.training.update import UpdateResult, distance_moved, ppo_update
from kedge.training.value_warmup import ValueWarmup

__all__ = ["PpoSteps"]


@dataclass(frozen=True)
class PpoSteps:
    """The steps of a run's updates. Each depends only on its arguments and the weights.

    Attributes:
        config: The run's configuration.
        run: The run.
        roles: Its models.
        warmup: The critic's warm-up, which the run keeps up to date.
        staleness: Updates between the weights that sample and those that are trained.
    """

    config: Config
    run: Run
    roles: Roles
    warmup: ValueWarmup
    staleness: int = 0

    @property
    def needs_baseline(self) -> bool:
        """Whether the advantages need the score of a greedy response to each prompt."""
        return advantage_of(self.config).needs == "baseline"

    @property
    def pad_id(self) -> int:
        """The token id of padding."""
        return cast(int, self.roles.tokenizer.pad_token_id)

    def at(self, update: int, coefficients: Coefficients) -> PpoSteps:
        """The steps of an update, with the scheduled fields' values of then, which `coefficients` gets as well."""
        if self.warmup.ends_by_result:
            coefficients.controllers = controllers_of(self.config, self.warmup.num_policy_updates)
        if not self.config.schedules:
            return self
        follow_schedules(coefficients, self.config, update)
        return replace(self, config=config_at(self.config, update))

    def behind(self, update: int, version: int) -> PpoSteps:
        """The steps by which an update's responses are sampled ahead of it, with its scheduled fields' values.

        Args:
            update: The update's number.
            version: Updates that the policy that samples has completed.
        """
        config = config_at(self.config, update) if self.config.schedules else self.config
        return replace(self, config=config, staleness=update - 1 - version)

    def sample(self, drawn: Sequence[Prompt], update: int, *stream: str | int) -> Rollout:
        """Sample the update's responses, `rollout.num_responses` per prompt.

        Args:
            drawn: The prompts.
            update: The update's number.
            stream: Names of the random streams of a further round in the same update.
        """
        groups = [group for group in range(len(drawn)) for _ in range(self.config.rollout.num_responses)]
        return self.roll_out(drawn, groups, "rollout", update, *stream, policy_version=update - 1 - self.staleness)

    def sample_greedy(self, drawn: Sequence[Prompt], update: int) -> Rollout:
        """The greedy response to each prompt, whose score is its baseline."""
        return self.roll_out(drawn, range(len(drawn)), policy_version=update - 1 - self.staleness, greedy=True)

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        groups: Sequence[int],
        *stream: str | int,
        policy_version: int,
        greedy: bool = False,
    ) -> Rollout:
        """Sample one response per group number, each from its own random stream.

        Args:
            prompts: The prompts.
            groups: For each row, the index of its prompt.
            stream: Names of the random streams.
            policy_version: Updates that the policy has completed.
            greedy: Take the most likely tokens, instead of drawing them.
        """
        encoded = [encode_prompt(self.roles.tokenizer, prompt.text) for prompt in prompts]
        rollout = self.config.rollout
        engine = self.roles.engine.with_sampling(
            max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, greedy=greedy
        )
        return engine.generate(
            [encoded[group] for group in groups],
            seeds=[stream_seed(self.config.runtime.seed, *stream, row) for row in range(len(groups))],
            groups=groups,
            policy_version=policy_version,
        )

    def score(self, rollout: Rollout, prompts: Sequence[Prompt], update: int, *stream: str | int) -> ScoredRollout:
        """Score each response with the weighted sum of the rewards; drop responses without a score.

        Args:
            rollout: The responses.
            prompts: The prompts, indexed by the rollout's groups.
            update: The update's number.
            stream: As for `sample`.

        Raises:
            RewardError: A reward failed or returned invalid scores.
            UnscoredError: No response has a score.
        """
        return score_rollout(
            rollout,
            [prompts[group] for group in rollout.group.tolist()],
            self.roles.reward,
            self.roles.tokenizer,
            max_new_tokens=self.config.rollout.max_new_tokens,
            missing_eos=self.roles.missing_eos,
            seed=stream_seed(self.config.runtime.seed, "reward", update, *stream),
        )

    def learner(self, update: int, coefficients: Coefficients) -> LanguageLearner:
        """The learner of one update."""
        return LanguageLearner(
            self.roles.actor_critic,
            one_minibatch=self.config.ppo.num_minibatches == 1 and self.trains_policy(update),
            entropy_gradient=coefficients.entropy_coef != 0,
            value_after_last=self._value_after_last,
            **self._numerics,
        )

    def collect(
        self,
        scored: ScoredRollout,
        coefficients: Coefficients,
        *,
        learner: LanguageLearner | None = None,
        advantage: Advantage | None = None,
    ) -> Experience:
        """Compute rewards, values, advantages and returns of every action; they are then frozen.

        Responses that are not trained on need no baseline: theirs is 0, and their advantages are the returns.

        Args:
            scored: The responses with their scores.
            coefficients: The update's coefficients.
            learner: The learner that will train on it; its first forward pass is used here, too, if possible. A new
                critic's values start from the first returns that it is trained on.
            advantage: Estimator in place of `ppo.advantage`, for what is not trained on.
        """
        ppo, baseline = self.config.ppo, scored.baseline
        started = self.roles.actor_critic.values_started
        starts = learner is not None and started is not None and not started
        if baseline is None and self.needs_baseline:
            baseline = torch.zeros_like(scored.scores)
        return collect_experience(
            scored.rollout,
            scored.scores,
            self.roles.actor_critic,
            self.roles.reference,
            advantage=advantage or advantage_of(self.config),
            process_advantage=None if advantage else process_advantage_of(self.config),
            token_scores=scored.token_scores,
            baseline=baseline,
            positive_min_score=ppo.positive_nll_min_score if ppo.positive_nll_coef else None,
            old_from=ppo.old_logprobs,
            importance_cap=importance_cap_of(self.config, self.roles.engine),
            first_pass=learner.first_pass(scored.rollout) if learner is not None and not starts else None,
            first_returns=RewardToGo(ppo.gamma) if starts else None,
            kl_coef=reward_kl_coef(self.config, coefficients),
            kl_estimator=ppo.resolved_kl_estimator,
            kl_scope=ppo.kl_scope,
            score_at=ppo.score_at,
            whiten_rewards=ppo.whiten_rewards,
            whiten_advantages=ppo.whitens_advantages,
            reuse_sampled=self.roles.engine.is_exact,
            **self._numerics,
        )

    def improve(
        self,
        learner: LanguageLearner,
        experience: Experience,
        coefficients: Coefficients,
        update: int,
        *,
        check_step: StepCheck,
        is_flat: bool = False,
    ) -> UpdateResult:
        """The PPO update: K epochs over the experience; none where it `is_flat`, see `SampledBatch`.

        Without a step, because Adam scales even the small gradient that is left, of the KL or the entropy, to full
        size.
        """
        if is_flat:
            return UpdateResult(refused=True)
        ppo, trains_policy = self.config.ppo, self.trains_policy(update)
        objective = objective_of(self.config, experience, coefficients, train_policy=trains_policy)
        set_learning_rate(self.roles.optimizer, **self.learning_rates(update), value_unit=objective.value_unit)
        with nullcontext() if trains_policy else learner.frozen_policy():
            result = ppo_update(
                learner,
                self.roles.optimizer,
                experience,
                objective,
                num_epochs=ppo.num_epochs,
                num_minibatches=ppo.num_minibatches,
                max_grad_norm=ppo.max_grad_norm,
                num_critic_epochs=ppo.num_critic_epochs,
                early_stop_kl=ppo.early_stop_kl,
                generator=stream(self.config.runtime.seed, "minibatches", update),
                critic_generator=stream(self.config.runtime.seed, "critic minibatches", update),
                extra_loss=self.roles.pretraining.draw(update) if self.roles.pretraining and trains_policy else None,
                check_step=check_step,
                repeated=learner.repeated,
            )
        # Nothing reads them again, and the next update's sampling and passes need the memory.
        self.roles.optimizer.zero_grad(set_to_none=True)
        return result

    def distance_moved(self, learner: LanguageLearner, experience: Experience) -> dict[str, float]:
        """How far the update moved the policy, if a controller needs it; takes one more forward pass."""
        if not self._measures_distance:
            return {}
        return {"policy/distance_moved": distance_moved(learner, experience, repeated=learner.repeated)}

    def learning_rates(self, update: int) -> dict[str, float]:
        """The learning rates of an update's steps, by argument of `set_learning_rate`.

        The schedule covers the updates of the policy. The critic warms up at the peak rate, after a rise of its own.
        """
        loop, critics = self.config.ppo, self.config.ppo.critic_learning_rate
        peaks = {"learning_rate": loop.learning_rate, **({} if critics is None else {"critic": critics})}
        return {name: self._learning_rate(update, peak) for name, peak in peaks.items()}

    def _learning_rate(self, update: int, peak: float) -> float:
        ppo, trains_policy = self.config.ppo, self.trains_policy(update)
        return learning_rate_at(
            update - 1 - (self.warmup.num_updates if trains_policy else 0),
            self.warmup.num_policy_updates,
            learning_rate=peak,
            schedule=ppo.schedule if trains_policy else "constant",
            warmup_steps=round(ppo.warmup_fraction * self.warmup.num_policy_updates),
        )

    def trains_policy(self, update: int) -> bool:
        """False while the critic warms up."""
        return self.warmup.trains_policy(update)

    def costs(
        self, batch: SampledBatch, learner: LanguageLearner, result: UpdateResult, update: int
    ) -> dict[str, float]:
        """The FLOPs of the update's phases."""
        # An update that lost responses can have fewer of them than minibatches.
        rollout = batch.trained.rollout
        steps_per_pass = min(self.config.ppo.num_minibatches, rollout.num_responses)
        evaluated = still_to_evaluate(
            rollout,
            self.roles.actor_critic,
            reuse_sampled=self.roles.engine.is_exact,
            value_after_last=self._value_after_last,
        )
        return self._costs.metrics(
            rollout,
            sampled=batch.rollouts,
            evaluated="nothing" if learner.reused_first_pass else evaluated,
            num_passes=result.num_gradients / steps_per_pass,
            train_policy=self.trains_policy(update),
            num_critic_passes=result.num_critic_gradients / steps_per_pass,
            num_readings=int(self._measures_distance),
        )

    def metrics(self, update: int, batch: SampledBatch) -> dict[str, float]:
        """Learning rate, staleness and distinct prompts of an update."""
        rates = self.learning_rates(update)
        return {
            "policy/learning_rate": rates["learning_rate"],
            **({"value/learning_rate": rates["critic"]} if "critic" in rates else {}),
            **self.warmup.metrics(update),
            **budget_metrics(self.run.micro_batch_tokens),
            "policy/staleness": update - 1 - int(batch.trained.rollout.policy_version.min()),
            "prompt/distinct": len({prompt.text for prompt in batch.prompts}) / len(batch.prompts),
            **{f"schedule/{field}": value for field, value in scheduled_values(self.config, update).items()},
        }

    @property
    def _measures_distance(self) -> bool:
        """Whether a controller needs to know how far an update moved the policy."""
        return self.config.ppo.policy_loss == "kl_penalty_adaptive"

    @property
    def _value_after_last(self) -> bool:
        return self.config.ppo.score_at == "after_last"

    @cached_property
    def _costs(self) -> Costs:
        return Costs.of(self.roles, recomputes=self.config.runtime.activation_checkpointing)

    @property
    def _numerics(self) -> dict[str, Any]:
        return {
            "temperature": self.config.rollout.temperature,
            "precision": self.run.precision,
            "micro_batch_tokens": self.run.micro_batch_tokens,
            "ranks": self.run.ranks,
        }
