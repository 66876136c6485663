"""The trainer of PPO: samples, scores, estimates advantages, and improves policy and critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.advantages import Advantage, RewardToGo
from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout
from kedge.config import Config
from kedge.data import Prompt, encode_prompt
from kedge.models import PolicyWeights
from kedge.ranks import AdaptiveTokens, checksum
from kedge.rewards import WeightedReward
from kedge.rewards.score import ScoredRollout, score_rollout
from kedge.rollout import (
    Engine,
    Models,
    ModelsRead,
    RolloutOutputs,
    evaluate_rollout,
    experience_from,
    reference_logprobs,
)
from kedge.runs.run import Run
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.settings import PpoSettings, coefficients_of, prompt_means_of, value_warmup_of
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.controllers import Coefficients, FrozenCritic, ValueWarmup
from kedge.training.guard import Guard
from kedge.training.learner import LanguageLearner
from kedge.training.optimizer import set_learning_rate
from kedge.training.prompt_means import PromptMeans
from kedge.training.readout import Readout
from kedge.training.runtime import stream, stream_seed, stream_seeds
from kedge.training.update import PpoUpdate, UpdateResult, distance_moved, trained_rows
from kedge_base.machine.memory import give_back


@dataclass
class Trainer:
    """The four steps of a PPO update, on the models of a run.

        trainer.begin(update)
        rollout = trainer.sample(prompts)
        scored = trainer.score(rollout, prompts)
        experience = trainer.estimate(scored)
        result = trainer.improve(experience)

    Attributes:
        run: The run.
        roles: Its models.
        run_settings: The run's settings.
        settings: The current update's settings.
        coefficients: The current coefficients.
        warmup: The critic's warm-up; None for no warm-up.
        frozen: Keeps the critic from being trained; None unless it starts frozen.
        prompt_means: The baselines of `ppo.advantage=spo`; None for other estimators.
        guard: Checks experience and steps; None checks nothing.
        update: The current update, from 1.
        staleness: Number of updates between the sampling weights and the trained ones.
        models_read: The models that read the responses of the last `estimate`, unless `improve` used the same pass.
    """

    run: Run
    roles: Roles
    run_settings: PpoSettings
    settings: PpoSettings
    coefficients: Coefficients
    warmup: ValueWarmup | None = None
    frozen: FrozenCritic | None = None
    prompt_means: PromptMeans | None = None
    guard: Guard | None = None
    update: int = 1
    staleness: int = 0
    models_read: ModelsRead = field(default="nothing", init=False)
    _learner: LanguageLearner | None = field(default=None, init=False)
    _published: tuple[int, int] | None = field(default=None, init=False)

    @classmethod
    def of(cls, config: Config, run: Run, roles: Roles) -> Trainer:
        """Create the trainer at the start of a run."""
        settings = PpoSettings.of(config, exact=roles.engine.is_exact, own=roles.own)
        is_frozen = config.ppo.critic.name == "frozen"
        frozen = FrozenCritic(roles.actor_critic.train_critic) if is_frozen else None
        means, warmup = prompt_means_of(config), value_warmup_of(config)
        return cls(run, roles, settings, settings, coefficients_of(config), warmup, frozen, means)

    def register(self, loop: CheckpointedLoop) -> None:
        """Register the coefficients and everything else that a run determines itself for saving with a loop."""
        loop.register("coefficients", self.coefficients)
        if (missing_eos := self.roles.missing_eos) is not None and not missing_eos.is_known:
            loop.register("missing EOS", missing_eos, optional=True)
        if self.warmup is not None and self.warmup.ends_by_result:
            loop.register("value warm-up", self.warmup, optional=True)
        if self.frozen is not None:
            loop.register("frozen critic", self.frozen, optional=True)
        if self.prompt_means is not None:
            loop.register("prompt means", self.prompt_means, optional=True)

    def begin(self, update: int) -> None:
        """Start an update: set its scheduled settings and coefficients."""
        self.update = update
        self.settings = self.run_settings.at(update)
        if self.warmup is not None:
            if self.warmup.ends_by_result:
                controllers = self.coefficients.controllers
                self.coefficients.controllers = replace(controllers, num_policy_updates=self.warmup.num_policy_updates)
            if update == self.warmup.num_updates + 1 and self.guard is not None:
                self.guard.forget_steps()  # so far only the critic's, which are smaller than the policy's
        if self.settings.scheduled:
            self.coefficients.follow(self.settings.scheduled)

    @property
    def trains_policy(self) -> bool:
        """False while the critic warms up."""
        return self.warmup is None or self.warmup.trains_policy(self.update)

    @property
    def num_passes(self) -> int:
        """Passes of a complete update over its responses, with those of the critic alone."""
        ppo = self.settings.ppo
        return ceil(ppo.num_epochs) * (ppo.num_critic_epochs if self.roles.actor_critic.trains_critic else 1)

    @property
    def pad_id(self) -> int:
        """The token id of padding."""
        return cast(int, self.roles.tokenizer.pad_token_id)

    def publish(self, version: int) -> dict[str, float]:
        """Send the policy's weights to an engine that has its own copy, unless it already has them.

        A callback or the surrounding loop may have changed them.

        Args:
            version: Number of updates that the policy has completed.

        Returns:
            Metrics, such as seconds.
        """
        policy = self.roles.actor_critic.policy.causal
        is_copied = self.run_settings.rollout.engine.name != "builtin" and not self.run.ranks.is_sharded
        state = (version, checksum([policy]) if is_copied else 0)
        is_new = state != self._published
        if is_copied:  # a callback may have changed those of one rank
            is_new = bool(self.run.ranks.largest(int(is_new)))
        if not is_new:
            return {}
        metrics = self.roles.engine.publish(self._weights, version)
        self._published = state
        return metrics

    def sample(
        self,
        prompts: Sequence[Prompt],
        *names: str | int,
        groups: Sequence[int] | None = None,
        policy_version: int | None = None,
        greedy: bool = False,
        prompt_ids: Sequence[list[int]] | None = None,
        max_new_tokens: int | None = None,
    ) -> Rollout:
        """Sample responses, each from its own random stream.

        Args:
            prompts: The prompts.
            names: The name of the random streams; by default the current update's.
            groups: For each response, the index of its prompt; by default `rollout.num_responses` for each prompt.
            policy_version: Number of updates that the policy has completed; by default, all before this one.
            greedy: Take the most likely tokens instead of sampling.
            prompt_ids: The prompts in tokens; None encodes their texts.
            max_new_tokens: Limit of the length; None uses the settings' limit.
        """
        settings = self.settings
        if groups is None:
            groups = [group for group in range(len(prompts)) for _ in range(settings.rollout.num_responses)]
        if policy_version is None:
            policy_version = self.update - 1 - self.staleness
        names = names or ("rollout", self.update)
        longest = max_new_tokens or settings.rollout.max_new_tokens
        engine = self.roles.engine.with_sampling(
            max_new_tokens=longest, temperature=0.0 if greedy else settings.rollout.temperature
        )
        seeds = stream_seeds(settings.seed, *names, count=len(groups))
        if self.roles.player is not None:
            # The episodes of a group start in the same state.
            starts = stream_seeds(settings.seed, "environment", *names, count=len(prompts))
            dialogue = self.roles.player.episodes(
                self.roles.tokenizer,
                [prompts[group] for group in groups],
                [starts[group] for group in groups],
                max_new_tokens=longest,
            )
            return self.roles.player.check(
                engine.generate((), seeds=seeds, groups=groups, policy_version=policy_version, dialogue=dialogue)
            )
        encoded = prompt_ids or [encode_prompt(self.roles.tokenizer, prompt.text) for prompt in prompts]
        return engine.generate(
            [encoded[group] for group in groups], seeds=seeds, groups=groups, policy_version=policy_version
        )

    def score(
        self,
        rollout: Rollout,
        prompts: Sequence[Prompt],
        *names: str | int,
        scores: Sequence[object] | None = None,
    ) -> ScoredRollout:
        """Score each response with the weighted sum of the rewards; drop responses without a score.

        Args:
            rollout: The responses.
            prompts: The prompts, indexed by the rollout's groups.
            names: The name of the random stream of the rewards; by default the current update's.
            scores: One per response, instead of those from the rewards.

        Raises:
            RewardError: A reward failed, or scores are invalid.
            UnscoredError: No response has a score.
        """
        each = [prompts[group] for group in rollout.group.tolist()]
        if self.roles.privileged is not None and rollout.privileged_ids is None:
            rollout = self.roles.privileged.added(rollout, [prompt.row for prompt in each], self.roles.tokenizer)
        return score_rollout(
            rollout,
            each,
            self.roles.reward if scores is None else WeightedReward.of_scores(scores),
            self.roles.tokenizer,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            missing_eos=self.roles.missing_eos,
            seed=stream_seed(self.settings.seed, *(names or ("reward", self.update))),
            stop_tokens=self.roles.stop_tokens.ids,
        )

    def estimate(self, scored: ScoredRollout, *, takes_steps: bool = True) -> Experience:
        """Compute rewards, values, advantages and returns of every action to train on; they are then frozen.

        Args:
            scored: The responses with their scores.
            takes_steps: `improve` will take steps on them; its first forward pass is also used here if possible.
                A new critic's values start from the first returns that it is trained on.
        """
        learner = self._new_learner()
        budget = self.run.micro_batch_tokens
        if isinstance(budget, AdaptiveTokens) and not budget.is_found:
            learner.find_tokens(scored.rollout, self.roles.optimizer)
        if self.prompt_means is not None:
            means = self.prompt_means.baselines(scored.prompts)
            scored = replace(scored, baseline=torch.tensor(means, device=scored.scores.device))
        started = self.roles.actor_critic.values_started
        starts = takes_steps and started is not None and not started
        rows = self._trained_rows(scored.rollout.num_responses) if takes_steps and self._reads_trained_rows else None
        read = scored.rollout if rows is None else scored.rollout.select(rows)
        first_pass = learner.first_pass(read) if takes_steps and not starts else None
        outputs = self._evaluated(scored.rollout, first_pass, rows)
        self.models_read = outputs.models_read if first_pass is None else "all"
        experience = self._estimated(scored, self._with_started_values(scored, outputs) if starts else outputs)
        if self.guard is not None:
            self.guard.check_experience(experience)
        self._learner = learner  # not of a dropped update, whose evaluation needs the memory of the first pass
        return experience

    def evaluate(self, scored: ScoredRollout, *, advantage: Advantage | None = None) -> Experience:
        """Compute the same quantities as `estimate` for responses that are not trained on.

        Args:
            scored: The responses with their scores. The baseline is 0, so the advantages are the returns.
            advantage: The estimator to use instead of `ppo.advantage`, token by token.
        """
        changes: dict[str, Any] = (
            {} if advantage is None else {"advantage": advantage, "process_advantage": None, "credit": "token"}
        )
        return self._estimated(scored, self._evaluated(scored.rollout), **changes)

    def improve(self, experience: Experience, *, takes_steps: bool = True) -> UpdateResult:
        """Make the epochs of the update over the experience.

        Args:
            experience: The experience.
            takes_steps: False for groups without spread: Adam would scale up even the small remaining gradient of the
                KL or the entropy to full size.
        """
        learner = self._learner
        settings = self.settings
        assert learner is not None, "`estimate` comes first"
        self._learner = None
        warmup_updates = 0 if self.warmup is None else self.warmup.num_updates
        rates = settings.learning_rates(self.update, warmup_updates=warmup_updates, train_policy=self.trains_policy)
        readout = None
        if takes_steps and self.roles.actor_critic.readout is not None:
            readout = Readout(learner, experience, num_batches=settings.ppo.readout_batches)
        result = self._epochs(learner, experience, rates, readout) if takes_steps else UpdateResult(refused=True)
        if readout is not None and not result.refused:
            if self.guard is not None:
                self.guard.begin_changes()  # the fit changes weights as a step does
            readout.fit()
        result.learning_rates = rates
        if settings.measures_distance:
            result.distance_moved = distance_moved(learner, experience)
        result.reused_first_pass = learner.reused_first_pass
        if self.run_settings.recomputes and self.run.device.type == "cpu":
            give_back()  # otherwise fragmentation left by these passes grows the process by a fifth
        return result

    def models_read_before(self, result: UpdateResult) -> ModelsRead:
        """The models that needed a pass for the last experience besides those of its epochs."""
        if not result.reused_first_pass:
            return self.models_read
        return "nothing" if self.roles.actor_critic.trains_critic else "critic"

    def in_background(self, update: int, version: int, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> Trainer:
        """Return a trainer that samples an update's responses ahead of time, in another thread.

        Args:
            update: The update's number.
            version: Number of updates that the sampling policy has completed.
            engine: The engine of that thread.
            tokenizer: A copy for that thread: tokenizers are not safe to use from two.
        """
        roles = replace(self.roles, engine=engine, tokenizer=tokenizer)
        settings = self.run_settings.at(update)
        return replace(self, roles=roles, settings=settings, guard=None, update=update, staleness=update - 1 - version)

    def measuring(self, *, exact: bool) -> Trainer:
        """Return a trainer for measurements on responses that are not trained on; it changes no state that training
        uses.

        Args:
            exact: The responses were sampled with the current weights, so their log probabilities and values are
                current.
        """
        roles = replace(self.roles, missing_eos=copy(self.roles.missing_eos))
        settings = self.run_settings.at(self.update)
        return replace(self, roles=roles, settings=settings if exact else settings.inexact())

    def logprobs(self, rollout: Rollout) -> Tensor:
        """Log probabilities (nats) of the actions under the current policy, `[batch, time]`; 0 elsewhere."""
        policy = replace(self.models, reference=self.roles.actor_critic.policy)
        found = reference_logprobs(rollout, policy)
        assert found is not None
        return found

    def unscheduled(self) -> Trainer:
        """Return a trainer with the run's settings in every update, so that measurements are comparable."""
        return replace(self, settings=self.run_settings, guard=None)

    @property
    def models(self) -> Models:
        """The models that read the responses of the current update."""
        return Models(
            self.roles.actor_critic,
            self.roles.reference,
            temperature=self.settings.rollout.temperature,
            reuse_sampled=self.settings.exact,
            precision=self.run.precision,
            micro_batch_tokens=self.run.micro_batch_tokens,
            ranks=self.run.ranks,
        )

    @property
    def _shuffles(self) -> torch.Generator:
        return stream(self.settings.seed, "minibatches", self.update)

    def _trained_rows(self, count: int) -> Tensor:
        """Find the rows that `improve` will train on, if that is a share of them."""
        ppo = self.settings.ppo
        return trained_rows(count, ppo.num_minibatches, share=ppo.num_epochs, generator=self._shuffles)

    @property
    def _reads_trained_rows(self) -> bool:
        """True if the advantages of the rows to train on need no model's outputs for the other rows."""
        settings = self.settings
        others_count = self.roles.actor_critic.has_critic or settings.reward_kl_coef(self.coefficients)
        others_count = others_count or settings.masks_truncated or settings.measures_distance
        return settings.ppo.num_epochs < 1 and not others_count

    @cached_property
    def _weights(self) -> PolicyWeights:
        merged = self.run_settings.rollout.engine.name == "vllm"
        return PolicyWeights(self.roles.actor_critic.policy, merged=merged)

    def _new_learner(self) -> LanguageLearner:
        ppo = self.settings.ppo
        trains_all = ppo.num_epochs >= 1
        # An exact sampler's log probabilities are known: rows that are not trained on need no pass.
        reuses = trains_all or self._reads_trained_rows or not self.settings.exact
        return LanguageLearner(
            self.roles.actor_critic,
            one_minibatch=ppo.num_minibatches == 1 and self.trains_policy and reuses,
            choose=None if trains_all or self._reads_trained_rows else self._trained_rows,
            entropy_gradient=self.coefficients.entropy_coef != 0,
            value_after_last=self.settings.estimation.value_after_last,
            temperature=self.settings.rollout.temperature,
            precision=self.run.precision,
            micro_batch_tokens=self.run.micro_batch_tokens,
            ranks=self.run.ranks,
        )

    def _evaluated(
        self, rollout: Rollout, first_pass: PolicyOutputs | None = None, rows: Tensor | None = None
    ) -> RolloutOutputs:
        after_last = self.settings.estimation.value_after_last
        return evaluate_rollout(rollout, self.models, value_after_last=after_last, first_pass=first_pass, rows=rows)

    def _with_started_values(self, scored: ScoredRollout, outputs: RolloutOutputs) -> RolloutOutputs:
        """Start a new critic's values from the first returns, and correct the values in these outputs."""
        to_go = RewardToGo(self.settings.ppo.gamma)
        first = self._estimated(scored, outputs, advantage=to_go, process_advantage=None)
        assert first.values is not None, "only a critic has values to start"
        cut_off = scored.rollout.cut_off  # what such an episode paid so far is not its return
        known = None if cut_off is None or cut_off.all() else ~cut_off
        values = self.roles.actor_critic.start_values(first.values, first.returns, first.reward_mask, rows=known)
        return replace(outputs, values=values)

    def _estimated(self, scored: ScoredRollout, outputs: RolloutOutputs, **changes: Any) -> Experience:
        """Compute experience with the update's estimation, or with changes to it."""
        estimation = replace(self.settings.estimation, **changes)
        if scored.baseline is None and estimation.advantage.needs == "baseline":
            scored = replace(scored, baseline=torch.zeros_like(scored.scores))
        kl_coef = self.settings.reward_kl_coef(self.coefficients)
        return experience_from(scored, outputs, self.models, estimation, kl_coef=kl_coef)

    def _epochs(
        self,
        learner: LanguageLearner,
        experience: Experience,
        learning_rates: Mapping[str, float],
        readout: Readout | None,
    ) -> UpdateResult:
        settings = self.settings
        ppo = settings.ppo
        update = self.update
        trains_policy = self.trains_policy
        if not (trains_policy or learner.needs_values):
            if readout is not None:
                readout.read_all()
            return UpdateResult(num_readings=int(readout is not None))
        objective = settings.objective(experience, self.coefficients, train_policy=trains_policy)
        optimizer = self.roles.optimizer
        pretraining = self.roles.pretraining
        set_learning_rate(optimizer, **learning_rates, value_unit=objective.value_unit)
        with nullcontext() if trains_policy else learner.frozen_policy():
            result = PpoUpdate(
                learner,
                optimizer,
                experience,
                objective,
                num_epochs=ppo.num_epochs,
                num_minibatches=ppo.num_minibatches,
                max_grad_norm=settings.max_grad_norm,
                num_critic_epochs=ppo.num_critic_epochs,
                early_stop_kl=ppo.early_stop_kl,
                generator=self._shuffles,
                critic_generator=stream(settings.seed, "critic minibatches", update),
                extra_loss=pretraining.draw(update) if pretraining and trains_policy else None,
                check_step=_unchecked if self.guard is None else self.guard.allows,
                on_step=_unchecked if self.guard is None else self.guard.takes,
                read_states=None if readout is None else readout.read,
            ).run()
        # Nothing reads them again, and the next update's sampling and passes need the memory.
        optimizer.zero_grad(set_to_none=True)
        return result


def _unchecked(*_: object) -> bool:
    return True
