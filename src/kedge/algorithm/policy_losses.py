"""Policy losses: PPO's clipped surrogate, the unclipped and KL-penalty surrogates of the same paper, CISPO and masking.

Each is a formula on the same prepared `Tokens`, where ρ = exp(logprobs − old_logprobs) is the ratio of single tokens,
or of whole responses or turns as in GSPO; see `Ratio`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, overload, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.logprobs import response_log_ratios
from kedge.algorithm.masking import (
    Averaging,
    aggregate,
    check_choice,
    check_positive,
    counted,
    keep_counted,
)
from kedge.algorithm.own import call_own, function_name, own_values
from kedge.algorithm.turns import Turns
from kedge_base.errors import ConfigError, ShapeError


def named_surrogate(
    name: str,
    *,
    clip: tuple[float, float],
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    own: Callable[..., object] | None = None,
) -> Surrogate:
    """Return the policy loss that `policy_loss` names in the configuration, with its settings.

    Args:
        name: `clipped`, `unclipped`, `kl_penalty_fixed`, `kl_penalty_adaptive`, `cispo` or `double_sided`.
        clip: ε and ε_high.
        dual_clip: Bound of ρ for negative advantages; None for no bound.
        kl_coef: the current β of the KL penalty.
        own: a user's function of log ratios and advantages that replaces them; see `own_policy_loss`.
    """
    if own is not None:
        return partial(own_policy_loss, function=own)
    low, high = clip
    penalty = partial(kl_penalty_policy_loss, kl_coef=kl_coef)
    surrogates: dict[str, Surrogate] = {
        "clipped": partial(clipped_policy_loss, clip_range=low, clip_range_high=high, dual_clip=dual_clip),
        "unclipped": unclipped_policy_loss,
        "kl_penalty_fixed": penalty,
        "kl_penalty_adaptive": penalty,
        "cispo": partial(cispo_policy_loss, clip_range_high=high),
        "double_sided": partial(double_sided_policy_loss, clip_range=low, clip_range_high=high),
    }
    return surrogates[name]


Ratio = Literal["token", "sequence", "turn"]
"""Definition of ρ: each token's own ratio, or the geometric mean of the ratios of all counted tokens of its response,
or of its turn.

sequence:  ρ_t = exp(log π_t − sg(log π_t) + sg(1/n·Σ_k (log π_k − log π_old,k)))

The mean is over the tokens k of the response, or with `turn` over those of the turn. The value is the same at all of
them, and the gradient at token t is ρ·∇log π_t. With the aggregation `sequence`, that of a response is the gradient of
the clipped mean ratio itself.

Source: GSPO (arXiv 2507.18071) eq. 7 (the ratio), eq. 13 and 14 (the form per token); by turn: ST-PPO (arXiv
2511.20718) eq. 4.
"""

# exp(20) is half a billion: a larger ratio only occurs if something is broken, and an overflow to inf would make the
# gradient NaN even where the clip sets it to 0 (inf · 0).
MAX_LOG_RATIO = 20.0


class SurrogateOptions(Averaging, total=False):
    """Options of every policy loss, besides `aggregate`'s.

    Attributes:
        ratio: the kind of ρ, `token` by default; see `Ratio`.
        turn_starts: True at the first token of each turn, for the ratio `turn`; None if a response is one turn.
        importance_weights: factor of each token's loss, e.g. from `truncated_importance_weights`.
        kl: KL(π_old‖π) of the distribution at each token, nats; differentiable. None to estimate it from the tokens.
    """

    ratio: Ratio
    turn_starts: Bool[Tensor, "*batch time"] | None
    importance_weights: Float[Tensor, "*batch time"] | None
    kl: Float[Tensor, "*batch time"] | None


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and its metrics.

    Attributes:
        loss: the loss to minimize; the only field with a gradient.
        clip_fraction: share of counted tokens where the clip is active: whose clipped loss is strictly larger (PPO; a
            ratio out of range on the side that is not clipped does not count), whose weight is capped (CISPO), or which
            are masked (double-sided). Tokens with advantage 0 do not count. 0 for unclipped losses.
        approx_kl: mean of the KL if it was given, else of ρ − 1 − log ρ, nats: how far the policy has moved since the
            rollout.
        dual_clip_fraction: share of counted tokens where the dual clip is active; None without one.
        ratio_mean: mean of the single tokens' ρ for any `ratio`, like `approx_kl`; 1 in expectation.
        ratio_min: smallest of them.
        ratio_max: largest of them.
        num_tokens: counted tokens.
    """

    loss: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]
    approx_kl: Float[Tensor, ""]
    dual_clip_fraction: Float[Tensor, ""] | None
    ratio_mean: Float[Tensor, ""]
    ratio_min: Float[Tensor, ""]
    ratio_max: Float[Tensor, ""]
    num_tokens: Int[Tensor, ""]


@dataclass(frozen=True)
class Tokens:
    """The quantities of the formulas, per token; masked slots are 0, and 1 in ρ with the ratio `token`.

    Attributes:
        logprobs: log π; differentiable.
        log_ratio: log π − log π_old of the single tokens for any `ratio`; differentiable.
        rho: ρ; differentiable.
        advantages: A.
        mask: True = counts.
        ratio: the kind of ρ.
        importance_weights: factor of each token's loss.
        averaging: how token losses are reduced to a scalar.
        exact_kl: KL(π_old‖π) of the distributions; None where only the tokens' probabilities are known.
    """

    logprobs: Float[Tensor, "*batch time"]
    log_ratio: Float[Tensor, "*batch time"]
    rho: Float[Tensor, "*batch time"]
    advantages: Float[Tensor, "*batch time"]
    mask: Bool[Tensor, "*batch time"]
    ratio: Ratio
    importance_weights: Float[Tensor, "*batch time"] | None
    averaging: Averaging
    exact_kl: Float[Tensor, "*batch time"] | None

    @classmethod
    def of(
        cls,
        logprobs: Float[Tensor, "*batch time"],
        old_logprobs: Float[Tensor, "*batch time"],
        advantages: Float[Tensor, "*batch time"],
        mask: Bool[Tensor, "*batch time"],
        *,
        ratio: Ratio = "token",
        turn_starts: Bool[Tensor, "*batch time"] | None = None,
        importance_weights: Float[Tensor, "*batch time"] | None = None,
        kl: Float[Tensor, "*batch time"] | None = None,
        **averaging: Unpack[Averaging],
    ) -> Tokens:
        """Prepare the tokens of a batch.

        Args:
            logprobs: of the sampled tokens under the current policy, nats; differentiable.
            old_logprobs: of the same tokens at the start of the epochs; frozen.
            advantages: frozen.
            mask: True = counts.
            ratio: see `SurrogateOptions`.
            turn_starts: see `SurrogateOptions`.
            importance_weights: see `SurrogateOptions`.
            kl: see `SurrogateOptions`.
            **averaging: see `aggregate`.

        Raises:
            ShapeError: when the shapes differ or nothing counts.
        """
        optional = {"importance_weights": importance_weights, "kl": kl}
        given = {name: each for name, each in optional.items() if each is not None}
        logprobs, old_logprobs, advantages, *more = counted(
            mask, logprobs=logprobs, old_logprobs=old_logprobs.detach(), advantages=advantages.detach(), **given
        )
        optional |= zip(given, more, strict=True)
        log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_rho = log_ratio
        if ratio != "token":
            check_choice("ratio", ratio, Ratio)
            frozen = log_ratio.detach()
            if ratio == "turn":
                mean = Turns.of(turn_starts, mask).averaged(frozen)
            else:
                mean = response_log_ratios(frozen, mask).unsqueeze(-1)
            log_rho = log_ratio - frozen + mean
        return cls(
            logprobs=logprobs,
            log_ratio=log_ratio,
            rho=log_rho.exp(),
            advantages=advantages,
            mask=mask,
            ratio=ratio,
            importance_weights=optional["importance_weights"],
            averaging=averaging,
            exact_kl=optional["kl"],
        )

    @property
    def kl(self) -> Float[Tensor, "*batch time"]:
        """KL(π_old‖π): the given one, else ρ − 1 − log ρ of the single tokens, never negative, exact near ρ = 1."""
        return torch.expm1(self.log_ratio) - self.log_ratio if self.exact_kl is None else self.exact_kl

    def loss(
        self, losses: Tensor, *, held_by_clip: Tensor | None = None, held_by_dual_clip: Tensor | None = None
    ) -> PolicyLoss:
        """Compute the policy loss from one loss per token and the tokens where a clip is active."""
        mask = self.mask
        if self.importance_weights is not None:
            losses = losses * self.importance_weights.detach()
        num_tokens = mask.sum()
        all_ratios = self.log_ratio.detach().exp()
        ratios = all_ratios.masked_fill(~mask, 0.0)
        return PolicyLoss(
            loss=aggregate(losses, mask, **self.averaging),
            clip_fraction=self._share(held_by_clip),
            approx_kl=self.kl.detach().sum() / num_tokens,
            dual_clip_fraction=None if held_by_dual_clip is None else self._share(held_by_dual_clip),
            ratio_mean=ratios.sum() / num_tokens,
            ratio_min=all_ratios.masked_fill(~mask, math.inf).min(),
            ratio_max=ratios.max(),
            num_tokens=num_tokens,
        )

    def _share(self, event: Tensor | None) -> Tensor:
        """The share of the tokens where a clip is active; 0 without one."""
        if event is None:
            return self.log_ratio.new_zeros(())
        return (event & self.mask).to(self.log_ratio.dtype).sum() / self.mask.sum()


Surrogate = Callable[[Tokens], PolicyLoss]
"""A policy loss with its own settings filled in, such as `partial(clipped_policy_loss, clip_range=0.2)`."""

Settings = ParamSpec("Settings")
_ARGUMENTS = ("logprobs", "old_logprobs", "advantages", "mask", *SurrogateOptions.__annotations__)
"""Names of the arguments of `Tokens.of`."""


@runtime_checkable
class PolicyLossOf(Protocol[Settings]):
    """A policy loss, with the settings of its formula; it accepts prepared tokens, or the arguments of `Tokens.of`."""

    @overload
    def __call__(self, tokens: Tokens, /, *args: Settings.args, **settings: Settings.kwargs) -> PolicyLoss: ...

    @overload
    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **settings: Any
    ) -> PolicyLoss: ...


def _also_of_tensors(formula: Callable[Concatenate[Tokens, Settings], PolicyLoss]) -> PolicyLossOf[Settings]:
    """Let a policy loss also be called with the arguments of `Tokens.of`."""
    of_tokens: Callable[..., PolicyLoss] = formula

    @wraps(formula)
    def loss(*inputs: Any, **settings: Any) -> PolicyLoss:
        if inputs and isinstance(inputs[0], Tokens):
            return of_tokens(*inputs, **settings)
        prepared = {name: settings.pop(name) for name in _ARGUMENTS if name in settings}
        return of_tokens(Tokens.of(*inputs, **prepared), **settings)

    return loss


@_also_of_tensors
def clipped_policy_loss(
    tokens: Tokens, *, clip_range: float, clip_range_high: float | None = None, dual_clip: float | None = None
) -> PolicyLoss:
    """PPO's clipped surrogate.

    loss = −aggregate min(ρ·A, clip(ρ, 1−ε, 1+ε_high)·A)

    The gradient is 0 where A > 0 and ρ > 1+ε_high, or A < 0 and ρ < 1−ε: the token has moved far enough. At ρ = 1, in
    the first minibatch, the gradient is REINFORCE's.

    Args:
        tokens: the prepared tokens, or instead the arguments of `Tokens.of`.
        clip_range: ε in (0, 1).
        clip_range_high: upper ε if it differs ("clip higher").
        dual_clip: c > 1 limits the loss of tokens with A < 0 to c·|A|, however large ρ is; None for no limit.

    Raises:
        ConfigError: for a clip range out of bounds.

    Source: PPO eq. 7; dual clip: Ye et al. 2019 (arXiv 1912.09729); clip higher: DAPO eq. 10; spec §6.27.
    """
    low, high = _bounds(clip_range, clip_range_high)
    unclipped = -tokens.rho * tokens.advantages
    clipped = -tokens.rho.clamp(low, high) * tokens.advantages
    losses = torch.maximum(unclipped, clipped)
    held_by_dual_clip = None
    if dual_clip is not None:
        if not dual_clip > 1.0:
            raise ConfigError(f"dual_clip must be above 1, got {dual_clip}")
        bound = -dual_clip * tokens.advantages
        held_by_dual_clip = (tokens.advantages < 0) & (losses > bound)
        losses = torch.where(held_by_dual_clip, bound, losses)
    return tokens.loss(losses, held_by_clip=clipped > unclipped, held_by_dual_clip=held_by_dual_clip)


@_also_of_tensors
def unclipped_policy_loss(tokens: Tokens) -> PolicyLoss:
    """The surrogate without a clip: REINFORCE with importance sampling. An ablation.

    loss = −aggregate ρ·A

    Source: PPO eq. 6 and §6.1; spec §6.27.
    """
    return tokens.loss(-tokens.rho * tokens.advantages)


@_also_of_tensors
def kl_penalty_policy_loss(tokens: Tokens, *, kl_coef: float) -> PolicyLoss:
    """The surrogate with a KL penalty to the old policy instead of the clip; β = `kl_coef` ≥ 0.

    loss = −aggregate (ρ·A − β·KL_t),   KL_t = ρ_t − 1 − log ρ_t of the single tokens, unless `kl` is given

    KL_t is an unbiased estimate of KL(π_old‖π) from the old policy's tokens, in value and in gradient. For the adaptive
    form, pass the KL after the epochs to `adapt_kl_coef_schulman`. This KL keeps the steps small; `kl_loss`, or the KL
    in the rewards, keeps the policy near the reference model.

    Source: PPO eq. 8; spec §6.27.
    """
    return tokens.loss(-tokens.rho * tokens.advantages + kl_coef * tokens.kl)


@_also_of_tensors
def cispo_policy_loss(tokens: Tokens, *, clip_range_high: float) -> PolicyLoss:
    """REINFORCE with capped importance weights (CISPO): no token loses its gradient; ε_high = `clip_range_high` > 0.

    loss = −aggregate sg(min(ρ, 1+ε_high))·A·log π

    The weights have no lower bound. Implementations disagree on what the field means: TRL caps at ε_high itself.

    Source: CISPO (MiniMax-M1, arXiv 2506.13585) eq. 4 and 5; spec §6.27.
    """
    check_positive(clip_range_high=clip_range_high)
    rho = tokens.rho.detach()
    cap = 1.0 + clip_range_high
    losses = -rho.clamp(max=cap) * tokens.advantages * tokens.logprobs
    return tokens.loss(losses, held_by_clip=(rho > cap) & (tokens.advantages != 0))


@_also_of_tensors
def double_sided_policy_loss(tokens: Tokens, *, clip_range: float, clip_range_high: float | None = None) -> PolicyLoss:
    """The surrogate without the tokens that left the clip range, on either side and for either sign of A.

    loss = −aggregate [1−ε ≤ ρ ≤ 1+ε_high]·ρ·A

    PPO keeps the gradient of a token that moved against its advantage. For stale responses, such a token is more likely
    the result of a mismatch than of the update. Masked tokens stay in the divisor. ε as in `clipped_policy_loss`.

    Source: SAO (arXiv 2607.07508) §3.1; spec §6.27.
    """
    low, high = _bounds(clip_range, clip_range_high)
    outside = (tokens.rho < low) | (tokens.rho > high)
    losses = torch.where(outside, 0.0, -tokens.rho * tokens.advantages)
    return tokens.loss(losses, held_by_clip=outside & (tokens.advantages != 0))


def own_policy_loss(tokens: Tokens, *, function: Callable[[Tensor, Tensor], object]) -> PolicyLoss:
    """A policy loss of `function(log_ratios, advantages)`, which returns one loss per token.

    loss = aggregate f(log π − log π_old, A)

    With another `ratio` than `token`, the log ratios are those of the responses or turns. Masked slots are 0 in both
    arguments, which are copies.

    Raises:
        ShapeError: the function returns a different shape, or a loss without a gradient.
    """
    log_ratios = tokens.log_ratio if tokens.ratio == "token" else keep_counted(tokens.rho.log(), tokens.mask)
    name = f"ppo.policy_loss: {function_name(function)}"
    found = call_own(name, function, log_ratios.clone(), tokens.advantages.clone())
    losses = own_values(found, tokens.mask, f"{name} returned losses")
    if tokens.logprobs.requires_grad and not losses.requires_grad:
        raise ShapeError(f"{name} returned losses without a gradient; compute them from the log ratios")
    return tokens.loss(losses)


_SCALED = (clipped_policy_loss, unclipped_policy_loss, cispo_policy_loss, double_sided_policy_loss)


def is_scaled_by_advantages(surrogate: Surrogate) -> bool:
    """True if a token's loss is its advantage times something: its gradient is 0 where the advantage is."""
    return (surrogate.func if isinstance(surrogate, partial) else surrogate) in _SCALED


def _bounds(clip_range: float, clip_range_high: float | None) -> tuple[float, float]:
    """1 − ε and 1 + ε_high."""
    low, high = clip_ranges(clip_range, clip_range_high)
    if not torch.compiler.is_compiling() and not (0.0 < low < 1.0 and 0.0 < high < math.inf):
        raise ConfigError(f"clip_range must be above 0 and below 1, clip_range_high above 0; got {low} and {high}")
    return 1.0 - low, 1.0 + high


def clip_ranges(clip_range: float, clip_range_high: float | None) -> tuple[float, float]:
    """ε and ε_high, which is ε unless given."""
    return clip_range, clip_range if clip_range_high is None else clip_range_high


def positive_nll(
    logprobs: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    positive: Bool[Tensor, " batch"],
    *,
    normalizer: float,
) -> Float[Tensor, ""]:
    """Negative log likelihood of the correct responses, averaged over their tokens; 0 if no response is correct.

    loss = −Σ_{b correct} Σ_t log π(a_bt) / N,   N = number of actions in the correct responses

    Args:
        logprobs: log probability of each action under the current weights, nats.
        mask: True = counts.
        positive: True for a correct response.
        normalizer: N of the whole minibatch, or any number above 0 if it has no correct response, so that the losses of
            its parts add up.

    Source: VAPO (arXiv 2504.05118) eq. 9; its coefficient is 0.1 (§5.1).
    """
    check_positive(normalizer=normalizer)
    return -keep_counted(logprobs, mask & positive.unsqueeze(-1)).sum() / normalizer
