"""Distributions against torch.distributions, and samples against the probabilities they should have."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as oracle

from kedge.gym.actions import ActionHead
from kedge.gym.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
)
from kedge.gym.spaces import Spaces

SIZES = (3, 2)
ROWS = 5


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(kind: str, seed: int) -> tuple[Distribution, oracle.Distribution | list[oracle.Distribution]]:
    """A distribution, and torch's with the same parameters."""
    logits = 2 * drawn(ROWS, sum(SIZES), seed=seed)
    if kind == "one choice":
        return Categorical(logits), oracle.Categorical(logits=logits)
    if kind == "choices":
        return MultiCategorical(logits, SIZES), [oracle.Categorical(logits=each) for each in logits.split(SIZES, -1)]
    if kind == "switches":
        return Bernoulli(logits), oracle.Independent(oracle.Bernoulli(logits=logits), 1)
    log_std = 0.3 * drawn(sum(SIZES), seed=seed + 1).expand_as(logits)
    normal = oracle.Independent(oracle.Normal(logits, log_std.exp()), 1)
    if kind == "numbers":
        return DiagonalGaussian(logits, log_std), normal
    return SquashedGaussian(logits, log_std), normal


def test_every_kind_equals_the_library() -> None:
    for kind in ("one choice", "choices", "switches", "numbers"):
        (new, theirs), (old, others) = made(kind, 1), made(kind, 7)
        several = theirs if isinstance(theirs, list) else [theirs]
        before = others if isinstance(others, list) else [others]
        actions = [each.sample() for each in several]
        columns = torch.stack(actions, -1) if kind == "choices" else actions[0].reshape(ROWS, -1)
        columns = columns if kind == "numbers" else columns.long()
        expected = sum(each.log_prob(one) for each, one in zip(several, actions, strict=True))
        torch.testing.assert_close(new.log_prob(columns), expected)
        torch.testing.assert_close(new.entropy(), sum(each.entropy() for each in several))
        divergences = [oracle.kl_divergence(one, other) for one, other in zip(before, several, strict=True)]
        torch.testing.assert_close(new.kl(old.parameters), sum(divergences), rtol=1e-4, atol=1e-6)
        assert new.kl(new.parameters).abs().max() < 1e-6


def test_a_squashed_gaussian_has_the_density_of_its_tanh() -> None:
    new, _ = made("squashed", 1)
    old, before = made("squashed", 7)
    assert isinstance(new, SquashedGaussian)
    u = drawn(ROWS, sum(SIZES), seed=3)
    base = oracle.Normal(new.mean.double(), new.log_std.exp().double())
    squashed = oracle.Independent(oracle.TransformedDistribution(base, [oracle.TanhTransform()]), 1)
    torch.testing.assert_close(new.log_prob(u).double(), squashed.log_prob(u.double().tanh()), rtol=1e-5, atol=1e-5)
    # Far out, 1 − tanh² u is 0 in floating point, and its log is still 2·(log 2 − u).
    edge = SquashedGaussian(torch.tensor([[40.0]]), torch.tensor([[0.0]]))
    assert edge.log_prob(torch.tensor([[40.0]])).item() == pytest.approx(-0.91894 - 2 * (0.69315 - 40.0), abs=1e-3)
    # E −log p by a fine grid over u.
    grid = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    u_grid = base.loc.unsqueeze(-1) + base.scale.unsqueeze(-1) * grid
    density = torch.exp(-grid.square() / 2) / (2 * torch.pi) ** 0.5
    log_p = oracle.Normal(0.0, 1.0).log_prob(grid) - base.scale.log().unsqueeze(-1)
    log_p = log_p - 2 * (0.6931471805599453 - u_grid - torch.nn.functional.softplus(-2 * u_grid))
    expected = -torch.trapezoid(density * log_p, grid, dim=-1).sum(-1)
    torch.testing.assert_close(new.entropy().double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new.kl(old.parameters), oracle.kl_divergence(before, made("numbers", 1)[1]))


KINDS = {
    "one choice": Spaces((4,), None, "discrete", (5,), (), (0,)),
    "choices": Spaces((4,), None, "multi_discrete", SIZES, (2,), (0, 0)),
    "switches": Spaces((4,), None, "multi_binary", (1,) * 5, (5,), (0,) * 5),
    "numbers": Spaces((4,), None, "continuous", (1,) * 5, (5,), (0,) * 5, (-1.0,) * 5, (1.0,) * 5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_noise_drawn_beforehand_gives_samples_of_the_distribution(kind: str) -> None:
    head, count = ActionHead(KINDS[kind]), 40_000
    location = drawn(1, 5, seed=4)
    log_std = torch.full((5,), 0.5)
    distribution = head.distribution(location, log_std)
    [noise] = head.draw_noise(1, count, torch.Generator().manual_seed(5)).unbind()
    scale = log_std.exp() if kind == "numbers" else 1.0
    actions = torch.from_numpy(head.choose((location + scale * noise).numpy()))
    torch.testing.assert_close(actions, head.distribution(location.expand(count, 5), log_std).from_noise(noise))
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
    assert torch.equal(distribution.mode(), torch.from_numpy(head.choose(location.numpy())))
