"""Finds the response, token or weight behind a non-finite value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout
from kedge.system.ranks import Ranks
from kedge.system.ranks.sharding import clip_shards
from kedge.training.learner import B, Batch, Learner
from kedge.training.objective import Objective

__all__ = ["BadValue", "find_bad_weight", "find_in_experience", "find_in_rollout", "search_minibatch"]


@dataclass(frozen=True)
class BadValue:
    """A value that must not be trained on, and its location.

    Attributes:
        what: The name of the quantity.
        value: The value.
        row: The response, counted from 0; None if it does not belong to a single one.
        token: The token of the response, counted from 0; None if it belongs to the whole response.
    """

    what: str
    value: float
    row: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        """`the critic's value at token 3 of response 2 is nan`."""
        place = "" if self.token is None else f" at token {self.token}"
        place += "" if self.row is None else f" of response {self.row}"
        return f"{self.what}{place} is {self.value:.4g}"


def find_in_rollout(rollout: Rollout) -> BadValue | None:
    """The first non-finite output of the sampler."""
    values = [("the sampler's log probability", rollout.logprobs, rollout.action_mask)]
    if rollout.values is not None:
        values.append(("the sampler's value", rollout.values, rollout.action_mask))
    return _first_nonfinite(values)


def find_in_experience(experience: Experience) -> BadValue | None:
    """The first non-finite value of experience, in the order of computation."""
    mask, slots = experience.action_mask, experience.reward_mask
    values = [
        ("the score", experience.scores, None),
        ("the token score", experience.token_scores, mask),
        ("the policy's log probability", experience.old_logprobs, mask),
        ("the reference's log probability", experience.ref_logprobs, mask),
        ("the critic's value", experience.values, slots),
        ("the reward", experience.rewards, slots),
        ("the return", experience.returns, slots),
        ("the advantage", experience.advantages, mask),
    ]
    return _first_nonfinite((what, value, counted) for what, value, counted in values if value is not None)


def find_bad_weight(modules: Mapping[str, nn.Module]) -> str | None:
    """Describe the first non-finite weight; skipping steps cannot repair it.

    Args:
        modules: All models of the run, by their name in messages.
    """
    for owner, module in modules.items():
        for name, parameter in module.named_parameters():
            weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not bool(weight.isfinite().all()):
                return f"{owner}: {name} contains {_nonfinite_value(weight.detach()):.4g}"
    return None


def search_minibatch(
    learner: Learner[B],
    objective: Objective,
    minibatch: B,
    numbers: Sequence[int],
    parameters: Sequence[nn.Parameter],
) -> BadValue:
    """Recompute a minibatch row by row to find the row behind a bad loss or gradient.

    Slow; only for steps that failed. Overwrites the parameters' gradients.

    Args:
        learner: Evaluates policy and critic.
        objective: The total loss.
        minibatch: The rows of the step.
        numbers: Their row numbers in the whole batch.
        parameters: The trained parameters.

    Returns:
        The first non-finite value; if all are finite, the largest gradient norm of a row.
    """
    divisors = objective.divisors(minibatch)
    found: list[BadValue] = []
    for index, row in enumerate(numbers):
        part = minibatch.select(slice(index, index + 1))
        outputs = learner.evaluate(part)
        loss = objective(outputs, part, divisors).loss
        if bad := _find_in_outputs(outputs, part):
            return replace(bad, row=row)
        if loss.isfinite():
            found.append(BadValue("the gradient norm", _gradient_norm(loss, parameters, learner.ranks), row))
        else:
            found.append(BadValue("the loss", float(loss.detach()), row))
    if len(found) > 1 and not any(math.isfinite(each.value) for each in found):
        return replace(found[0], what=f"{found[0].what} of each response", row=None)
    return max(found, key=lambda each: each.value if math.isfinite(each.value) else math.inf)


def _find_in_outputs(outputs: PolicyOutputs, batch: Batch) -> BadValue | None:
    values = [
        ("the policy's log probability", outputs.logprobs.detach(), batch.action_mask),
        ("the policy's entropy", outputs.entropy.detach(), batch.action_mask),
    ]
    if outputs.values is not None:
        values.append(("the critic's value", outputs.values.detach(), batch.reward_mask))
    return _first_nonfinite(values)


def _gradient_norm(loss: Tensor, parameters: Sequence[nn.Parameter], ranks: Ranks) -> float:
    """The norm of one row's gradient; every rank computes the same one."""
    for parameter in parameters:
        parameter.grad = None
    if ranks.is_sharded:
        (loss / ranks.count).backward()
        ranks.sum_gradients(parameters)
        return clip_shards([parameter.grad for parameter in parameters if parameter.grad is not None], None, ranks)
    loss.backward()
    return float(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))


def _first_nonfinite(values: Iterable[tuple[str, Tensor, Tensor | None]]) -> BadValue | None:
    """The first non-finite value in several named tensors, each with its mask."""
    counted = [(what, value if mask is None else torch.where(mask, value, 0.0)) for what, value, mask in values]
    # One device synchronization if all values are finite.
    finite = torch.stack([value.isfinite().all() for _, value in counted]).tolist()
    for (what, value), is_finite in zip(counted, finite, strict=True):
        if not is_finite:
            place = (~value.isfinite()).nonzero()[0].tolist()
            return BadValue(what, float(value[tuple(place)]), *place)
    return None


def _nonfinite_value(tensor: Tensor) -> float:
    return float(tensor[~tensor.isfinite()][0])
