"""Distributions of actions: of several components, squashed, and samples from noise drawn beforehand."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import pytest
import torch
from torch import distributions as oracle

from kedge_control.actions import ActionDistribution, ActionHead
from kedge_control.spaces import Spaces

SIZES = (3, 2)
ROWS = 5


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KINDS = {
    "one choice": Spaces((4,), None, "discrete", (5,), (), (0,)),
    "choices": Spaces((4,), None, "multi_discrete", SIZES, (2,), (0, 0)),
    "switches": Spaces((4,), None, "multi_binary", (1,) * 5, (5,), (0,) * 5),
    "numbers": Spaces((4,), None, "continuous", (1,) * 5, (5,), (0,) * 5, (-1.0,) * 5, (1.0,) * 5),
}


def made(kind: str, seed: int, bounds: Literal["clip", "squash"] = "clip") -> ActionDistribution:
    log_std = 0.3 * drawn(sum(SIZES), seed=seed + 1) if kind == "numbers" else None
    return ActionHead(KINDS[kind], bounds).distribution(2 * drawn(ROWS, sum(SIZES), seed=seed), log_std)


def all_actions(kind: str) -> list[list[int]]:
    if kind == "one choice":
        return [[number] for number in range(5)]
    sizes = SIZES if kind == "choices" else (2,) * 5
    return [list(each) for each in itertools.product(*map(range, sizes))]


@pytest.mark.parametrize("kind", ["one choice", "choices", "switches"])
def test_entropy_and_kl_are_sums_over_all_actions(kind: str) -> None:
    new, old = made(kind, 1), made(kind, 7)
    actions = torch.tensor(all_actions(kind))
    logs, before = (
        torch.stack([each.log_prob(action.expand(ROWS, -1)) for action in actions], -1) for each in (new, old)
    )
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(ROWS))
    torch.testing.assert_close(new.entropy(), -(logs.exp() * logs).sum(-1))
    torch.testing.assert_close(new.kl_from(old), (before.exp() * (before - logs)).sum(-1))
    assert new.kl_from(new).abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_restore_the_distribution(kind: str) -> None:
    new = made(kind, 1)
    again = ActionHead(KINDS[kind]).restored(new.parameters)
    torch.testing.assert_close(again.entropy(), new.entropy())
    assert new.kl_from(again).abs().max() < 1e-6


def test_numbers_have_the_density_of_the_formula() -> None:
    new = made("numbers", 1)
    mean, std = new.parameters.chunk(2, -1)
    log_std = std.log()
    actions = drawn(ROWS, sum(SIZES), seed=3)
    squared = ((actions - mean) / log_std.exp()).square()
    expected = (-0.5 * squared - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
    torch.testing.assert_close(new.log_prob(actions), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(new.entropy(), (log_std + 0.5 + 0.5 * math.log(2 * math.pi)).sum(-1))


def test_a_squashed_gaussian_has_the_density_of_its_tanh() -> None:
    new, old = made("numbers", 1, "squash"), made("numbers", 7, "squash")
    u = drawn(ROWS, sum(SIZES), seed=3)
    mean, std = new.parameters.double().chunk(2, -1)
    log_std = std.log()
    base = oracle.Normal(mean, log_std.exp())
    squashed = oracle.Independent(oracle.TransformedDistribution(base, [oracle.TanhTransform()]), 1)
    torch.testing.assert_close(new.log_prob(u).double(), squashed.log_prob(u.double().tanh()), rtol=1e-5, atol=1e-5)
    # Far out, 1 − tanh² u is 0 in floating point, and its log is still 2·(log 2 − u).
    one = Spaces((4,), None, "continuous", (1,), (1,), (0,), (-1.0,), (1.0,))
    edge = ActionHead(one, "squash").distribution(torch.tensor([[40.0]]), torch.tensor([0.0]))
    assert edge.log_prob(torch.tensor([[40.0]])).item() == pytest.approx(-0.91894 - 2 * (0.69315 - 40.0), abs=1e-3)
    # E −log p by a fine grid over u.
    grid = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    u_grid = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * grid
    density = torch.exp(-grid.square() / 2) / (2 * torch.pi) ** 0.5
    log_p = oracle.Normal(0.0, 1.0).log_prob(grid) - log_std.unsqueeze(-1)
    log_p = log_p - 2 * (0.6931471805599453 - u_grid - torch.nn.functional.softplus(-2 * u_grid))
    expected = -torch.trapezoid(density * log_p, grid, dim=-1).sum(-1)
    torch.testing.assert_close(new.entropy().double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new.kl_from(old), made("numbers", 1).kl_from(made("numbers", 7)))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_drawn_beforehand_gives_samples_of_the_distribution(kind: str) -> None:
    head, count = ActionHead(KINDS[kind]), 40_000
    location = drawn(1, 5, seed=4)
    log_std = torch.full((5,), 0.5)
    [noise] = head.draw_noise(1, count, torch.Generator().manual_seed(5)).unbind()
    scale = log_std.exp() if kind == "numbers" else 1.0
    actions = torch.from_numpy(head.choose((location + scale * noise).numpy()))
    # Four standard errors at this count.
    tolerance = 4 * 0.5 / count**0.5
    if kind == "numbers":
        torch.testing.assert_close(actions.mean(0), location[0], atol=4 * tolerance, rtol=0)
        torch.testing.assert_close(actions.std(0), log_std.exp(), atol=4 * tolerance, rtol=0)
    elif kind == "switches":
        torch.testing.assert_close(actions.float().mean(0), location[0].sigmoid(), atol=tolerance, rtol=0)
    else:
        parts = location[0].split(SIZES if kind == "choices" else (5,))
        for column, part in zip(actions.unbind(-1), parts, strict=True):
            shares = torch.bincount(column, minlength=len(part)) / count
            torch.testing.assert_close(shares, part.softmax(-1), atol=tolerance, rtol=0)
    [most_probable] = head.choose(location.numpy()).tolist()
    if kind == "numbers":
        assert most_probable == location[0].tolist()
    else:
        logs = {
            tuple(each): head.distribution(location, None).log_prob(torch.tensor([each])) for each in all_actions(kind)
        }
        assert tuple(most_probable) == max(logs, key=lambda each: float(logs[each]))
