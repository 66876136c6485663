"""The four steps of a PPO update, each with the settings that it takes: sample, score, weigh, improve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kedge.algorithm.experience import Experience, Rollout
from kedge.config import Config
from kedge.data import Prompt, encode_prompt
from kedge.models import ResponseOutputs
from kedge.pipelines.ppo.coefficients import Coefficients
from kedge.pipelines.ppo.roles import Roles
from kedge.rewards.score import ScoredRollout, score_rollout
from kedge.rollout import collect_experience
from kedge.runs.run import Run
from kedge.training.guard.guard import Judge
from kedge.training.optimizer import learning_rate_at, set_learning_rate
from kedge.training.runtime import stream, stream_seed
from kedge.training.update import UpdateResult, distance_moved, first_pass, ppo_update

__all__ = ["PpoSteps"]


@dataclass(frozen=True)
class PpoSteps:
    """A run's steps. Each is a function of what it is given, and of the weights.

    Attributes:
        config: The run's configuration.
        run: What is running.
        roles: Who takes part.
    """

    config: Config
    run: Run
    roles: Roles

    def roll_out(self, prompts: Sequence[Prompt], num_updates: int, *stream: str | int) -> Rollout:
        """A response to each prompt, each from a random stream of its own.

        Args:
            prompts: One per response.
            num_updates: How many the policy has seen.
            stream: Names the random streams.
        """
        return self.roles.engine.generate(
            [encode_prompt(self.roles.tokenizer, prompt.text) for prompt in prompts],
            seeds=[stream_seed(self.config.runtime.seed, *stream, row) for row in range(len(prompts))],
            policy_version=num_updates,
        )

    def score(self, rollout: Rollout, prompts: Sequence[Prompt], update: int) -> ScoredRollout:
        """One score per response, from all rewards; responses that get none are left out.

        Raises:
            RewardError: A reward broke its contract.
            UnscoredError: No response has a score.
        """
        return score_rollout(
            rollout,
            prompts,
            self.roles.reward,
            self.roles.tokenizer,
            max_new_tokens=self.config.rollout.max_new_tokens,
            missing_eos_score=self.roles.missing_eos_score,
            missing_eos_mode=self.config.rollout.missing_eos_mode,
            seed=stream_seed(self.config.runtime.seed, "reward", update),
        )

    def begin(self, scored: ScoredRollout, coefficients: Coefficients, update: int) -> ResponseOutputs | None:
        """The first epoch's forward pass, where one pass holds all responses: it tells the old figures as well."""
        return first_pass(
            self.roles.actor_critic,
            scored.rollout,
            num_minibatches=self.config.ppo.loop.num_minibatches,
            train_policy=self.trains_policy(update),
            entropy_gradient=coefficients.entropy_coef != 0,
            value_after_last=self.config.ppo.advantages.score_at == "after_last",
            **self._numerics,
        )

    def weigh(
        self, scored: ScoredRollout, coefficients: Coefficients, *, begun: ResponseOutputs | None = None
    ) -> Experience:
        """What reference, critic and rewards say about every token; frozen from here on."""
        ppo = self.config.ppo
        return collect_experience(
            scored.rollout,
            scored.scores,
            self.roles.actor_critic,
            self.roles.reference,
            first_pass=begun,
            kl_coef=coefficients.reward_kl_coef,
            kl_estimator=ppo.kl.resolved_kl_estimator,
            kl_scope=ppo.kl.kl_scope,
            score_at=ppo.advantages.score_at,
            gamma=ppo.advantages.gamma,
            gae_lambda=ppo.advantages.gae_lambda,
            advantage=ppo.advantages.advantage,
            num_steps=ppo.advantages.advantage_steps,
            whiten_rewards=ppo.advantages.whiten_rewards,
            whiten_advantages=ppo.advantages.whiten_advantages,
            reuse_sampled=self.roles.engine.is_exact,
            **self._numerics,
        )

    def improve(
        self,
        experience: Experience,
        coefficients: Coefficients,
        update: int,
        *,
        begun: ResponseOutputs | None,
        judge: Judge,
    ) -> UpdateResult:
        """K epochs over the experience: the PPO update itself."""
        ppo = self.config.ppo
        set_learning_rate(self.roles.optimizer, self.learning_rate(update))
        return ppo_update(
            self.roles.actor_critic,
            self.roles.optimizer,
            experience,
            coefficients.objective(experience),
            num_epochs=ppo.loop.num_epochs,
            num_minibatches=ppo.loop.num_minibatches,
            max_grad_norm=ppo.optimizer.max_grad_norm,
            early_stop_kl=ppo.loop.early_stop_kl,
            generator=stream(self.config.runtime.seed, "minibatches", update),
            train_policy=self.trains_policy(update),
            first_pass=begun,
            extra_loss=self.roles.pretraining.draw(update) if self.roles.pretraining else None,
            judge=judge,
            **self._numerics,
        )

    def distance_moved(self, experience: Experience) -> dict[str, float]:
        """How far the update has led, where a controller asks: one forward pass more."""
        if self.config.ppo.objective.policy_loss != "kl_penalty_adaptive":
            return {}
        return {"policy/distance_moved": distance_moved(self.roles.actor_critic, experience, **self._numerics)}

    def learning_rate(self, update: int) -> float:
        """The peak rate of an update's steps."""
        ppo = self.config.ppo
        return learning_rate_at(
            update - 1,
            ppo.loop.num_updates,
            learning_rate=ppo.loop.learning_rate,
            schedule=ppo.loop.schedule,
            warmup_steps=round(ppo.optimizer.warmup_fraction * ppo.loop.num_updates),
        )

    def trains_policy(self, update: int) -> bool:
        """False while the critic warms up."""
        return update > self.config.ppo.value.value_warmup_updates

    @property
    def _numerics(self) -> dict[str, Any]:
        return {
            "temperature": self.config.rollout.temperature,
            "precision": self.run.precision,
            "micro_batch_tokens": self.config.runtime.micro_batch_tokens,
        }
