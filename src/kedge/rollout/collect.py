"""From a rollout and its scores to experience: what the reference, the critic and the rewards say about every token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kedge.algorithm.advantages import policy_gradient_weights
from kedge.algorithm.experience import Experience, Rollout
from kedge.algorithm.masking import masked_whiten
from kedge.algorithm.shaping import shape_rewards
from kedge.models import ActorCritic, LanguageModel, ResponseOutputs, budget_batches, response_logprobs

__all__ = ["AdvantageKind", "collect_experience"]

AdvantageKind = Literal["gae", "monte_carlo", "td", "n_step", "to_go", "total"]


@torch.no_grad()
def collect_experience(
    rollout: Rollout,
    scores: Float[Tensor, " batch"],
    actor_critic: ActorCritic,
    reference: LanguageModel | None,
    *,
    temperature: float,
    kl_coef: float,
    kl_estimator: Literal["k1", "k2", "k3"] = "k1",
    kl_scope: Literal["token", "sequence"] = "token",
    score_at: Literal["last", "after_last"] = "last",
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    advantage: AdvantageKind = "gae",
    num_steps: int = 1,
    whiten_rewards: bool = False,
    whiten_advantages: bool = True,
    first_pass: ResponseOutputs | None = None,
    reuse_sampled: bool = False,
    precision: Literal["fp32", "bf16"] = "fp32",
    micro_batch_tokens: int | None = None,
) -> Experience:
    """Evaluate a rollout under the current weights, and freeze what the PPO epochs will read.

    r_t = −β·(log π_old(a_t) − log π_ref(a_t)),  + score at the response's end;  A = GAE(r, V);  returns = A + V

    Args:
        rollout: What the policy did.
        scores: One per response, after any penalty for a missing stop token.
        actor_critic: Policy and critic, with the weights that sampled.
        reference: The frozen reference; None where no KL is wanted, not even as a metric.
        temperature: The sampling temperature; divides the logits of policy and reference alike.
        kl_coef: β of the KL in the reward; 0 where the KL is in the loss.
        kl_estimator: Which estimator of the KL is paid.
        kl_scope: `token`: each token pays for its own KL; `sequence`: one adjusted reward per response (S1).
        score_at: Where the score lands, at the last token or after it.
        gamma: Discount per token.
        gae_lambda: λ of the advantage estimate.
        advantage: `gae`, or one of its siblings; see `policy_gradient_weights`.
        num_steps: n of `n_step`.
        whiten_rewards: Scale rewards to unit variance, keeping their mean.
        whiten_advantages: Shift and scale the advantages to mean 0 and variance 1; the returns never see it.
        first_pass: What policy and critic say about these rows, where the first epoch's pass was made already; see
            `first_pass` in `training.ppo_update`.
        reuse_sampled: The engine's own log probabilities and values are exact: do not compute them a second time.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward pass; None evaluates all rows at once.

    Source: spec §4.17, §5, §6.25–26.
    """
    after_last = score_at == "after_last"

    def evaluate(rows: Rollout) -> tuple[Tensor, Tensor]:
        if reuse_sampled and rows.values is not None and not after_last:
            return rows.logprobs, rows.values
        if reuse_sampled and actor_critic.critic is not None:
            return rows.logprobs, actor_critic.values(rows, precision=precision, value_after_last=after_last)
        outputs = actor_critic(rows, temperature=temperature, precision=precision, value_after_last=after_last)
        return outputs.logprobs, outputs.values

    if first_pass is None:
        old_logprobs, values = _by_budget(evaluate, rollout, micro_batch_tokens)
    else:
        old_logprobs, values = first_pass.logprobs.detach(), first_pass.values.detach()
    ref_logprobs = None
    if reference is not None:
        refer = partial(response_logprobs, reference, temperature=temperature, precision=precision)
        (ref_logprobs,) = _by_budget(lambda rows: (refer(rows),), rollout, micro_batch_tokens)

    rewards, reward_mask = shape_rewards(
        scores,
        old_logprobs,
        ref_logprobs,
        rollout.response_mask,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_scope=kl_scope,
        score_at=score_at,
    )
    if whiten_rewards:
        rewards = masked_whiten(rewards, reward_mask, shift_mean=False)
    advantages = policy_gradient_weights(
        rewards,
        values,
        reward_mask,
        kind="advantage" if advantage == "gae" else advantage,
        gamma=gamma,
        gae_lambda=gae_lambda,
        num_steps=num_steps,
    )
    returns = _value_targets(rewards, values, advantages, reward_mask, advantage=advantage, gamma=gamma)
    if whiten_advantages:
        advantages = masked_whiten(advantages, rollout.response_mask)
    return Experience(
        rollout=rollout,
        scores=scores,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        rewards=rewards,
        reward_mask=reward_mask,
        advantages=advantages,
        returns=returns,
    )


def _by_budget(
    evaluate: Callable[[Rollout], tuple[Tensor, ...]], rollout: Rollout, micro_batch_tokens: int | None
) -> tuple[Tensor, ...]:
    """Evaluate a rollout some rows at a time, those of like length together; the results are in its own order."""
    batches = list(budget_batches(rollout.row_lengths, micro_batch_tokens))
    device = rollout.response_ids.device
    parts = [evaluate(rollout.select(torch.tensor(rows, device=device))) for rows in batches]
    back = torch.tensor([row for rows in batches for row in rows], device=device).argsort()
    return tuple(torch.cat(figures)[back] for figures in zip(*parts, strict=True))


def _value_targets(
    rewards: Tensor, values: Tensor, advantages: Tensor, mask: Tensor, *, advantage: AdvantageKind, gamma: float
) -> Tensor:
    """The critic's targets: A + V from the unwhitened A, or the return itself where the weights hold no baseline."""
    if advantage in ("to_go", "total"):
        return policy_gradient_weights(rewards, values, mask, kind="to_go", gamma=gamma)
    return torch.where(mask, advantages + values, 0.0)
