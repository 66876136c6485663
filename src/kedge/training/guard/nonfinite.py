"""Who is to blame for a figure that is not finite: which response, which of its tokens, or which weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from kedge.algorithm.experience import Experience, Rollout
from kedge.models import ResponseOutputs

__all__ = ["Offender", "find_dead_weight", "find_in_experience", "find_in_rollout", "search_minibatch"]


@dataclass(frozen=True)
class Offender:
    """A figure, and where it stands.

    Attributes:
        what: What it is a figure of.
        figure: The figure.
        row: The response, counted from 0; None where no single one is to blame.
        token: The token of the response, counted from 0; None where the figure is of all of it.
    """

    what: str
    figure: float
    row: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        """`the critic's value at token 3 of response 2 is nan`."""
        place = "" if self.token is None else f" at token {self.token}"
        place += "" if self.row is None else f" of response {self.row}"
        return f"{self.what}{place} is {self.figure:.4g}"


def find_in_rollout(rollout: Rollout) -> Offender | None:
    """The first figure of the sampler's that is not finite."""
    figures = [("the sampler's log probability", rollout.logprobs, rollout.response_mask)]
    if rollout.values is not None:
        figures.append(("the sampler's value", rollout.values, rollout.response_mask))
    return _first_nonfinite(figures)


def find_in_experience(experience: Experience) -> Offender | None:
    """The first figure of experience that is not finite, in the order in which one is made from another."""
    mask, slots = experience.rollout.response_mask, experience.reward_mask
    figures = [
        ("the score", experience.scores, None),
        ("the policy's log probability", experience.old_logprobs, mask),
        ("the reference's log probability", experience.ref_logprobs, mask),
        ("the critic's value", experience.values, slots),
        ("the reward", experience.rewards, slots),
        ("the return", experience.returns, slots),
        ("the advantage", experience.advantages, mask),
    ]
    return _first_nonfinite((what, figure, counted) for what, figure, counted in figures if figure is not None)


def find_dead_weight(modules: Mapping[str, nn.Module]) -> str | None:
    """The first weight that is not finite, in words; no step that is left out mends it.

    Args:
        modules: All that takes part, by what a user calls it.
    """
    for owner, module in modules.items():
        for name, weight in module.named_parameters():
            if not bool(weight.isfinite().all()):
                return f"{owner}: {name} holds {_nonfinite_value(weight.detach()):.4g}"
    return None


def search_minibatch(
    evaluate: Callable[[Experience], tuple[ResponseOutputs, Tensor]],
    minibatch: Experience,
    parameters: Sequence[nn.Parameter],
) -> Offender:
    """Compute a minibatch again, response by response, for the one to blame for its loss or gradient.

    It is slow, and for the rare step that went wrong. The parameters' gradients are overwritten.

    Args:
        evaluate: What the models say about some rows, and their share of the loss.
        minibatch: The rows of the step.
        parameters: What the gradient is of.

    Returns:
        The first figure that is not finite; else the gradient's norm of the response where it is largest.
    """
    found: list[Offender] = []
    for row in range(minibatch.rollout.num_responses):
        part = minibatch.select(slice(row, row + 1))
        outputs, loss = evaluate(part)
        if offender := _find_in_outputs(outputs, part):
            return replace(offender, row=row)
        if loss.isfinite():
            found.append(Offender("the gradient's norm", _gradient_norm(loss, parameters), row))
        else:
            found.append(Offender("the loss", float(loss.detach()), row))
    if len(found) > 1 and not any(math.isfinite(each.figure) for each in found):
        return replace(found[0], what=f"{found[0].what} of each response", row=None)
    return max(found, key=lambda each: each.figure if math.isfinite(each.figure) else math.inf)


def _find_in_outputs(outputs: ResponseOutputs, experience: Experience) -> Offender | None:
    mask = experience.rollout.response_mask
    return _first_nonfinite(
        [
            ("the policy's log probability", outputs.logprobs.detach(), mask),
            ("the policy's entropy", outputs.entropy.detach(), mask),
            ("the critic's value", outputs.values.detach(), experience.reward_mask),
        ]
    )


def _gradient_norm(loss: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    return float(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))


def _first_nonfinite(figures: Iterable[tuple[str, Tensor, Tensor | None]]) -> Offender | None:
    """The first of several tensors, each with what counts in it, that holds something else than finite numbers."""
    counted = [(what, figure if mask is None else torch.where(mask, figure, 0.0)) for what, figure, mask in figures]
    # One wait for the device, as long as all is well.
    fine = torch.stack([figure.isfinite().all() for _, figure in counted]).tolist()
    for (what, figure), is_fine in zip(counted, fine, strict=True):
        if not is_fine:
            place = (~figure.isfinite()).nonzero()[0].tolist()
            return Offender(what, float(figure[tuple(place)]), *place)
    return None


def _nonfinite_value(tensor: Tensor) -> float:
    return float(tensor[~tensor.isfinite()][0])
