"""The linear read-out of a trunk's states that explains returns best, and how much a critic explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.masking import check_counted, in_float64
from kedge_base.errors import ShapeError
from kedge_base.intervals import Interval, resampled_interval

PENALTIES = tuple(10.0**power for power in range(-7, 2))
"""Ridge penalties that are tried, in units of the features' variance."""

MIN_SPREAD = 1e-12
"""Floor for the features' variance when the ridge penalties are scaled: features that do not vary give no direction to
fit, and get weight 0."""

ROUNDING = 1e-12
"""Share of the mean square below which a variance counts as 0, because it is then only float64 rounding."""

NUM_RESAMPLES = 2_000
"""Bootstrap resamples of the prompts."""


class Readout(NamedTuple):
    """An affine map of features to targets.

    Attributes:
        weight: One entry per feature.
        offset: The constant term.
        penalty: The ridge penalty that was chosen, in units of the features' variance.
    """

    weight: Float[Tensor, " dim"]
    offset: float
    penalty: float


@dataclass
class ReadoutSums:
    """Sufficient statistics of a set of examples for least squares, added in parts, in float64.

    Attributes:
        gram: Σxxᵀ.
        cross: Σxy.
        features: Σx.
        target: Σy.
        square: Σy².
        count: Examples; a fraction where sums have been weighted.
    """

    gram: Float[Tensor, "dim dim"]
    cross: Float[Tensor, " dim"]
    features: Float[Tensor, " dim"]
    target: float = 0.0
    square: float = 0.0
    count: float = 0

    @classmethod
    def empty(cls, dim: int) -> ReadoutSums:
        """Sums over zero examples, to be added to."""
        none = torch.zeros(dim, dtype=torch.float64)
        return cls(torch.zeros(dim, dim, dtype=torch.float64), none.clone(), none.clone())

    def add(self, features: Float[Tensor, "examples dim"], targets: Float[Tensor, " examples"]) -> None:
        """Add examples."""
        rows = in_float64(features)
        values = in_float64(targets)
        self.gram += (rows.T @ rows).cpu()
        self.cross += (rows.T @ values).cpu()
        self.features += rows.sum(0).cpu()
        self.target += float(values.sum())
        self.square += float(values @ values)
        self.count += len(values)

    def flat(self) -> Float[Tensor, " numbers"]:
        """All sums in one tensor, float64; sums over other examples can be added."""
        numbers = torch.tensor([self.target, self.square, self.count], dtype=torch.float64)
        return torch.cat([self.gram.flatten(), self.cross, self.features, numbers])

    @classmethod
    def of(cls, flat: Float[Tensor, " numbers"], dim: int) -> ReadoutSums:
        """The sums that `flat` returned."""
        gram, cross, features, numbers = torch.split(flat, [dim * dim, dim, dim, 3])
        return cls(gram.view(dim, dim), cross, features, *map(float, numbers))

    def __add__(self, other: ReadoutSums) -> ReadoutSums:
        return ReadoutSums(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def spread(self) -> float:
        """The features' mean variance."""
        mean = self.features / self.count
        return float((self.gram.diagonal() / self.count - mean**2).mean())

    def solve(
        self, penalties: Float[Tensor, " several"]
    ) -> tuple[Float[Tensor, "dim several"], Float[Tensor, " several"]]:
        """Weights and offset of the ridge regression for several penalties per example, from one decomposition."""
        mean = self.features / self.count
        center = self.target / self.count
        gram = self.gram / self.count - mean.outer(mean)
        cross = self.cross / self.count - mean * center
        scales, directions = cast("tuple[Tensor, Tensor]", torch.linalg.eigh(gram))  # pyright: ignore[reportUnknownMemberType]
        projected = directions.T @ cross
        weights = directions @ (projected[:, None] / (scales.clamp(min=0)[:, None] + penalties))
        return weights, center - mean @ weights

    def error(self, weights: Float[Tensor, "dim several"], offsets: Float[Tensor, " several"]) -> Tensor:
        """Σ(y − b − w·x)² for each column of weights and its offset."""
        quadratic = (weights * (self.gram @ weights)).sum(0) + 2 * offsets * (self.features @ weights)
        linear = self.cross @ weights + offsets * self.target
        return self.square - 2 * linear + quadratic + self.count * offsets**2


@torch.no_grad()
def fit_readout(halves: Sequence[ReadoutSums]) -> Readout:
    """Ridge regression; the penalty is the one with which each half of the examples predicts the other best.

    w = (Cov(x) + λI)⁻¹ Cov(x, y),   b = mean(y) − w·mean(x)

    The halves must share no prompt, because the tokens of a response are not independent examples: with ordinary least
    squares, a few long responses would be memorized.

    Args:
        halves: The sums of both halves; a single one gets the smallest penalty that is tried.

    Raises:
        ShapeError: The set of examples is empty.

    Source: Hoerl and Kennard 1970, ridge regression; the linear probe of Kumar et al. 2022 (arXiv 2202.10054).
    """
    if not halves or any(each.count < 1 for each in halves):
        raise ShapeError("a read-out needs at least one example in each half")
    whole = reduce(add, halves)
    penalties = torch.tensor(PENALTIES, dtype=torch.float64) * max(whole.spread, MIN_SPREAD)
    chosen = 0
    if len(halves) == 2:
        one, other = halves
        chosen = int((other.error(*one.solve(penalties)) + one.error(*other.solve(penalties))).argmin())
    weights, offsets = whole.solve(penalties[chosen : chosen + 1])
    return Readout(weights[:, 0], float(offsets), PENALTIES[chosen])


@torch.no_grad()
def explained_variance_interval(
    values: Float[Tensor, "batch time"],
    returns: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
) -> Interval:
    """The explained variance 1 − Var(G − V)/Var(G) over the counted slots, with a bootstrap interval over prompts.

    Slots of one response, and responses to one prompt, are not independent; so whole prompts are resampled.

    Args:
        values: The critic's.
        returns: G.
        mask: True = counts.
        group: Number of each row's prompt.

    Raises:
        ShapeError: The shapes differ or nothing counts.

    Source: `resampled_interval`; explained variance as in PPO's metrics (spec §6.28).
    """
    check_counted(mask, values=values, returns=returns)
    values, returns, mask = values.cpu(), returns.cpu(), mask.cpu()
    center = returns[mask].double().mean()
    target, error = (torch.where(mask, each.double(), 0.0) for each in (returns.double() - center, returns - values))
    rows = torch.stack([mask.double(), target, target**2, error, error**2], dim=-1).sum(1)
    prompts, place = cast(
        "tuple[Tensor, Tensor]",
        torch.unique(group.cpu(), return_inverse=True),  # pyright: ignore[reportUnknownMemberType]
    )
    sums = torch.zeros(len(prompts), rows.shape[-1], dtype=torch.float64).index_add_(0, place, rows)
    draws = torch.randint(len(prompts), (NUM_RESAMPLES, len(prompts)), generator=torch.Generator().manual_seed(0))
    resampled = torch.stack([sums[draw].sum(0) for draw in draws])
    found = float(explained_by_sums(sums.sum(0)))
    shares = [float(each) for each in explained_by_sums(resampled)]
    return resampled_interval(found, shares, len(prompts), bounds=(-math.inf, 1.0))


def explained_by_sums(sums: Float[Tensor, "*several 5"]) -> Float[Tensor, "*several"]:
    """The explained variance from Σ1, Σy, Σy², Σe, Σe²; 0 where the returns do not vary."""
    count, target, targets, error, errors = sums.unbind(-1)
    spread = targets / count - (target / count) ** 2
    unexplained = errors / count - (error / count) ** 2
    return torch.where(spread * count > ROUNDING * targets, 1 - unexplained / spread, 0.0)
