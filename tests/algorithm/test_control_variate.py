"""Advantages with a critic's change of value as a control variate, against slow loops and enumerated gradients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from kedge.algorithm.advantages import GeneralizedAdvantage, RewardToGo
from kedge.algorithm.control_variate import ControlVariateAdvantage, control_weights
from kedge.algorithm.group_advantages import LeaveOneOutAdvantage

NUM_PROMPTS = 40
GROUP = torch.arange(NUM_PROMPTS).repeat_interleave(3)
EACH_ALONE = torch.arange(3 * NUM_PROMPTS)
BASES: dict[str, LeaveOneOutAdvantage | RewardToGo] = {"rloo": LeaveOneOutAdvantage(), "reinforce++": RewardToGo(1.0)}


def drawn(*, skill: float = 1.5, cost: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards at the ends of responses with masked steps, and values that approach a multiple of the score.

    Args:
        skill: The multiple; 1 is right, more is too much.
        cost: Subtracted at every step.
    """
    generator = torch.Generator().manual_seed(0)
    rows = 3 * NUM_PROMPTS
    mask = torch.rand(rows, 6, generator=generator) < 0.7
    mask[torch.arange(rows), torch.randint(6, (rows,), generator=generator)] = True
    score = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    rewards = torch.where(last, score, 0.0) - torch.where(mask, cost, 0.0)
    seen = (mask.cumsum(-1) - 1) / mask.sum(-1, keepdim=True)
    values = skill * seen * score + 0.4 * torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return rewards, mask, values


def estimator(name: str, *, gae_lambda: float = 1.0, gamma: float = 1.0) -> ControlVariateAdvantage:
    return ControlVariateAdvantage(BASES[name], GeneralizedAdvantage(gamma, gae_lambda, 1.0))


def slow_weight(fitted: list[tuple[float, float]]) -> float:
    x, c = np.array(fitted).T
    return min(max(float(np.cov(x, c, bias=True)[0, 1] / np.var(c)), 0.0), 1.0)


def slow_saved(tested: list[tuple[float, float]], weight: float) -> float:
    x, c = np.array(tested).T
    return len(x) * float(np.var(x) - np.var(x - weight * c))


def slow(
    rewards: Tensor, mask: Tensor, values: Tensor, group: list[int], *, compares: bool, gae_lambda: float
) -> tuple[list[dict[int, float]], list[float]]:
    """The advantages of every counted step, and the weight of every row, in loops."""
    num_rows = len(group)
    steps = [[t for t in range(mask.shape[1]) if mask[row, t]] for row in range(num_rows)]
    to_go: list[dict[int, float]] = []
    estimated: list[dict[int, float]] = []
    for row in range(num_rows):
        to_go.append({t: sum(float(rewards[row, k]) for k in steps[row] if k >= t) for t in steps[row]})
        found: dict[int, float] = {}
        carried = following = 0.0
        for t in reversed(steps[row]):
            carried = float(rewards[row, t]) + following - float(values[row, t]) + gae_lambda * carried
            found[t], following = carried, float(values[row, t])
        estimated.append(found)
    totals = [to_go[row][steps[row][0]] for row in range(num_rows)]
    firsts = [float(values[row, steps[row][0]]) for row in range(num_rows)]
    base: list[dict[int, float]] = []
    change: list[dict[int, float]] = []
    for row in range(num_rows):
        others = [totals[other] for other in range(num_rows) if group[other] == group[row] and other != row]
        if compares:
            base.append(dict.fromkeys(steps[row], totals[row] - sum(others) / len(others)))
            change.append({t: totals[row] - estimated[row][t] - firsts[row] for t in steps[row]})
        else:
            base.append(to_go[row])
            change.append({t: to_go[row][t] - estimated[row][t] - sum(firsts) / num_rows for t in steps[row]})
    prompts = list(dict.fromkeys(group))
    parts = {
        part: [
            (base[row][t], change[row][t])
            for row in range(num_rows)
            if prompts.index(group[row]) % 4 == part
            for t in steps[row]
        ]
        for part in range(4)
    }
    of_half = []
    for one, other in ((2, 3), (0, 1)):
        saved = slow_saved(parts[other], slow_weight(parts[one])) + slow_saved(parts[one], slow_weight(parts[other]))
        of_half.append(slow_weight(parts[one] + parts[other]) if saved > 0 else 0.0)
    weights = [of_half[prompts.index(group[row]) % 4 // 2] for row in range(num_rows)]
    return [{t: base[row][t] - weights[row] * change[row][t] for t in steps[row]} for row in range(num_rows)], weights


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("gae_lambda", [1.0, 0.9, 0.0])
def test_advantages_and_weights_are_those_of_a_slow_loop(name: str, gae_lambda: float) -> None:
    rewards, mask, values = drawn(cost=0.1)
    group = GROUP if name == "rloo" else EACH_ALONE
    found = estimator(name, gae_lambda=gae_lambda)(rewards, mask, values=values, group=GROUP)
    expected, weights = slow(rewards, mask, values, group.tolist(), compares=name == "rloo", gae_lambda=gae_lambda)
    assert all(0 < weight < 1 for weight in weights)
    assert len(set(weights)) == 2
    for row, steps in enumerate(expected):
        for t in range(mask.shape[1]):
            assert float(found.advantages[row, t]) == pytest.approx(steps.get(t, 0.0), abs=1e-12)
    returns = GeneralizedAdvantage(1.0, 1.0)(rewards, mask, values=values).returns
    torch.testing.assert_close(found.returns, returns)  # the critic's targets are those of GAE


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("values", ["constant", "zero", "wrong"])
def test_a_critic_that_knows_nothing_changes_no_bit(name: str, values: str) -> None:
    rewards, mask, good = drawn(skill=1.0)
    blind = {
        "constant": torch.full_like(good, 0.3),
        "zero": torch.zeros_like(good),
        "wrong": -good,
    }[values]
    found = estimator(name)(rewards, mask, values=blind, group=GROUP).advantages
    assert torch.equal(found, BASES[name](rewards, mask, group=GROUP).advantages)


@pytest.mark.parametrize("name", BASES)
def test_a_critic_of_noise_costs_next_to_nothing(name: str) -> None:
    rewards, mask, good = drawn()
    plain = BASES[name](rewards, mask, group=GROUP).advantages
    ratios = []
    for seed in range(40):
        noise = torch.randn(good.shape, generator=torch.Generator().manual_seed(seed), dtype=good.dtype)
        found = estimator(name)(rewards, mask, values=noise, group=GROUP).advantages
        ratios.append(float(found[mask].var() / plain[mask].var()))
    assert np.mean(ratios) < 1.005  # with w = 1 it would be 2 or more
    assert np.median(ratios) == 1.0


@pytest.mark.parametrize("name", BASES)
def test_a_critic_that_knows_the_score_lowers_the_variance(name: str) -> None:
    rewards, mask, values = drawn(skill=1.0)
    plain = BASES[name](rewards, mask, group=GROUP).advantages[mask]
    found = estimator(name)(rewards, mask, values=values, group=GROUP).advantages[mask]
    assert float(found.var()) < 0.9 * float(plain.var())


def test_the_weight_of_a_prompt_does_not_depend_on_its_own_responses() -> None:
    rewards, mask, values = drawn()
    change = values - values[:, :1]
    base = LeaveOneOutAdvantage()(rewards, mask, group=GROUP).advantages
    weights = control_weights(base, change, mask, GROUP)
    for number in range(NUM_PROMPTS):
        own = GROUP.eq(number)
        other = torch.where(own[:, None], -3 * base + 1, base)
        assert torch.equal(control_weights(other, change, mask, GROUP)[own], weights[own])
    assert weights.min() > 0


@pytest.mark.parametrize(("name", "num_responses"), [("rloo", 2), ("reinforce++", 1)])
def test_the_gradient_of_a_bandit_with_three_steps_is_unbiased(name: str, num_responses: int) -> None:
    """Enumerated: every outcome of a prompt's responses, for some outcomes of the others; 2 actions, 3 steps."""
    generator = torch.Generator().manual_seed(3)
    chance = torch.rand(15, generator=generator, dtype=torch.float64) * 0.6 + 0.2  # of action 1, by prefix
    paths = list(itertools.product((0, 1), repeat=3))
    prefixes = {path: [0, 1 + path[0], 3 + 2 * path[0] + path[1]] for path in paths}
    pay = {path: float(torch.randn((), generator=generator, dtype=torch.float64)) for path in paths}
    value = torch.randn(15, generator=generator, dtype=torch.float64)  # any function of the prefix
    likelihood = {
        path: float(np.prod([chance[p] if a else 1 - chance[p] for p, a in zip(prefixes[path], path, strict=True)]))
        for path in paths
    }

    def score_function(path: tuple[int, ...]) -> Tensor:
        """∇log π of the three actions with respect to the logit of every prefix."""
        gradient = torch.zeros(3, 7, dtype=torch.float64)
        for t, (prefix, action) in enumerate(zip(prefixes[path], path, strict=True)):
            gradient[t, prefix] = action - chance[prefix]
        return gradient

    exact = sum(likelihood[path] * pay[path] * score_function(path).sum(0) for path in paths)
    moved = 0.0
    for seed in range(3):
        draws = torch.randint(8, (24 * num_responses,), generator=torch.Generator().manual_seed(seed)).tolist()
        expected = torch.zeros(7, dtype=torch.float64)
        for outcome in itertools.product(paths, repeat=num_responses):
            rows = [*outcome, *(paths[draw] for draw in draws)]
            rewards = torch.zeros(len(rows), 3, dtype=torch.float64)
            rewards[:, 2] = torch.tensor([pay[path] for path in rows], dtype=torch.float64)
            values = torch.stack([value[prefixes[path]] for path in rows])
            # A value that is of some use to the others, so that the weight is not 0.
            values = values + 0.8 * torch.tensor([pay[path] for path in rows], dtype=torch.float64)[
                :, None
            ] * torch.tensor([0.0, 0.5, 1.0])
            values[:num_responses] = torch.stack([value[prefixes[path]] for path in outcome])
            group = torch.arange(len(rows)) // num_responses
            advantage = estimator(name)
            found = advantage(rewards, torch.ones_like(rewards).bool(), values=values, group=group).advantages
            plain = BASES[name](rewards, torch.ones_like(rewards).bool(), group=group).advantages
            moved = max(moved, float((found - plain)[:num_responses].abs().max()))
            chances = float(np.prod([likelihood[path] for path in outcome]))
            for row, path in enumerate(outcome):
                expected += chances * (found[row, :, None] * score_function(path)).sum(0) / num_responses
        torch.testing.assert_close(expected, exact, atol=1e-12, rtol=1e-12)
    assert moved > 0.1


def test_metrics_are_the_mean_weight_and_the_variance_that_is_gone() -> None:
    rewards, mask, values = drawn()
    use = estimator("rloo")
    plain, found = (each(rewards, mask, values=values, group=GROUP).advantages[mask] for each in (use.base, use))
    change = (values - values.gather(-1, mask.int().argmax(-1, keepdim=True))) * mask
    weights = control_weights(use.base(rewards, mask, group=GROUP).advantages, change, mask, GROUP)
    assert use.metrics(rewards, mask, values=values, group=GROUP) == pytest.approx(
        {
            "advantage/critic_weight": float(weights.mean()),
            "advantage/variance_saved": 1 - float(found.var() / plain.var()),
        }
    )
