"""The content and amount of padding changes no value and no gradient (spec §12.1–12.3)."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from math import inf, nan

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge import algorithm

# Name → (function of the tensors and the mask, names of the batch's tensors; the first one is differentiated).
TERNARY = ("logprobs", "old_logprobs", "advantages")
FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "masked_mean": (algorithm.masked_mean, ("rewards",)),
    "masked_whiten": (algorithm.masked_whiten, ("advantages",)),
    "masked_whiten kept": (lambda x, mask: algorithm.masked_whiten(x, mask, shift_mean=False), ("rewards",)),
    "aggregate": (algorithm.aggregate, ("rewards",)),
    "aggregate sequence": (lambda x, mask: algorithm.aggregate(x, mask, aggregation="sequence"), ("rewards",)),
    "truncated_importance_weights": (
        lambda *xs: algorithm.truncated_importance_weights(*xs, cap=2.0),
        ("logprobs", "old_logprobs"),
    ),
    "within_ratio_band": (
        lambda *xs: algorithm.within_ratio_band(*xs, of="sequence", low=0.9, high=1.1),
        ("logprobs", "old_logprobs"),
    ),
    "sequence_kl": (algorithm.sequence_kl, ("logprobs", "ref_logprobs")),
    "kl_loss k2": (algorithm.kl_loss, ("logprobs", "ref_logprobs")),
    "kl_loss k3": (lambda *xs: algorithm.kl_loss(*xs, estimator="k3"), ("logprobs", "ref_logprobs")),
    "shape_rewards": (
        lambda logprobs, reference, mask: algorithm.shape_rewards(
            logprobs.new_ones(mask.shape[0]), logprobs, reference, mask, kl_coef=0.1, kl_estimator="k3"
        ),
        ("logprobs", "ref_logprobs"),
    ),
    "generalized_advantages": (
        lambda *xs: algorithm.generalized_advantages(*xs, gamma=1.0, gae_lambda=0.95),
        ("rewards", "values"),
    ),
    "clipped_policy_loss": (lambda *xs: algorithm.clipped_policy_loss(*xs, clip_range=0.2), TERNARY),
    "clipped_policy_loss dual": (
        lambda *xs: algorithm.clipped_policy_loss(*xs, clip_range=0.2, dual_clip=1.1),
        TERNARY,
    ),
    "unclipped_policy_loss": (algorithm.unclipped_policy_loss, TERNARY),
    "kl_penalty_policy_loss": (lambda *xs: algorithm.kl_penalty_policy_loss(*xs, kl_coef=0.5), TERNARY),
    "clipped_value_loss": (
        lambda *xs: algorithm.clipped_value_loss(*xs, clip_range=0.2),
        ("values", "old_values", "returns"),
    ),
    "clipped_value_loss plain": (
        lambda *xs: algorithm.clipped_value_loss(*xs, clip_range=None),
        ("values", "old_values", "returns"),
    ),
    "explained_variance": (algorithm.explained_variance, ("values", "returns")),
} | {
    type(estimate).__name__: (
        lambda rewards, values, mask, estimate=estimate: estimate(rewards, mask, values=values),
        ("rewards", "values"),
    )
    for estimate in (
        algorithm.GeneralizedAdvantage(gamma=0.9, gae_lambda=0.95),
        algorithm.NStepAdvantage(gamma=0.9, num_steps=2),
        algorithm.RewardToGo(gamma=0.9),
        algorithm.TotalReward(gamma=0.9),
    )
}


def parts(result: object) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    found = [getattr(result, field.name) for field in fields(result)] if is_dataclass(result) else result
    return tuple(each for each in found if each is not None)


def run(function: Callable[..., object], tensors: list[Tensor], mask: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The results, and the gradient of the first one with respect to the first tensor (0 if there is none)."""
    first = tensors[0].clone().requires_grad_()
    found = parts(function(first, *tensors[1:], mask))
    if found[0].requires_grad:
        # Each entry has its own weight: a whitened tensor's plain sum has no gradient.
        weights = torch.arange(1.0, found[0].numel() + 1, dtype=found[0].dtype).reshape(found[0].shape)
        (found[0] * weights).sum().backward()
    gradient = torch.zeros_like(first) if first.grad is None else first.grad
    return tuple(part.detach() for part in found), gradient


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("garbage", [nan, inf, -inf, 1e30, -1e9])
def test_garbage_in_the_padding_has_no_influence(ragged, soil, name, garbage):
    function, names = FUNCTIONS[name]
    batch = ragged(21)
    clean = [getattr(batch, field) for field in names]
    expected, gradient = run(function, clean, batch.mask)
    found, soiled_gradient = run(function, [soil(x, batch.mask, garbage) for x in clean], batch.mask)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(soiled_gradient, gradient)
    assert (soiled_gradient[~batch.mask] == 0).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_more_padding_changes_nothing(ragged, name):
    function, names = FUNCTIONS[name]
    batch = ragged(22)
    narrow = [getattr(batch, field) for field in names]
    expected, gradient = run(function, narrow, batch.mask)
    found, wide_gradient = run(function, [pad(x, (0, 4), value=7.0) for x in narrow], pad(batch.mask, (0, 4)))
    width = batch.mask.shape[1]
    for wide, one in zip(found, expected, strict=True):
        torch.testing.assert_close(wide[..., :width] if wide.ndim == 2 else wide, one)
    if name != "masked_whiten" and name != "masked_whiten kept":  # there the wide tensor's weights differ
        torch.testing.assert_close(wide_gradient[:, :width], gradient)
    assert (wide_gradient[:, width:] == 0).all()


def test_a_learning_rate_of_zero_leaves_every_minibatch_at_ratio_one(ragged):
    batch = ragged(23, batch=8)
    logprobs = batch.old_logprobs.clone().requires_grad_()
    optimizer = torch.optim.Adam([logprobs], lr=0.0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for rows in torch.randperm(8, generator=draw).chunk(4):
            found = algorithm.clipped_policy_loss(
                logprobs[rows], batch.old_logprobs[rows], batch.advantages[rows], batch.mask[rows], clip_range=0.2
            )
            assert found.clip_fraction == found.approx_kl == 0
            assert found.ratio_mean == found.ratio_max == 1
            optimizer.zero_grad()
            found.loss.backward()
            optimizer.step()
