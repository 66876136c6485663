"""The natural gradient against explicit Fisher matrices, and the search along it."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from kedge_control.trpo import (
    Tried,
    TrustRegion,
    conjugate_gradient,
    fisher_product,
    flat_gradient,
    line_search,
    natural_step,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spd(size: int, seed: int) -> Tensor:
    """A symmetric positive definite matrix with eigenvalues from 1e-2 to 1e2."""
    basis = torch.linalg.qr(drawn(size, size, seed=seed)).Q
    return basis @ torch.diag(torch.logspace(-2, 2, size, dtype=torch.float64)) @ basis.T


def fisher_of(product, size: int) -> Tensor:
    return torch.stack([product(column) for column in torch.eye(size, dtype=torch.float64)], dim=1)


def test_a_gaussians_fisher_matrix_is_the_one_of_the_textbook():
    """Mean W·x and state-independent log σ: E[xxᵀ]/σ² per output, 2 per log σ, nothing between the two."""
    states, weight, log_std = drawn(7, 3), drawn(2, 3, seed=1).requires_grad_(), drawn(2, seed=2).requires_grad_()
    value_head = drawn(3, seed=3).requires_grad_()
    new = Normal(states @ weight.T, log_std.exp().expand(7, 2))
    old = Normal(new.mean.detach(), new.stddev.detach())
    product = fisher_product(kl_divergence(old, new).sum(-1).mean(), [weight, log_std, value_head])
    moments = states.T @ states / 7
    blocks = [moments / variance for variance in (2 * log_std.detach()).exp()]
    expected = torch.block_diag(*blocks, 2 * torch.eye(2, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64))
    torch.testing.assert_close(fisher_of(product, 11), expected)


def test_a_softmax_networks_fisher_matrix_is_the_expected_square_of_its_score():
    """E[∇log π ∇log πᵀ] over all actions of all states, without a Hessian."""
    states, parameters = drawn(5, 3), [drawn(4, 3, seed=1), drawn(3, 4, seed=2)]
    first, last = (each.requires_grad_() for each in parameters)
    logits = torch.tanh(states @ first.T) @ last.T
    kl = kl_divergence(Categorical(logits=logits.detach()), Categorical(logits=logits)).mean()
    expected = torch.zeros(24, 24, dtype=torch.float64)
    for logprobs in logits.log_softmax(-1):
        for logprob in logprobs:
            score = torch.cat([each.flatten() for each in torch.autograd.grad(logprob, parameters, retain_graph=True)])
            expected += logprob.detach().exp() * torch.outer(score, score) / 5
    torch.testing.assert_close(fisher_of(fisher_product(kl, parameters), 24), expected)


@pytest.mark.parametrize("size", [1, 6, 30])
def test_conjugate_gradients_solve_the_system(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kedge_control.trpo.TOLERANCE", 1e-22)
    matrix, target = spd(size, seed=size) if size > 1 else torch.full((1, 1), 3.0, dtype=torch.float64), drawn(size)
    solution = conjugate_gradient(lambda v: matrix @ v, target, iterations=4 * size)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, target), rtol=1e-7, atol=1e-9)


def test_k_iterations_are_the_best_solution_in_the_krylov_space():
    """The minimum of ½·xᵀAx − bᵀx over b, Ab, …, Aᵏ⁻¹b, solved densely in an orthonormal basis of it."""
    matrix, target = spd(12, seed=0), drawn(12, seed=1)
    for iterations in (1, 2, 5):
        powers = torch.stack([torch.linalg.matrix_power(matrix, k) @ target for k in range(iterations)], dim=1)
        basis = torch.linalg.qr(powers).Q
        best = basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ target)
        found = conjugate_gradient(lambda v: matrix @ v, target, iterations=iterations)
        torch.testing.assert_close(found, best, rtol=1e-6, atol=1e-9)


def test_the_natural_step_solves_the_damped_system_and_spends_the_kl():
    matrix, gradient = spd(8, seed=3), drawn(8, seed=4)
    step = natural_step(lambda v: matrix @ v, gradient, TrustRegion(max_kl=0.02, damping=0.5, iterations=40))
    assert step is not None
    damped = matrix + 0.5 * torch.eye(8, dtype=torch.float64)
    assert float(step @ damped @ step) / 2 == pytest.approx(0.02)
    direction = torch.linalg.solve(damped, gradient)
    torch.testing.assert_close(step / step.norm(), direction / direction.norm(), rtol=1e-6, atol=1e-9)


def test_without_a_gradient_or_a_finite_matrix_there_is_no_step():
    region = TrustRegion(max_kl=0.01, damping=0.1, iterations=3)
    assert natural_step(lambda v: v, torch.zeros(4), region) is None
    assert natural_step(lambda v: v * math.nan, torch.ones(4), region) is None


def test_the_longest_step_that_improves_within_the_kl_is_taken():
    tried: list[float] = []

    def evaluate(fraction: float) -> tuple[float, float]:
        """Too far at 1, undefined at ½, not better at ¼."""
        tried.append(fraction)
        return {1.0: (5.0, 0.02), 0.5: (math.nan, 0.005), 0.25: (0.0, 0.002), 0.125: (0.5, 0.01)}[fraction]

    of_three, of_four = (TrustRegion(max_kl=0.01, shrink=0.5, max_tries=tries) for tries in (3, 4))
    assert line_search(evaluate, of_four) == Tried(0.125, 0.5, 0.01)
    assert tried == [1.0, 0.5, 0.25, 0.125]
    assert line_search(evaluate, of_three) == Tried(0.0, 0.0, 0.0)
    assert line_search(lambda _: (1.0, math.nan), of_three).fraction == 0.0


def test_a_parameter_without_influence_has_gradient_zero():
    used, unused = torch.tensor([2.0], requires_grad=True), torch.ones(2, requires_grad=True)
    assert flat_gradient(used.square().sum(), [used, unused]).tolist() == [4.0, 0.0, 0.0]
