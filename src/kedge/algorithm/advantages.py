"""The weights of the policy gradient: one protocol, and the estimators with a critic or without any comparison.

Estimators that compare the responses to a prompt are in `group_advantages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from kedge.algorithm.checks import check_positive
from kedge.algorithm.gae import Advantages, LengthAdaptiveLambda, generalized_advantages
from kedge.algorithm.masking import keep_counted
from kedge.errors import ShapeError

__all__ = [
    "Advantage",
    "AdvantageInputs",
    "GeneralizedAdvantage",
    "NStepAdvantage",
    "Need",
    "RewardToGo",
    "TotalReward",
    "required",
    "reward_to_go",
    "tokens_of",
    "total_reward",
]

Need = Literal["values", "group", "baseline"]
"""What an estimator needs besides rewards: a critic, several responses to a prompt, or the score of a greedy one."""

_REMEDIES = {
    "values": "add a critic",
    "group": "number the responses by their prompt",
    "baseline": "score a greedy response per prompt",
}


class AdvantageInputs(TypedDict, total=False):
    """What an estimator may use besides rewards; the same for all, and each reads what it `needs`.

    Attributes:
        values: V_t, the critic's value of the state before step t.
        group: number of each row's prompt.
        baseline: score of the greedy response to each row's prompt.
        actions: the counted steps that are tokens of the response, whose number is its length; None for all. The slot
            of a score after the last token is none.
    """

    values: Float[Tensor, "batch time"] | None
    group: Int[Tensor, " batch"] | None
    baseline: Float[Tensor, " batch"] | None
    actions: Bool[Tensor, "batch time"] | None


class Advantage(Protocol):
    """The weights Ψ_t of the policy gradient E[Σ_t Ψ_t·∇log π(a_t)], and the critic's targets.

    Every estimator has `gamma`, the discount γ of the rewards, in [0, 1].

    Source: GAE eq. 1; spec §6.25, §9.
    """

    needs: ClassVar[Need | None]

    def __call__(
        self,
        rewards: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
        **inputs: Unpack[AdvantageInputs],
    ) -> Advantages:
        """Estimate the advantages.

        Args:
            rewards: one number per step.
            mask: True = counts; masked steps within a row are skipped.
            inputs: see `AdvantageInputs`.

        Returns:
            `.advantages` and `.returns`, 0 in masked slots. No gradient.

        Raises:
            ShapeError: shapes differ, nothing counts, or what the estimator needs is missing.
        """
        ...


@dataclass(frozen=True)
class GeneralizedAdvantage:
    """GAE; λ = 0 is the TD residual r_t + γ·V_{t+1} − V_t, λ = 1 the Monte Carlo advantage G_t − V_t.

    The critic's targets can have a λ of their own (decoupled GAE). With λ = 1 they are the returns as sampled, and
    contain no value of the critic itself.

    Args:
        gamma: γ.
        gae_lambda: λ in [0, 1], or one per response by its length.
        value_gae_lambda: λ of the returns, in [0, 1]; None for that of the advantages.

    Source: GAE eq. 16; VC-PPO (arXiv 2503.01491) for two λs; spec §6.25. With λ = 1 and one adjusted reward at the end:
    S1's `reward − V`.
    """

    gamma: float
    gae_lambda: float | LengthAdaptiveLambda
    value_gae_lambda: float | None = None
    needs: ClassVar[Need | None] = "values"

    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        values, use = required(inputs, "values"), self.gae_lambda
        tokens = tokens_of(mask, inputs)
        gae_lambda = use(tokens, values.dtype) if isinstance(use, LengthAdaptiveLambda) else use
        found = generalized_advantages(rewards, values, mask, gamma=self.gamma, gae_lambda=gae_lambda)
        return _with_returns(found, rewards, values, mask, self.gamma, self.value_gae_lambda)


@dataclass(frozen=True)
class NStepAdvantage:
    """A_t = r_t + … + γ^{n−1}·r_{t+n−1} + γⁿ·V_{t+n} − V_t; n = 1 is TD, n = the response's length is Monte Carlo.

    Args:
        gamma: γ.
        num_steps: n ≥ 1.
        value_gae_lambda: λ of the returns, in [0, 1]; None for A_t + V_t.

    Source: spec §6.25.
    """

    gamma: float
    num_steps: int
    value_gae_lambda: float | None = None
    needs: ClassVar[Need | None] = "values"

    @torch.no_grad()
    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`. Computed from the Monte Carlo advantages M: A_t = M_t − γⁿ·M_{t+n}."""
        check_positive(num_steps=self.num_steps)
        values = required(inputs, "values")
        monte_carlo = generalized_advantages(rewards, values, mask, gamma=self.gamma, gae_lambda=1.0).advantages
        # Counted steps first, in order, so that "n steps later" skips the masked ones, which are 0.
        order = torch.argsort((~mask).int(), dim=-1, stable=True)
        packed = monte_carlo.gather(-1, order)
        later = torch.zeros_like(packed)
        later[..., : -self.num_steps] = packed[..., self.num_steps :]
        tail = self.gamma**self.num_steps * torch.zeros_like(later).scatter(-1, order, later)
        advantages = keep_counted(monte_carlo - tail, mask)
        found = Advantages(advantages, keep_counted(advantages + values, mask))
        return _with_returns(found, rewards, values, mask, self.gamma, self.value_gae_lambda)


@dataclass(frozen=True)
class RewardToGo:
    """Ψ_t = G_t = Σ_{k≥t} γ^{k−t}·r_k, without a baseline; G_t is the critic's target as well.

    Source: GAE §2; spec §9 (REINFORCE).
    """

    gamma: float
    needs: ClassVar[Need | None] = None

    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        to_go = reward_to_go(rewards, mask, self.gamma)
        return Advantages(to_go, returns=to_go)


@dataclass(frozen=True)
class TotalReward:
    """Ψ_t = S = Σ_k γᵏ·r_k over the whole response, the same at every step; the critic's target is the reward to go.

    Source: GAE §2; spec §9 (REINFORCE).
    """

    gamma: float
    needs: ClassVar[Need | None] = None

    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        to_go = reward_to_go(rewards, mask, self.gamma)
        return Advantages(keep_counted(total_reward(to_go, mask).expand_as(to_go), mask), returns=to_go)


def reward_to_go(
    rewards: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], gamma: float
) -> Float[Tensor, "batch time"]:
    """G_t = Σ_{k≥t} γ^{k−t}·r_k: GAE with λ = 1 and no critic."""
    return generalized_advantages(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0).advantages


def total_reward(to_go: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch 1"]:
    """S, the reward to go at the first counted step."""
    return to_go.gather(-1, mask.int().argmax(-1, keepdim=True))


def required(inputs: AdvantageInputs, name: Need) -> Tensor:
    """The input of this name.

    Raises:
        ShapeError: it is missing.
    """
    if (found := inputs.get(name)) is None:
        raise ShapeError(f"the advantage needs {name}, got None; {_REMEDIES[name]}")
    return found


def tokens_of(mask: Bool[Tensor, "batch time"], inputs: AdvantageInputs) -> Bool[Tensor, "batch time"]:
    """The counted steps that are tokens of the response; their number is its length."""
    actions = inputs.get("actions")
    return mask if actions is None else actions


def _with_returns(
    found: Advantages, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, value_gae_lambda: float | None
) -> Advantages:
    """The same advantages, with returns by another λ unless it is None."""
    if value_gae_lambda is None:
        return found
    critics = generalized_advantages(rewards, values, mask, gamma=gamma, gae_lambda=value_gae_lambda)
    return Advantages(found.advantages, critics.returns)
