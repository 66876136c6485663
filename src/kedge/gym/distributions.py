"""Distributions of actions, with every choice computed from noise drawn beforehand.

Each has a location (logits or means) and chooses an action by adding noise to it:

    one choice       argmax(logits + Gumbel)           several: the same for each component
    switches         logits + logistic > 0
    numbers          mean + σ·normal; squashed: the tanh of that

With noise of 0 it is the mode. The noise of a whole rollout is drawn at once, and a step needs only an addition.
An action has one column per component; a squashed number is kept as u, before its tanh, so that its probability is
exact at the bounds, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "MultiCategorical",
    "SquashedGaussian",
]

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
LOG_2 = math.log(2.0)

# 24 nodes: the entropy is exact to 1e-4 nats for σ up to 2.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
NODES = torch.tensor(_NODES, dtype=torch.float32)
WEIGHTS = torch.tensor(_WEIGHTS / _WEIGHTS.sum(), dtype=torch.float32)


class Distribution(Protocol):
    """A distribution of actions for each of n states."""

    @property
    def parameters(self) -> Float[Tensor, "n parameters"]:
        """All of its parameters, from which the same distribution can be made."""
        ...

    def from_noise(self, noise: Float[Tensor, "n outputs"]) -> Tensor:
        """The actions [n, components] that standard noise of the family leads to."""
        ...

    def mode(self) -> Tensor:
        """The most probable actions [n, components]; of a squashed number the tanh of the most probable u."""
        ...

    def log_prob(self, actions: Tensor) -> Float[Tensor, " n"]:
        """Log probability or density of the actions, nats, summed over components."""
        ...

    def entropy(self) -> Float[Tensor, " n"]:
        """Nats, summed over components."""
        ...

    def kl(self, old: Float[Tensor, "n parameters"]) -> Float[Tensor, " n"]:
        """KL(old ‖ this), nats, from the parameters of a distribution of the same family."""
        ...


@dataclass
class Categorical:
    """One choice of k.

    Attributes:
        logits: Of any scale.
    """

    logits: Float[Tensor, "n k"]

    # Not a `cached_property`: before Python 3.12 it takes a lock, which no compiled step can.
    _log_probs: Float[Tensor, "n k"] | None = field(default=None, init=False, repr=False)

    @property
    def log_probs(self) -> Float[Tensor, "n k"]:
        """Log probability of every choice, computed when it is asked for first."""
        if self._log_probs is None:
            self._log_probs = torch.log_softmax(self.logits, -1)
        return self._log_probs

    @property
    def parameters(self) -> Float[Tensor, "n k"]:
        """See `Distribution`: the log probabilities."""
        return self.log_probs

    def from_noise(self, noise: Float[Tensor, "n k"]) -> Tensor:
        """See `Distribution`; Gumbel noise."""
        return (self.logits + noise).argmax(-1, keepdim=True)

    def mode(self) -> Tensor:
        """See `Distribution`."""
        return self.logits.argmax(-1, keepdim=True)

    def log_prob(self, actions: Tensor) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        return self.log_probs.gather(-1, actions).squeeze(-1)

    def entropy(self) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        return -_weighted(self.log_probs, self.log_probs)

    def kl(self, old: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        return _weighted(old, old - self.log_probs)


def _weighted(log_weights: Tensor, values: Tensor) -> Tensor:
    """Σ exp(log_weights)·values over the last dimension; an impossible choice adds 0, not 0·∞."""
    weights = log_weights.exp()
    return torch.where(weights > 0, weights * values, 0.0).sum(-1)


@dataclass
class MultiCategorical:
    """Several choices, independent of each other.

    Attributes:
        logits: Of all components, side by side.
        sizes: Choices of each component; their sum is k.
    """

    logits: Float[Tensor, "n k"]
    sizes: tuple[int, ...]

    _parts: list[Categorical] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._parts = [Categorical(each) for each in self.logits.split(self.sizes, -1)]

    @property
    def parameters(self) -> Float[Tensor, "n k"]:
        """See `Distribution`: the log probabilities of each component."""
        return torch.cat([each.log_probs for each in self._parts], -1)

    def from_noise(self, noise: Float[Tensor, "n k"]) -> Tensor:
        """See `Distribution`; Gumbel noise."""
        pairs = zip(self._parts, noise.split(self.sizes, -1), strict=True)
        return torch.cat([part.from_noise(each) for part, each in pairs], -1)

    def mode(self) -> Tensor:
        """See `Distribution`."""
        return torch.cat([each.mode() for each in self._parts], -1)

    def log_prob(self, actions: Tensor) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        pairs = zip(self._parts, actions.split(1, -1), strict=True)
        return torch.stack([part.log_prob(each) for part, each in pairs]).sum(0)

    def entropy(self) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        return torch.stack([each.entropy() for each in self._parts]).sum(0)

    def kl(self, old: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        pairs = zip(self._parts, old.split(self.sizes, -1), strict=True)
        return torch.stack([part.kl(each) for part, each in pairs]).sum(0)


@dataclass(frozen=True)
class Bernoulli:
    """Several switches, independent of each other.

    Attributes:
        logits: Log odds of 1.
    """

    logits: Float[Tensor, "n k"]

    @property
    def parameters(self) -> Float[Tensor, "n k"]:
        """See `Distribution`: the logits."""
        return self.logits

    def from_noise(self, noise: Float[Tensor, "n k"]) -> Tensor:
        """See `Distribution`; logistic noise."""
        return (self.logits + noise > 0).long()

    def mode(self) -> Tensor:
        """See `Distribution`."""
        return (self.logits > 0).long()

    def log_prob(self, actions: Tensor) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        return functional.logsigmoid(torch.where(actions > 0, self.logits, -self.logits)).sum(-1)

    def entropy(self) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        return (functional.softplus(self.logits) - self.logits * torch.sigmoid(self.logits)).sum(-1)

    def kl(self, old: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        change = torch.sigmoid(old) * (old - self.logits)
        return (change - functional.softplus(old) + functional.softplus(self.logits)).sum(-1)


@dataclass(frozen=True)
class DiagonalGaussian:
    """Independent numbers of any size.

    Attributes:
        mean: μ.
        log_std: log σ.
    """

    mean: Float[Tensor, "n k"]
    log_std: Float[Tensor, "n k"]

    @property
    def parameters(self) -> Float[Tensor, "n two_k"]:
        """See `Distribution`: the means, then the log standard deviations."""
        return torch.cat([self.mean, self.log_std], -1)

    def from_noise(self, noise: Float[Tensor, "n k"]) -> Tensor:
        """See `Distribution`; normal noise."""
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """See `Distribution`."""
        return self.mean

    def log_prob(self, actions: Tensor) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        standard = (actions - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * standard.square() - self.log_std - HALF_LOG_2PI).sum(-1)

    def entropy(self) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        return (self.log_std + (0.5 + HALF_LOG_2PI)).sum(-1)

    def kl(self, old: Float[Tensor, "n two_k"]) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        mean, log_std = old.chunk(2, -1)
        log_ratio = log_std - self.log_std
        moved = (mean - self.mean) * torch.exp(-self.log_std)
        return (0.5 * (torch.expm1(2 * log_ratio) + moved.square()) - log_ratio).sum(-1)


@dataclass(frozen=True)
class SquashedGaussian:
    """Independent numbers between −1 and 1, the tanh of normal ones.

    An action is u, the number before its tanh. The density is that of tanh u: log N(u) − Σ log(1 − tanh² u). The KL is
    that of the normal distributions, since the tanh is one-to-one.

    Attributes:
        mean: μ of u.
        log_std: log σ of u.

    Source: Haarnoja et al. 2018 (arXiv 1801.01290), appendix C; there the log of the difference is not rewritten and
        loses its digits near the bounds.
    """

    mean: Float[Tensor, "n k"]
    log_std: Float[Tensor, "n k"]

    @property
    def _base(self) -> DiagonalGaussian:
        return DiagonalGaussian(self.mean, self.log_std)

    @property
    def parameters(self) -> Float[Tensor, "n two_k"]:
        """See `Distribution`: those of u."""
        return self._base.parameters

    def from_noise(self, noise: Float[Tensor, "n k"]) -> Tensor:
        """See `Distribution`; normal noise; u."""
        return self._base.from_noise(noise)

    def mode(self) -> Tensor:
        """See `Distribution`; the mean of u."""
        return self.mean

    def log_prob(self, actions: Tensor) -> Float[Tensor, " n"]:
        """See `Distribution`; the density of tanh u."""
        return self._base.log_prob(actions) - _log_slope(actions).sum(-1)

    def entropy(self) -> Float[Tensor, " n"]:
        """See `Distribution`; E log(1 − tanh² u) by Gauss-Hermite quadrature."""
        nodes, weights = NODES.to(self.mean), WEIGHTS.to(self.mean)
        u = self.mean.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * nodes
        return self._base.entropy() + (_log_slope(u) @ weights).sum(-1)

    def kl(self, old: Float[Tensor, "n two_k"]) -> Float[Tensor, " n"]:
        """See `Distribution`."""
        return self._base.kl(old)


def _log_slope(u: Tensor) -> Tensor:
    """log(1 − tanh² u), exact for large u as well."""
    return 2.0 * (LOG_2 - u - functional.softplus(-2.0 * u))
