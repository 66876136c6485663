"""Advantage estimators: their protocol, and those with a critic or without a baseline.

Estimators that compare the responses to a prompt are in `group_advantages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from kedge.algorithm.masking import check_counted, check_positive, check_same_shape, check_share, keep_counted
from kedge_base.errors import ShapeError

Need = Literal["values", "group", "baseline"]
"""Requirement of an estimator beyond rewards: a critic, several responses to a prompt, or a greedy one's score."""

_REMEDIES = {
    "values": "add a critic",
    "group": "number the responses by their prompt",
    "baseline": "score a greedy response per prompt",
}


class AdvantageInputs(TypedDict, total=False):
    """Inputs of an estimator besides rewards. All estimators get the same inputs, and each reads those that it `needs`.

    Attributes:
        values: V_t, the critic's value of the state before step t.
        group: number of each row's prompt.
        baseline: score of the greedy response to each row's prompt.
        actions: the counted steps that are tokens of the response; None for all. A slot for a score after the last
            token does not count.
        states: number of the state in which each turn starts; see `turn_states`.
    """

    values: Float[Tensor, "batch time"] | None
    group: Int[Tensor, " batch"] | None
    baseline: Float[Tensor, " batch"] | None
    actions: Bool[Tensor, "batch time"] | None
    states: Int[Tensor, "batch time"] | None


class Advantage(Protocol):
    """The weights Ψ_t of the policy gradient E[Σ_t Ψ_t·∇log π(a_t)], and the critic's targets.

    A step is a token or a turn: its rewards and values are then those of the turn, at its first token, and only first
    tokens count.

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
            ShapeError: shapes differ, nothing counts, or an input of the estimator is missing.
        """
        ...


@dataclass(frozen=True)
class GeneralizedAdvantage:
    """GAE; λ = 0 is the TD residual r_t + γ·V_{t+1} − V_t, λ = 1 the Monte Carlo advantage G_t − V_t.

    The critic's targets can have a separate λ (decoupled GAE). With λ = 1 they are the returns as sampled, and
    contain no value of the critic itself.

    Args:
        gamma: γ.
        gae_lambda: λ in [0, 1], or one per response by its length.
        value_gae_lambda: λ of the returns, in [0, 1]; None for the advantages' λ.

    Source: GAE eq. 16; VC-PPO (arXiv 2503.01491) for two λs; spec §6.25. With λ = 1 and one adjusted reward at the end:
    S1's `reward − V`.
    """

    gamma: float
    gae_lambda: float | LengthAdaptiveLambda
    value_gae_lambda: float | None = None
    needs: ClassVar[Need | None] = "values"

    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`."""
        values = required(inputs, "values")
        use = self.gae_lambda
        tokens = mask & tokens_of(mask, inputs)
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
    """Ψ_t = G_t = Σ_{k≥t} γ^{k−t}·r_k, without a baseline; G_t is also the critic's target.

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
    """Return the input with this name.

    Raises:
        ShapeError: it is missing.
    """
    if (found := inputs.get(name)) is None:
        raise ShapeError(f"the advantage needs {name}, got None; {_REMEDIES[name]}")
    return found


def tokens_of(mask: Bool[Tensor, "batch time"], inputs: AdvantageInputs) -> Bool[Tensor, "batch time"]:
    """Return the counted steps that are tokens of the response; their number is its length."""
    actions = inputs.get("actions")
    return mask if actions is None else actions


def _with_returns(
    found: Advantages, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, value_gae_lambda: float | None
) -> Advantages:
    """Replace the returns with those of a different λ, unless it is None."""
    if value_gae_lambda is None:
        return found
    critics = generalized_advantages(rewards, values, mask, gamma=gamma, gae_lambda=value_gae_lambda)
    return Advantages(found.advantages, critics.returns)


class Advantages(NamedTuple):
    """Advantages for the policy loss, and returns for the value loss."""

    advantages: Float[Tensor, "*batch time"]
    returns: Float[Tensor, "*batch time"]


@torch.no_grad()
def generalized_advantages(
    rewards: Float[Tensor, "*batch time"],
    values: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    gamma: float,
    gae_lambda: float | Float[Tensor, "*batch"],
    bootstrap_values: Float[Tensor, "*batch"] | None = None,
) -> Advantages:
    """Generalized advantage estimation.

    δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1},   returns_t = A_t + V_t

    The next step is the next *counted* one: masked steps within a row, such as a tool's output, are skipped.
    The returns keep the rewards' scale. Whiten the advantages only afterwards: returns computed from whitened
    advantages would train the critic on a quantity unrelated to the rewards.

    Args:
        rewards: one number per step.
        values: V_t, the critic's value of the state before step t.
        mask: True = counts; one row is one episode.
        gamma: discount γ in [0, 1].
        gae_lambda: λ in [0, 1], for all rows or per row: 0 is the TD residual (bias), 1 the Monte Carlo return − V
            (variance).
        bootstrap_values: value of the state after each row's last counted step, for an episode truncated by a time
            limit; 0 by default, the value after a terminal step.

    Returns:
        `.advantages` and `.returns`, 0 in masked slots. No gradient.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: when γ or λ is outside [0, 1].

    Source: GAE eq. 16; PPO eq. 11–12; spec §6.25.
    """
    check_counted(mask, rewards=rewards, values=values)
    if isinstance(gae_lambda, Tensor):
        check_same_shape(gae_lambda=gae_lambda, mask_without_time=mask[..., 0])
        lambdas = {"smallest_gae_lambda": float(gae_lambda.min()), "largest_gae_lambda": float(gae_lambda.max())}
    else:
        lambdas = {"gae_lambda": gae_lambda}
    check_share(gamma=gamma, **lambdas)
    after_row = torch.zeros_like(values[..., 0])
    if bootstrap_values is not None:
        check_same_shape(bootstrap_values=bootstrap_values, mask_without_time=mask[..., 0])
        after_row = bootstrap_values
    residuals = rewards + gamma * _next_values(values, mask, after_row) - values
    decay = gamma * gae_lambda.unsqueeze(-1) if isinstance(gae_lambda, Tensor) else gamma * gae_lambda
    # A masked step passes on the advantage that follows it, 0 + 1·A, so that the loop over time has two operations.
    residuals = torch.where(mask, residuals, 0.0)
    decays = torch.where(mask, decay, torch.ones_like(residuals))
    carried = torch.zeros_like(after_row)
    columns: list[Tensor] = []
    for residual, factor in zip(reversed(residuals.unbind(-1)), reversed(decays.unbind(-1)), strict=True):
        carried = residual + factor * carried
        columns.append(carried)
    advantages = torch.where(mask, torch.stack(columns[::-1], dim=-1), 0.0)
    return Advantages(advantages=advantages, returns=torch.where(mask, advantages + values, 0.0))


def _next_values(
    values: Float[Tensor, "*batch time"], mask: Bool[Tensor, "*batch time"], after_row: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch time"]:
    """V of the next counted step; `after_row` after the last one."""
    length = mask.shape[-1]
    places = torch.arange(1, length, device=mask.device).expand(mask[..., 1:].shape)
    # The column of the next counted step, as a running minimum from the right.
    following = torch.where(mask[..., 1:], places, length).flip(-1).cummin(-1).values.flip(-1)
    last = torch.full_like(mask[..., :1], length, dtype=torch.long)
    return torch.cat([values, after_row.unsqueeze(-1)], -1).gather(-1, torch.cat([following, last], -1))


@dataclass(frozen=True)
class LengthAdaptiveLambda:
    """λ = 1 − 1/(α·l) for a response of l tokens, clamped to [0, 1].

    The coefficients λᵏ of GAE then sum to α·l: the estimate spans the same share of every response. Up to l = 1/α
    tokens the formula is not positive; λ is then 0, the TD residual.

    Args:
        alpha: α > 0; VAPO uses 0.05.

    Source: VAPO (arXiv 2504.05118) eq. 4 and 5; α: §5.1; spec §6.25, §9.
    """

    alpha: float

    def __call__(
        self, mask: Bool[Tensor, "*batch time"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*batch"]:
        """One λ per row of a mask of the response's tokens, stop token included; l counts its True entries.

        Raises:
            ConfigError: α is not above 0.
        """
        check_positive(length_adaptive_alpha=self.alpha)
        lengths = mask.sum(-1).clamp(min=1).to(dtype)
        return (1.0 - 1.0 / (self.alpha * lengths)).clamp(0.0, 1.0)
