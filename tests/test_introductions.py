"""The worked examples of five introductions to PPO (docs/algorithm.md, section 13), with the numbers they print."""

import math

import pytest
import torch

from kedge.algorithm import (
    GeneralizedAdvantage,
    NStepAdvantage,
    clipped_policy_loss,
    clipped_value_loss,
    token_logprobs_and_entropy,
    unclipped_policy_loss,
)
from kedge.config import load_config

ONE = torch.ones(1, 1, dtype=torch.bool)


def objective(ratio: float, advantage: float) -> float:
    now = torch.tensor([[math.log(ratio)]])
    return -float(clipped_policy_loss(now, torch.zeros(1, 1), torch.tensor([[advantage]]), ONE, clip_range=0.2).loss)


@pytest.mark.parametrize(("ratio", "clipped", "advantage"),
                         [(0.5, 0.8, -1.0), (0.9, 0.9, -1.0), (1.15, 1.15, 1.0), (1.5, 1.2, 1.0)])  # fmt: skip
def test_the_four_clipped_ratios_of_s1(ratio: float, clipped: float, advantage: float) -> None:
    # The sign of the advantage is the one for which the minimum takes the clipped term.
    assert objective(ratio, advantage) == pytest.approx(clipped * advantage, abs=1e-6)


def test_the_advantages_of_s1s_example() -> None:
    values, rewards = torch.tensor([[4.2, 4.5, 4.8]]), torch.tensor([[0.0, 0.0, 6.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = GeneralizedAdvantage(gamma=1.0, gae_lambda=1.0)(rewards, mask, values=values)
    assert weights.advantages.tolist()[0] == pytest.approx([1.8, 1.5, 1.2], abs=1e-6)


def test_the_largest_entropy_of_s2() -> None:
    logits = torch.stack([torch.zeros(1000), torch.randn(1000)])
    _, entropy = token_logprobs_and_entropy(logits, torch.tensor([0, 0]))
    assert float(entropy[0]) == pytest.approx(6.9078, abs=5e-5)
    assert float(entropy[1]) < 6.9078


def test_the_total_loss_that_s2_prints() -> None:
    ppo = load_config(preset="s2-defaults").ppo
    half_squared_error = 4.6192 / 2  # kedge's value loss has the ½ inside
    assert 1.3864 + ppo.value_weight * half_squared_error - ppo.entropy_coef * 6.3992 == pytest.approx(3.6320, abs=5e-5)


def test_the_clipped_objective_is_never_above_the_unclipped_one() -> None:
    for advantage in (-1.5, 2.0):
        for ratio in (0.1, 0.79, 1.0, 1.21, 3.0):
            free = unclipped_policy_loss(torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1),
                                         torch.tensor([[advantage]]), ONE)  # fmt: skip
            assert objective(ratio, advantage) <= -float(free.loss) + 1e-6


def test_n_steps_span_the_residual_and_monte_carlo() -> None:
    values, rewards = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[0.5, -0.5, 4.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    rows = [NStepAdvantage(1.0, n)(rewards, mask, values=values).advantages.tolist()[0] for n in (1, 2, 3)]
    assert rows[0] == pytest.approx([0.5 + 3 - 1, -0.5 + 2 - 3, 4 - 2])
    assert rows[1] == pytest.approx([0.5 - 0.5 + 2 - 1, -0.5 + 4 - 3, 4 - 2])
    assert rows[2] == pytest.approx([4 - 1, 3.5 - 3, 4 - 2])


def test_the_critics_gradient_is_its_error() -> None:
    values = torch.tensor([[2.0, 0.5]], requires_grad=True)
    returns, mask = torch.tensor([[1.0, 1.5]]), torch.ones(1, 2, dtype=torch.bool)
    clipped_value_loss(values, values.detach(), returns, mask, clip_range=None).loss.backward()
    assert values.grad is not None
    assert (2 * values.grad).tolist()[0] == pytest.approx([1.0, -1.0])  # V − target; the mean is over two tokens
