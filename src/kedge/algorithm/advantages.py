"""From rewards per token to the weight that each token's log probability gets."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kedge.algorithm.checks import check_choice, check_counted, check_positive, check_same_shape, check_share
from kedge.algorithm.masking import keep_counted
from kedge.errors import ShapeError

__all__ = ["Advantages", "WeightKind", "generalized_advantages", "policy_gradient_weights"]

WeightKind = Literal["total", "to_go", "baseline", "advantage", "td", "n_step", "monte_carlo"]


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
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    bootstrap_values: Float[Tensor, "*batch"] | None = None,
) -> Advantages:
    """Generalized advantage estimation, backwards over the counted steps.

    δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1},   returns_t = A_t + V_t

    The next step is the next *counted* one: a masked step within a row, such as a tool's output, is passed over.
    The returns keep the reward's scale, so whiten the advantages afterwards: whitened ones in the returns teach the
    critic a quantity that has nothing to do with the rewards.

    Args:
        rewards: one number per step.
        values: V_t, the critic's value of the state before step t.
        mask: True = counts; one row is one episode.
        gamma: discount γ in [0, 1].
        gae_lambda: λ in [0, 1]: 0 is the TD residual (bias), 1 the Monte-Carlo return − V (variance).
        bootstrap_values: value of the state after each row's last counted step, for an episode that a time limit cut
            short; 0 by default, because after a terminal step nothing follows.

    Returns:
        `.advantages` and `.returns`, 0 where nothing counts. Constants without gradient.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: when γ or λ lies outside [0, 1].

    Source: GAE eq. 16; PPO eq. 11–12; spec §6.25.
    """
    check_share(gamma=gamma, gae_lambda=gae_lambda)
    check_counted(mask, rewards=rewards, values=values)
    check_same_shape(bootstrap_values=bootstrap_values, mask_without_time=mask[..., 0])
    next_values = torch.zeros_like(values[..., 0]) if bootstrap_values is None else bootstrap_values
    carried = torch.zeros_like(next_values)
    columns: list[Tensor] = []
    for reward, value, counts in zip(
        reversed(rewards.unbind(-1)), reversed(values.unbind(-1)), reversed(mask.unbind(-1)), strict=True
    ):
        residual = reward + gamma * next_values - value
        carried = torch.where(counts, residual + gamma * gae_lambda * carried, carried)
        next_values = torch.where(counts, value, next_values)
        columns.append(carried)
    advantages = keep_counted(torch.stack(columns[::-1], dim=-1), mask)
    return Advantages(advantages=advantages, returns=keep_counted(advantages + values, mask))


@torch.no_grad()
def policy_gradient_weights(
    rewards: Float[Tensor, "*batch time"],
    values: Float[Tensor, "*batch time"] | None,
    mask: Bool[Tensor, "*batch time"],
    *,
    kind: WeightKind = "advantage",
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    num_steps: int = 1,
    baseline: Float[Tensor, "*batch time"] | float | None = None,
    bootstrap_values: Float[Tensor, "*batch"] | None = None,
) -> Float[Tensor, "*batch time"]:
    """The weights Ψ_t of the policy gradient E[Σ_t Ψ_t·∇log π(a_t)], by one of the classical choices.

    total:        Σ_k γᵏ·r_k over the whole response, the same at every token
    to_go:        G_t = Σ_{k≥t} γ^{k−t}·r_k
    baseline:     G_t − b_t
    monte_carlo:  G_t − V_t; S1's `reward − V` when one adjusted reward stands at the end
    td:           r_t + γ·V_{t+1} − V_t
    n_step:       r_t + … + γ^{n−1}·r_{t+n−1} + γⁿ·V_{t+n} − V_t
    advantage:    GAE

    Args:
        rewards: one number per step.
        values: V_t; None will do for total, to_go, and a baseline that is given.
        mask: True = counts.
        kind: which of them.
        gamma: discount γ in [0, 1].
        gae_lambda: λ in [0, 1], for `advantage`.
        num_steps: n ≥ 1, for `n_step`; 1 is `td`, the response's length or more is `monte_carlo`.
        baseline: b_t, for `baseline`: anything that does not depend on the action at t; the values by default.
        bootstrap_values: value after each row's last counted step, as in `generalized_advantages`.

    Returns:
        Ψ_t, 0 where nothing counts. Constants without gradient.

    Raises:
        ShapeError: when the shapes differ, nothing counts, or `values` are None where the kind needs them.
        ConfigError: for an unknown kind, or fewer than one step.

    Source: GAE eq. 1 and §2; spec §6.25, §9.
    """
    check_choice("kind", kind, WeightKind)
    check_counted(mask, rewards=rewards, values=values, baseline=baseline if isinstance(baseline, Tensor) else None)

    def estimate(critic: Tensor, weight: float) -> Tensor:
        return generalized_advantages(
            rewards, critic, mask, gamma=gamma, gae_lambda=weight, bootstrap_values=bootstrap_values
        ).advantages

    if kind == "baseline" and baseline is None:
        kind = "monte_carlo"
    if kind in ("total", "to_go", "baseline"):
        to_go = estimate(torch.zeros_like(rewards), 1.0)
        if kind == "total":
            return keep_counted(_first_counted(to_go, mask).expand_as(to_go), mask)
        return to_go if baseline is None or kind == "to_go" else keep_counted(to_go - baseline, mask)
    if values is None:
        raise ShapeError(f"policy-gradient weights of kind {kind!r} need values")
    if kind == "n_step":
        return _n_step(estimate(values, 1.0), mask, gamma=gamma, num_steps=num_steps)
    return estimate(values, {"advantage": gae_lambda, "td": 0.0, "monte_carlo": 1.0}[kind])


def _first_counted(x: Tensor, mask: Tensor) -> Tensor:
    """Each row's first counted entry, as `[..., 1]`."""
    return x.gather(-1, mask.int().argmax(-1, keepdim=True))


def _n_step(monte_carlo: Tensor, mask: Tensor, *, gamma: float, num_steps: int) -> Tensor:
    """n-step advantages from the Monte-Carlo ones: the two tails G − V cancel beyond n, A_t = M_t − γⁿ·M_{t+n}."""
    check_positive(num_steps=num_steps)
    # Counted steps first, in their order, so that "n steps later" passes over the masked ones; those hold 0.
    order = torch.argsort((~mask).int(), dim=-1, stable=True)
    packed = monte_carlo.gather(-1, order)
    later = torch.zeros_like(packed)
    later[..., :-num_steps] = packed[..., num_steps:]
    return keep_counted(monte_carlo - gamma**num_steps * torch.zeros_like(later).scatter(-1, order, later), mask)
