"""The responses to the same prompt as a group: the spread of its scores, and which groups have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.checks import check_same_shape
from kedge.algorithm.masking import rounding_of

__all__ = ["GroupScores", "group_scores"]


@dataclass(frozen=True)
class GroupScores:
    """The scores of an update, group by group, in the order of the groups' numbers; all on the CPU.

    Attributes:
        group: number of each group.
        place: for each response, the place of its group in the other attributes.
        count: responses.
        mean: mean score.
        std: standard deviation of the scores, of the population.
        has_spread: whether two of its scores differ by more than rounding; see `rounding_of`. The scores themselves
            are compared: an estimate of the deviation can be above 0 for equal ones.
    """

    group: Int[Tensor, " groups"]
    place: Int[Tensor, " batch"]
    count: Int[Tensor, " groups"]
    mean: Float[Tensor, " groups"]
    std: Float[Tensor, " groups"]
    has_spread: Bool[Tensor, " groups"]

    def among(self, numbers: Int[Tensor, " some"]) -> Bool[Tensor, " batch"]:
        """Which responses belong to the groups with these numbers."""
        return torch.isin(self.group, numbers)[self.place]


@torch.no_grad()
def group_scores(scores: Float[Tensor, " batch"], group: Int[Tensor, " batch"]) -> GroupScores:
    """Mean and spread of the scores of each group.

    Args:
        scores: one per response.
        group: number of each response's prompt, in any order. A group may have lost responses.

    Raises:
        ShapeError: shapes differ.

    Source: DAPO eq. 11 keeps the groups with 0 < correct < G; for scores in general, those with max > min.
    """
    check_same_shape(scores=scores, group=group)
    scores, group = scores.cpu(), group.cpu()
    numbers, place, count = cast(
        "tuple[Tensor, Tensor, Tensor]",
        group.unique(return_inverse=True, return_counts=True),  # pyright: ignore[reportUnknownMemberType]
    )
    exact, empty = scores.double(), torch.zeros(len(numbers), dtype=torch.float64)
    mean = empty.index_add(0, place, exact) / count
    variance = empty.index_add(0, place, (exact - mean[place]).square()) / count
    low, high = (empty.scatter_reduce(0, place, exact, how, include_self=False) for how in ("amin", "amax"))
    rounding = rounding_of(torch.maximum(high.abs(), low.abs()), scores.dtype)
    return GroupScores(numbers, place, count, mean, variance.sqrt(), high - low > rounding)
