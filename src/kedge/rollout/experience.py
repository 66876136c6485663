"""Computes experience from a rollout and its scores: log probabilities, values, rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kedge.algorithm.advantages import Advantage, AdvantageInputs
from kedge.algorithm.control_variate import ControlVariateAdvantage
from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout, check_masks
from kedge.algorithm.group_advantages import GroupInGroupAdvantage
from kedge.algorithm.logprobs import BandOf, truncated_importance_weights, within_ratio_band
from kedge.algorithm.masking import keep_counted, magnitude_of, magnitude_of_rewards, masked_whiten
from kedge.algorithm.own import OwnAdvantage
from kedge.algorithm.shaping import KLEstimator, KLScope, ScoreAt, shape_rewards
from kedge.algorithm.turns import Turns, turn_states
from kedge.models import ActorCritic, LanguageModel, Precision, response_logprobs
from kedge.ranks import ALONE, PassTokens, Prompts, Ranks, evaluate_in_passes
from kedge_base.errors import ConfigError

ModelsRead = Literal["nothing", "critic", "all"]
"""The models that read a rollout: policy and critic, or only the critic."""


class Scored(Protocol):
    """Sampled responses with their scores."""

    @property
    def rollout(self) -> Rollout:
        """The responses."""
        ...

    @property
    def scores(self) -> Float[Tensor, " batch"]:
        """One per response, including any penalty for a missing stop token."""
        ...

    @property
    def token_scores(self) -> Float[Tensor, "batch time"] | None:
        """One per action, from a process reward."""
        ...

    @property
    def baseline(self) -> Float[Tensor, " batch"] | None:
        """Score of the greedy response to each row's prompt, if the advantage needs it."""
        ...


@dataclass(frozen=True)
class Models:
    """The models that read responses, with their options.

    Attributes:
        actor_critic: Policy and critic, with the weights used for sampling.
        reference: The frozen reference; None if the KL is neither penalized nor logged.
        temperature: The sampling temperature; divides the logits of policy and reference.
        reuse_sampled: Reuse the engine's log probabilities and values, because they are exact.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward pass; None evaluates all rows at once.
        ranks: They share the passes through the models, and all get all results.
    """

    actor_critic: ActorCritic
    reference: LanguageModel | None = None
    temperature: float = 1.0
    reuse_sampled: bool = False
    precision: Precision = "fp32"
    micro_batch_tokens: PassTokens = None
    ranks: Ranks = ALONE


@dataclass(frozen=True, kw_only=True)
class Estimation:
    """Options for turning scores into rewards, and rewards into advantages.

    Attributes:
        advantage: Estimates advantages and returns from rewards and values.
        kl_estimator: Estimator of the KL in the reward.
        kl_scope: `token`: subtract each token's KL from its own reward; `sequence`: the summed KL from the score (S1).
        score_at: The slot of the score: the last action, or the slot after it.
        whiten_rewards: Scale rewards to unit variance, keeping their mean.
        whiten_advantages: Shift and scale the advantages to mean 0 and variance 1; the returns are unchanged.
        process_advantage: Estimates the advantages of the token scores, which are added to those of the other rewards.
            None adds the token scores to the rewards instead.
        positive_min_score: Minimum score, including token scores, of responses to imitate; None for no imitation.
        old_from: The source of the old log probabilities; see `Experience`.
        importance_cap: Cap of the importance weights π_trainer/π_sampler of the policy loss; None for no weights.
        importance_band: Tokens outside this band of the ratio get weight 0: the kind of ratio, and its lower and upper
            limit; None for no band.
        gamma: γ, which discounts the value of the state in which an episode was cut off.
        credit: What is one action: a token, or a turn, with the sum of its tokens' rewards, the value before its first
            one, and one advantage for all of them.
    """

    advantage: Advantage
    kl_estimator: KLEstimator = "k1"
    kl_scope: KLScope = "token"
    score_at: ScoreAt = "last"
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    process_advantage: Advantage | None = None
    positive_min_score: float | None = None
    old_from: Literal["trainer", "sampler"] = "trainer"
    importance_cap: float | None = None
    importance_band: tuple[BandOf, float, float] | None = None
    gamma: float = 1.0
    credit: Literal["token", "turn"] = "token"

    @cached_property
    def value_after_last(self) -> bool:
        """True if the state after the last action also needs a value."""
        return self.score_at == "after_last"


def _models_to_read(rollout: Rollout, models: Models, *, value_after_last: bool) -> ModelsRead:
    """The models with outputs that sampling did not record.

    Args:
        rollout: The responses.
        models: The models.
        value_after_last: The state after the last action needs a value as well.
    """
    actor_critic = models.actor_critic
    if not models.reuse_sampled:
        return "all"
    if not actor_critic.has_critic or (rollout.values is not None and not value_after_last):
        return "nothing"
    return "all" if actor_critic.critic is None else "critic"


@dataclass(frozen=True)
class RolloutOutputs:
    """Outputs of the models for the actions of a rollout.

    Attributes:
        logprobs: Log probabilities under the policy, nats.
        values: The critic's values; None without one.
        ref_logprobs: Log probabilities under the reference, nats; None without one.
        models_read: The models with outputs that sampling did not record.
        evaluated: True for the rows that were evaluated; None for all. See `Experience.evaluated`.
    """

    logprobs: Float[Tensor, "batch time"]
    values: Float[Tensor, "batch slot"] | None
    ref_logprobs: Float[Tensor, "batch time"] | None
    models_read: ModelsRead
    evaluated: Bool[Tensor, " batch"] | None = None


@dataclass(frozen=True)
class _Tokens:
    """Steps of one token each; has the methods of `Turns`.

    Attributes:
        starts: True = counts.
    """

    starts: Bool[Tensor, "*batch time"]

    def summed(self, x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
        """Return `x` unchanged."""
        return x

    def spread(self, x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
        """Return `x` unchanged."""
        return x


@torch.no_grad()
def evaluate_rollout(
    rollout: Rollout,
    models: Models,
    *,
    value_after_last: bool,
    first_pass: PolicyOutputs | None,
    rows: Int[Tensor, " rows"] | None = None,
) -> RolloutOutputs:
    """Evaluate responses under the current weights.

    Args:
        rollout: The responses.
        models: Policy, critic and reference.
        value_after_last: The state after the last action needs a value as well.
        first_pass: The first epoch's forward pass over these rows, if it already ran; see `LanguageLearner`.
        rows: The rows to evaluate, without a critic; None for all.

    Raises:
        ShapeError: The rollout's masks are invalid; see `check_masks`.
    """
    check_masks(rollout)
    if rows is not None:
        rows = rows.to(rollout.logprobs.device)
        # The other rows keep the sampler's log probabilities, also for the reference, so that their KL is 0.
        part = evaluate_rollout(rollout.select(rows), models, value_after_last=value_after_last, first_pass=first_pass)
        logprobs = rollout.logprobs.index_copy(0, rows, part.logprobs)
        reference = None if part.ref_logprobs is None else logprobs.index_copy(0, rows, part.ref_logprobs)
        evaluated = torch.zeros_like(rollout.stopped).index_fill(0, rows, True)
        return RolloutOutputs(logprobs, None, reference, part.models_read, evaluated)
    models_read = _models_to_read(rollout, models, value_after_last=value_after_last)
    if first_pass is None:
        logprobs, values = _old_outputs(rollout, models, models_read, value_after_last=value_after_last)
    else:
        logprobs = first_pass.logprobs.detach()
        values = None if first_pass.values is None else first_pass.values.detach()
    return RolloutOutputs(logprobs, values, reference_logprobs(rollout, models), models_read)


@torch.no_grad()
def experience_from(
    scored: Scored, outputs: RolloutOutputs, models: Models, estimation: Estimation, *, kl_coef: float
) -> Experience:
    """Compute rewards, advantages and returns.

    r_t = −β·(log π_old(a_t) − log π_ref(a_t)),  + score at the response's end;  A, returns = advantage(r, V)

    Args:
        scored: The responses and their scores.
        outputs: The models' outputs for them.
        models: Policy, critic and reference.
        estimation: How rewards and advantages are computed.
        kl_coef: β of the KL in the reward; 0 if the KL is in the loss.

    Raises:
        ConfigError: The advantage needs a critic's values, but the policy has no critic.
    """
    rollout, use = scored.rollout, estimation
    if use.advantage.needs == "values" and outputs.values is None:
        raise ConfigError(f"{type(use.advantage).__name__} needs a critic's values, and the policy has no critic")
    old_logprobs = outputs.logprobs if use.old_from == "trainer" else rollout.logprobs
    shaped = partial(
        shape_rewards,
        scored.scores,
        old_logprobs,
        outputs.ref_logprobs,
        rollout.action_mask,
        kl_coef=kl_coef,
        kl_estimator=use.kl_estimator,
        kl_scope=use.kl_scope,
        score_at=use.score_at,
    )
    rewards, reward_mask = shaped(token_scores=scored.token_scores)
    magnitude = magnitude_of_rewards(
        scored.scores,
        scored.token_scores,
        old_logprobs,
        rollout.action_mask,
        kl_coef=kl_coef,
        temperature=models.temperature,
        summed=not use.whiten_rewards,
    )
    if use.whiten_rewards:
        rewards = masked_whiten(rewards, reward_mask, shift_mean=False, magnitude=magnitude)
        magnitude = magnitude_of(rewards)
    by_turn = use.credit == "turn"
    steps = Turns.of(rollout.turn_starts, rollout.action_mask, reward_mask) if by_turn else _Tokens(reward_mask)
    rewards = steps.summed(rewards)
    advantages, returns = _advantages(scored, outputs.values, rewards, steps, models, use, lambda: shaped().rewards)
    if use.whiten_advantages:
        magnitude = max(magnitude, magnitude_of(outputs.values))
        advantages = masked_whiten(advantages, rollout.action_mask, magnitude=magnitude)
    experience = Experience(
        rollout=rollout,
        scores=scored.scores,
        old_logprobs=old_logprobs,
        ref_logprobs=outputs.ref_logprobs,
        values=outputs.values,
        rewards=rewards,
        reward_mask=steps.starts,
        advantages=advantages,
        returns=returns,
        token_scores=scored.token_scores,
        importance_weights=_importance_weights(rollout, old_logprobs, outputs.logprobs, use),
        recomputed_logprobs=None if use.old_from == "trainer" else outputs.logprobs,
        evaluated=outputs.evaluated,
    )
    if use.positive_min_score is None:
        return experience
    return replace(experience, positive=experience.total_scores >= use.positive_min_score)


def _advantages(
    scored: Scored,
    values: Float[Tensor, "batch slot"] | None,
    rewards: Float[Tensor, "batch time"],
    steps: Turns | _Tokens,
    models: Models,
    use: Estimation,
    outcome_rewards: Callable[[], Float[Tensor, "batch time"]],
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """Advantages of all tokens and returns of all steps.

    Args:
        scored: The responses and their scores.
        values: The critic's.
        rewards: By step.
        steps: What is rewarded and valued: tokens or turns.
        models: For the value of an episode's last state.
        use: How advantages are computed.
        outcome_rewards: Rewards by token without token scores, for an advantage that takes those apart.
    """
    rollout, mask = scored.rollout, steps.starts
    inputs: AdvantageInputs = {
        "values": values,
        "group": rollout.group,
        "baseline": scored.baseline,
        "actions": rollout.action_mask,
    }
    if isinstance(use.advantage, GroupInGroupAdvantage):
        inputs["states"] = turn_states(rollout, rollout.action_mask & mask)
    if scored.token_scores is None or use.process_advantage is None:
        if rollout.cut_off is not None and _reads_values(use.advantage, values):
            rewards = rewards + steps.summed(_value_at_cut(rollout, models, mask, gamma=use.gamma))
        advantages, returns = use.advantage(rewards, mask=mask, **inputs)
    else:
        outcome = use.advantage(steps.summed(outcome_rewards()), mask=mask, **inputs)
        actions = rollout.action_mask & mask
        process = use.process_advantage(steps.summed(scored.token_scores), actions, group=rollout.group)
        advantages, returns = (one + other for one, other in zip(outcome, process, strict=True))
    return steps.spread(advantages), returns


def _importance_weights(
    rollout: Rollout, old_logprobs: Tensor, trainer_logprobs: Tensor, use: Estimation
) -> Float[Tensor, "batch time"] | None:
    """The weights π_trainer/π_sampler of the policy loss, capped, and 0 outside the band; None without either."""
    weights = None
    if use.importance_cap is not None:
        cap = use.importance_cap
        weights = truncated_importance_weights(old_logprobs, rollout.logprobs, rollout.action_mask, cap=cap)
    if use.importance_band is not None:
        of, low, high = use.importance_band
        kept = within_ratio_band(trainer_logprobs, rollout.logprobs, rollout.action_mask, of=of, low=low, high=high)
        weights = keep_counted(torch.ones_like(old_logprobs) if weights is None else weights, kept)
    return weights


def _reads_values(advantage: Advantage, values: Tensor | None) -> bool:
    """True if it estimates from values; a user's own function gets them where there are any.

    A control variate does not: it is subtracted from the returns as sampled.
    """
    if isinstance(advantage, ControlVariateAdvantage):
        return False
    return advantage.needs == "values" or (values is not None and isinstance(advantage, OwnAdvantage))


def _value_at_cut(
    rollout: Rollout, models: Models, reward_mask: Bool[Tensor, "batch time"], *, gamma: float
) -> Float[Tensor, "batch time"]:
    """The value of the final state of each cut-off episode: γ·V(s_L) at its last action.

    Advantages and returns treat it as a reward; the experience's rewards exclude it, and so do the total and the cost
    of the KL in the metrics. If the slot after the last action counts, as with `score_at="after_last"`, that slot
    belongs to the state and gets V(s_L).

    Source: Pardo et al. 2018, "Time limits in reinforcement learning", eq. 4 (partial-episode bootstrapping).
    """
    assert rollout.cut_off is not None
    mask = rollout.action_mask
    rows = rollout.cut_off.nonzero().squeeze(1)
    bonus = torch.zeros_like(rollout.logprobs)
    if len(rows) == 0:
        return bonus
    part = replace(rollout.select(rows), values=None, rewards=None, turn_starts=None)
    # The last state of an episode that fills the tensor needs a slot after it.
    names = ("response_ids", "token_mask", "action_mask", "logprobs")
    wider = {name: pad(getattr(part, name), (0, 1)) for name in names}
    if part.parents is not None:
        wider["parents"] = pad(part.parents, (0, 1), value=mask.shape[1] - 1)
    (values,) = shared_out(
        lambda part: (models.actor_critic.values(part, precision=models.precision, value_after_last=True),),
        replace(part, **wider),
        models.micro_batch_tokens,
        models.ranks,
    )
    # The slot of the last state. Where it does not count, its value is paid at the action before it, discounted.
    after = (torch.arange(mask.shape[1], device=mask.device) * part.action_mask).amax(-1) + 1
    counts = pad(reward_mask, (0, 1))[rows, after]
    value = values[torch.arange(len(rows), device=mask.device), after]
    bonus[rows, torch.where(counts, after, after - 1)] = torch.where(counts, value, gamma * value)
    return bonus


def _old_outputs(
    rollout: Rollout, models: Models, models_read: ModelsRead, *, value_after_last: bool
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch slot"] | None]:
    """Return old log probabilities and values, computing only those that sampling did not record."""
    if models_read == "nothing":
        return rollout.logprobs, rollout.values
    precision = models.precision

    def evaluate(rows: Rollout) -> Sequence[Tensor]:
        if models_read == "critic":
            values = models.actor_critic.values(rows, precision=precision, value_after_last=value_after_last)
            return rows.logprobs, values
        outputs = models.actor_critic(
            rows, temperature=models.temperature, precision=precision, value_after_last=value_after_last
        )
        return [outputs.logprobs] if outputs.values is None else [outputs.logprobs, outputs.values]

    old_logprobs, *values = shared_out(
        evaluate,
        rollout,
        models.micro_batch_tokens,
        models.ranks,
        prompts=rollout.shared_prompts(models.actor_critic.shares_up_to),
    )
    return old_logprobs, values[0] if values else None


@torch.no_grad()
def reference_logprobs(rollout: Rollout, models: Models) -> Float[Tensor, "batch time"] | None:
    """Log probabilities (nats) of the actions under the reference; None without one."""
    if models.reference is None:
        return None
    evaluate = partial(response_logprobs, models.reference, temperature=models.temperature, precision=models.precision)
    with models.reference.host():
        (logprobs,) = shared_out(
            lambda rows: (evaluate(rows),),
            rollout,
            models.micro_batch_tokens,
            models.ranks,
            prompts=rollout.shared_prompts(models.reference.shares_up_to),
        )
    return logprobs


def shared_out(
    evaluate: Callable[[Rollout], Sequence[Tensor]],
    rollout: Rollout,
    micro_batch_tokens: PassTokens,
    ranks: Ranks,
    *,
    prompts: Prompts = None,
) -> list[Tensor]:
    """Evaluate the responses of a rollout in passes that the ranks share; see `evaluate_in_passes`."""
    device = rollout.response_ids.device
    return evaluate_in_passes(
        lambda rows: evaluate(rollout.select(torch.tensor(rows, device=device))),
        rollout.row_lengths,
        micro_batch_tokens,
        prompts=prompts,
        ranks=ranks,
    )
