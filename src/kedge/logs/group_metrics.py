"""Metrics of the groups of responses to the same prompt."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.algorithm.group_advantages import group_scores

__all__ = ["describe_groups"]

SMALL = 0.1
"""Standard deviation within a group, relative to that of all scores within their groups, which a division by it blows
up tenfold."""


def describe_groups(rollout: Rollout, scores: Float[Tensor, " batch"]) -> dict[str, float]:
    """Metrics of an update's groups; none if every response has its own prompt.

    `group/constant`: share of the groups whose responses all score the same. `group/score_std`: standard deviation of
    the scores within their groups. `group/small_spread`: share of the groups with spread whose own is below a tenth of
    that. `group/length_above`, `group/length_below`: mean length of the responses that score above and below their
    group's mean.

    Args:
        rollout: The responses.
        scores: One per response, token scores included.
    """
    groups = group_scores(scores, rollout.group)
    if not (groups.count > 1).any():
        return {}
    within = float((groups.std.square() * groups.count).sum() / groups.count.sum()) ** 0.5
    found = groups.std[groups.has_spread]
    metrics = {
        "group/constant": 1 - float(groups.has_spread.double().mean()),
        "group/score_std": within,
        "group/small_spread": float((found < SMALL * within).double().mean()) if len(found) else 0.0,
    }
    if len(found):
        lengths, distance = rollout.response_lengths.cpu().float(), scores.cpu() - groups.mean[groups.place]
        counted = groups.has_spread[groups.place]
        metrics |= {
            "group/length_above": float(lengths[counted & (distance > 0)].mean()),
            "group/length_below": float(lengths[counted & (distance < 0)].mean()),
        }
    return metrics
