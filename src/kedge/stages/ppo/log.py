"""Logs a PPO run: metrics, details and samples of each update in files, FLOPs, and progress on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from torch import nn

from kedge.algorithm.advantages import AdvantageInputs
from kedge.algorithm.control_variate import ControlVariateAdvantage
from kedge.algorithm.experience import Experience
from kedge.config import field_advice, schedule_in_words
from kedge.logs.experience_metrics import (
    describe_experience,
    describe_masked,
    describe_samples,
    describe_truncation,
    describe_update,
    reference_error,
    without_scores,
)
from kedge.logs.json_lines import MetricsLog, RunLog, SamplesLog
from kedge.models import LanguageModel, ScalarModel
from kedge.models.adapters import is_frozen
from kedge.models.frozen import num_weights
from kedge.ranks import budget_metrics
from kedge.rewards import WeightedReward
from kedge.rollout import ModelsRead
from kedge.runs.receipt import digest_of
from kedge.runs.run import Run
from kedge.runs.training import open_loggers
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.sampling import SampledBatch
from kedge.stages.ppo.trainer import Trainer
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.host_state import unwrapped
from kedge.training.optimizer_kinds import state_bytes
from kedge.training.runtime import memory_in_use
from kedge.training.update import UpdateResult
from kedge_base.machine.progress import Progress
from kedge_base.registry import service
from kedge_base.run_folder.output import ROLES_FILE, replace_file
from kedge_base.run_folder.record_format import CRITIC_CHECKS_FILE, DETAILS_FILE, EVALUATIONS_FILE

SHOWN = {
    "score": "reward/score_mean",
    "kl": "objective/kl",
    "entropy": "policy/entropy",
    "clipped": "policy/clip_fraction",
    "explained": "value/explained_variance",
    "constant": "group/constant",
    "eval/score": "eval/score",
    "eval/win_rate": "eval/win_rate",
}
"""The metrics of the progress display, by their displayed name."""

MAX_REFERENCE_ERROR = 0.01
"""Threshold of the warning, in nats per token; the usual KL of a response of 100 tokens is a few nats."""


@dataclass(frozen=True)
class Event:
    """The end of an update that was either made or dropped by the guard.

    Attributes:
        update: The update's number, from 1.
        metrics: Its row of `metrics.jsonl`.
    """

    update: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Made(Event):
    """The end of an update that was made.

    Attributes:
        batch: The sampled responses.
        experience: The experience that it trained on.
        result: The result of its epochs.
    """

    batch: SampledBatch
    experience: Experience
    result: UpdateResult


@dataclass
class PpoLog:
    """The open logs of a run; as an observer, it writes each update.

    Attributes:
        trainer: The run's trainer.
        metrics: A row per update.
        details: Distributions per update.
        samples: Full responses.
        evaluations: The evaluations on held-out prompts.
        critic_checks: The checks of the critic.
        progress: The progress display.
        diagnose: Reads the row of an update, and prints serious findings as they appear.
        says_missing_eos: Print the score of a missing stop token after the next update, whose scores determine it.
    """

    trainer: Trainer
    metrics: MetricsLog
    details: RunLog
    samples: SamplesLog
    evaluations: RunLog
    critic_checks: RunLog
    progress: Progress
    diagnose: Callable[[int, Mapping[str, float]], None]
    says_missing_eos: bool

    def describe(self, batch: SampledBatch, experience: Experience, result: UpdateResult) -> dict[str, float]:
        """Compute the metrics of the current update's experience, scores, optimizer steps, settings and memory.

        Args:
            batch: The sampled responses.
            experience: The experience of all trainable responses, before any of them is masked.
            result: The result of the epochs.
        """
        trainer = self.trainer
        settings = trainer.settings
        use = settings.estimation
        roles = trainer.roles
        rates = result.learning_rates
        is_start = trainer.update == 1 and settings.ppo.reference is None
        metrics = {
            **describe_experience(experience, is_exact=settings.exact),
            **(reference_error(experience) if is_start else {}),
            **(_reward_error(roles.reward) if trainer.update == 1 else {}),
            **(describe_truncation(experience) if settings.rollout.max_staleness and use.importance_cap else {}),
            **(describe_masked(experience) if use.importance_band else {}),
            **batch.metrics(compares_groups=settings.compares_groups),
            **result.metrics(),
            **self._flops(batch, experience, result),
            "policy/learning_rate": rates["learning_rate"],
            **({"value/learning_rate": rates["critic"]} if "critic" in rates else {}),
            **budget_metrics(trainer.run.micro_batch_tokens),
            "policy/staleness": trainer.update - 1 - int(batch.trained.rollout.policy_version.min()),
            "prompt/distinct": len({prompt.text for prompt in batch.prompts}) / len(batch.prompts),
            **{f"schedule/{field}": value for field, value in settings.scheduled.items()},
            **memory_in_use(trainer.run.device),
        }
        for part in filter(None, (trainer.coefficients, roles.missing_eos, trainer.guard, trainer.prompt_means)):
            metrics |= part.metrics()
        for phase in filter(None, (trainer.warmup, trainer.frozen)):
            metrics |= phase.metrics(trainer.update)
        if isinstance(use.advantage, ControlVariateAdvantage):
            known: AdvantageInputs = {"values": experience.values, "group": experience.rollout.group}
            metrics |= use.advantage.metrics(experience.rewards, experience.reward_mask, **known)
        if roles.player is not None:
            metrics |= roles.player.metrics(batch.scored.rollout, batch.rollouts)
        return without_scores(metrics) if roles.reward.is_empty else metrics

    def after_update(self, event: Event) -> None:
        """Write an update to all logs; a dropped update only has a row of metrics."""
        self.metrics.write(event.update, event.metrics)
        if not self.trainer.run.ranks.is_first:  # only the first rank writes logs
            return
        if isinstance(event, Made):
            rollout = event.experience.rollout
            rows = (rollout.prompt_ids, rollout.response_ids, rollout.action_mask, event.experience.rewards)
            self.trainer.run.receipt.trained = digest_of(*rows)
            self._write_responses(event)
            self._warn_of_rounding(event.metrics.get("objective/reference_error", 0.0))
            shown = {name: event.metrics[metric] for name, metric in SHOWN.items() if metric in event.metrics}
            self.progress.update(event.update, shown)
        self.diagnose(event.update, event.metrics)
        if self.says_missing_eos and isinstance(event, Made):
            self.says_missing_eos = False
            score = event.metrics["reward/missing_eos_score"]
            subtracts = self.trainer.settings.rollout.subtracts_missing_eos
            effect = f"loses {-score:.4g}" if subtracts else f"scores {score:.4g}"
            self.progress.say(f"A response without a stop token {effect} (rollout.missing_eos_score=auto).")

    def _write_responses(self, event: Made) -> None:
        """Write the distributions of an update, and a few of its responses."""
        trainer = self.trainer
        experience = event.experience
        passes = event.result.passes
        samples = describe_samples(
            experience,
            event.batch.trained.prompts,
            trainer.roles.tokenizer,
            count=trainer.settings.config.runtime.num_samples,
            entropies=passes[0].entropies if passes else None,
            new_logprobs=passes[-1].logprobs if passes else None,
            reasons=event.batch.trained.reasons,
            has_scores=not trainer.roles.reward.is_empty,
        )
        scored = event.batch.scored
        figures = describe_update(
            experience,
            [each.logprobs for each in passes],
            clip=trainer.settings.clip,
            scores=scored.total_scores,
            lengths=scored.rollout.response_lengths,
        )
        self.details.append(event.update, figures)
        self.samples.write(event.update, samples)

    def _warn_of_rounding(self, error: float) -> None:
        """Warn if the KL is measured against a reference that rounding has changed."""
        dtype = self.trainer.run.config.runtime.frozen_dtype
        if error > MAX_REFERENCE_ERROR and dtype not in ("auto", "fp32"):
            self.progress.say(
                f"Held in {dtype}, the reference differs from the policy by {error:.2g} nats per token "
                "before the first step, and every KL by as much; runtime.frozen_dtype=auto rounds only what changes no "
                "result."
            )

    def _flops(self, batch: SampledBatch, experience: Experience, result: UpdateResult) -> dict[str, float]:
        """Compute the FLOPs of the current update's phases."""
        trainer = self.trainer
        rollout = batch.trained.rollout
        # An update that lost responses can have fewer responses than minibatches.
        steps_per_pass = min(trainer.settings.ppo.num_minibatches, rollout.num_responses)
        share = 1.0 if result.trained_share is None else result.trained_share
        read = 1.0 if experience.evaluated is None else share
        rest = read - share if result.reused_first_pass else 0.0
        return self._costs.metrics(
            rollout,
            sampled=batch.rollouts,
            estimated=experience.rollout,
            models_read=trainer.models_read_before(result),
            read_share=read,
            num_passes=share * result.num_gradients / steps_per_pass,
            train_policy=trainer.trains_policy,
            train_critic=trainer.roles.actor_critic.trains_critic,
            num_critic_passes=share * result.num_critic_gradients / steps_per_pass,
            num_readings=int(trainer.settings.measures_distance) + result.num_readings + rest,
        )

    @cached_property
    def _costs(self) -> Costs:
        return Costs.of(self.trainer.roles, recomputes=self.trainer.run_settings.recomputes)


def _reward_error(reward: WeightedReward) -> dict[str, float]:
    """Compute `reward/rounding_error`: the weighted change of the models' scores through number formats."""
    weights = dict(zip(reward.names, reward.weights, strict=True))
    errors = ((weights[name], each.model.rounding_error) for name, each in reward.weighted_models.items())
    known = [abs(weight) * error for weight, error in errors if error is not None]
    return {"reward/rounding_error": sum(known)} if known else {}


@contextmanager
def ppo_log(trainer: Trainer, loop: CheckpointedLoop) -> Iterator[PpoLog]:
    """Open the logs of a run, print the schedule and the stop tokens, and flush the logs before each checkpoint."""
    run = trainer.run
    config = run.config
    roles = trainer.roles
    missing_eos = roles.missing_eos
    with (
        Progress("ppo", total=config.ppo.num_updates, done=loop.done) as progress,
        open_loggers(run, warn=progress.say) as loggers,
        MetricsLog(run.folder, also=loggers.write) as metrics,
        RunLog(run.folder / DETAILS_FILE) as details,
        SamplesLog(run.folder, also=loggers.write_samples) as samples,
        RunLog(run.folder / EVALUATIONS_FILE) as evaluations,
        RunLog(run.folder / CRITIC_CHECKS_FILE) as critic_checks,
    ):
        progress.say(schedule_in_words(config, len(roles.prompts.train), len(roles.prompts.held_out)))
        progress.say(roles.stop_tokens.line)
        loop.when_restored(metrics.open, details.open, samples.open)
        loop.sync_before_saving(run, metrics, details, samples, evaluations, critic_checks)
        doctor = service("live_doctor")(
            run.folder,
            run.facts,
            config.model_dump(mode="json"),
            say=progress.say,
            done=loop.done,
            advice=field_advice,
        )
        yield PpoLog(
            trainer,
            metrics,
            details,
            samples,
            evaluations,
            critic_checks,
            progress,
            doctor.see,
            says_missing_eos=loop.done == 0 and missing_eos is not None and not missing_eos.is_known,
        )


@dataclass(frozen=True)
class ForwardCost:
    """The FLOPs of a model's passes: 2 per weight and token, without the attention products.

    A backward pass costs as much for the gradient of the inputs, and again for that of the weights that are trained.

    Attributes:
        per_token: Number of weights used for every token: all except the embeddings, which are looked up.
        per_action: Number of weights of the output layer, which is only computed at actions.
        frozen_per_token: The part of `per_token` that is frozen under an adapter.
        frozen_per_action: The frozen part of `per_action`.
        shares_up_to: Maximum length of rows that can share a prefix.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1.
    """

    per_token: int = 0
    per_action: int = 0
    frozen_per_token: int = 0
    frozen_per_action: int = 0
    shares_up_to: float = math.inf

    @classmethod
    def of(cls, model: LanguageModel | ScalarModel | None) -> ForwardCost:
        """The cost of a model; 0 for None."""
        if model is None:
            return cls()
        pretrained = model.causal if isinstance(model, LanguageModel) else model.classifier
        output = pretrained.get_output_embeddings()
        layer = list(output.parameters()) if isinstance(output, nn.Linear) else []
        looked_up = [each.weight for each in pretrained.modules() if isinstance(each, nn.Embedding)]
        excluded = {id(each) for each in (*layer, *looked_up)}  # a tied output layer is in both
        inner = [each for each in pretrained.parameters() if id(each) not in excluded]
        parts = (inner, layer, filter(is_frozen, inner), filter(is_frozen, layer))
        return cls(*map(num_weights, parts), shares_up_to=model.shares_up_to)

    def flops(self, num_tokens: int, num_actions: int) -> float:
        """The FLOPs of a forward pass."""
        return 2.0 * (self.per_token * num_tokens + self.per_action * num_actions)

    def backward_flops(self, num_tokens: int, num_actions: int) -> float:
        """The FLOPs of a backward pass."""
        frozen = 2.0 * (self.frozen_per_token * num_tokens + self.frozen_per_action * num_actions)
        return 2 * self.flops(num_tokens, num_actions) - frozen


@dataclass(frozen=True)
class Costs:
    """The forward costs of a run's models.

    Attributes:
        policy: Policy and shared critic.
        critic: A separate critic.
        reference: The reference.
        rewards: The reward models.
        recomputes: Activations are recomputed in the backward pass.
        judges: The reward models with weight 0, which are not part of the update's cost.
    """

    policy: ForwardCost
    critic: ForwardCost
    reference: ForwardCost
    rewards: Sequence[ForwardCost]
    recomputes: bool = False
    judges: Sequence[ForwardCost] = ()

    @classmethod
    def of(cls, roles: Roles, *, recomputes: bool) -> Costs:
        """The costs of a run's models."""
        return cls(
            policy=ForwardCost.of(roles.actor_critic.policy),
            critic=ForwardCost.of(roles.actor_critic.critic),
            reference=ForwardCost.of(roles.reference),
            rewards=[ForwardCost.of(each.model) for each in roles.reward.weighted_models.values()],
            recomputes=recomputes,
            judges=[ForwardCost.of(each.model) for each in roles.reward.judges.values()],
        )

    def metrics(
        self,
        rollout: Any,
        *,
        sampled: Sequence[Any] = (),
        estimated: Any = None,
        models_read: ModelsRead,
        read_share: float = 1.0,
        num_passes: float,
        train_policy: bool,
        train_critic: bool = True,
        num_critic_passes: float = 0.0,
        num_readings: float = 0,
    ) -> dict[str, float]:
        """Compute `flops/PHASE`, their sum in steps of supervised fine-tuning on the same tokens, and the judges'
        FLOPs.

        Args:
            rollout: The responses that the update trains on: a `Rollout`, or a plan's stand-in for one.
            sampled: Everything that was sampled and scored; empty if that is `rollout`.
            estimated: Everything that experience was computed for; None if that is `rollout`.
            models_read: The models that needed a separate forward pass for old log probabilities and values.
            read_share: Share of `estimated` that they and the reference read.
            num_passes: Number of epochs with gradients of the total loss; can be a fraction.
            train_policy: False if only the critic was trained.
            train_critic: False if no pass evaluated the critic, which was not trained.
            num_critic_passes: Number of additional epochs of the critic alone; can be a fraction. For a shared head
                they are forward passes through the trunk.
            num_readings: Number of forward passes besides those of the epochs; can be a fraction.
        """
        sampled = sampled or (rollout,)

        def read(responses: Any, *models: ForwardCost) -> int:
            shares = max(responses.row_lengths, default=0) <= min(each.shares_up_to for each in models)
            return responses.num_distinct_tokens if shares else responses.num_read_tokens

        def scoring(models: Sequence[ForwardCost]) -> float:
            return sum((each.flops(read(responses, each), 0) for each in models for responses in sampled), 0.0)

        def sizes(responses: Any) -> Iterator[tuple[int, int]]:
            for each in (responses, responses.for_critic):
                yield read(each, self.policy, self.critic), each.num_actions

        size, critic_size = sizes(rollout)
        before, critic_before = sizes(estimated or rollout)
        policy = self.policy.flops(*size)
        critic = self.critic.flops(*critic_size)
        again = 1 + self.recomputes
        policy_trained = again * policy + self.policy.backward_flops(*size)
        critic_read, critic_trained = 0.0, 0.0
        if train_critic:
            critic_read, critic_trained = critic, again * critic + self.critic.backward_flops(*critic_size)
        phases = {
            "rollout": sum(self.policy.flops(read(each, self.policy), each.num_actions) for each in sampled),
            "reward": scoring(self.rewards),
            "experience": read_share
            * (
                self.reference.flops(*before)
                + (models_read != "nothing") * self.critic.flops(*critic_before)
                + (models_read == "all") * self.policy.flops(*before)
            ),
            "train": num_passes * ((policy_trained if train_policy else policy) + critic_trained)
            + num_readings * (policy + critic_read)
            + num_critic_passes * (critic_trained if critic else self.policy.flops(size[0], 0)),
        }
        sft_step = policy + self.policy.backward_flops(*size)
        total = sum(phases.values()) / sft_step
        if self.judges:
            phases["judge"] = scoring(self.judges)
        return {**{f"flops/{name}": flops for name, flops in phases.items()}, "cost/sft_steps": total}


def write_roles(run: Run, roles: Roles) -> None:
    """Write `roles.json`: parameters and bytes per model; adapter bases are listed separately."""
    critic = roles.actor_critic.critic
    trained = ("policy", "critic") if roles.actor_critic.trains_critic else ("policy",)
    scoring = {f"reward: {name}": each.model for name, each in roles.reward.models.items()}
    models = {"policy": roles.actor_critic.policy, "critic": critic, "reference": roles.reference, **scoring}
    found = {name: list(model.parameters()) for name, model in models.items() if model is not None}
    bases = {weight for weights in found.values() for weight in weights if is_frozen(weight)}
    own = {name: [weight for weight in weights if weight not in bases] for name, weights in found.items()}
    kept = state_bytes(unwrapped(roles.optimizer))
    sizes: dict[str, dict[str, Any]] = {
        name: {
            "parameters": num_weights(weights),
            "weights_bytes": sum(each.nbytes for each in weights),
            "optimizer_bytes": sum(kept.get(cast(nn.Parameter, each), 0) for each in weights if name in trained),
            "trained": name in trained,
        }
        for name, weights in ({"base": [*bases], **own} if bases else own).items()
    }
    for name, model in scoring.items():
        if model.rounding_error is not None:
            sizes[name]["rounding_error"] = model.rounding_error
    replace_file(run.folder / ROLES_FILE, [json.dumps(sizes, indent=2).encode()])
