"""The step of TRPO: the natural gradient by conjugate gradients, scaled to a KL, and a search along it.

Parameters, gradients and steps are flat vectors, in the order in which the parameters are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kedge.algorithm.masking import check_positive
from kedge.errors import ConfigError

__all__ = [
    "MatrixProduct",
    "Tried",
    "conjugate_gradient",
    "fisher_product",
    "flat_gradient",
    "line_search",
    "natural_step",
]

MatrixProduct = Callable[[Tensor], Tensor]
"""Multiplies a symmetric positive semi-definite matrix by a vector."""


class Tried(NamedTuple):
    """A step along the search direction.

    Attributes:
        fraction: Its length as a share of the full step, in (0, 1]; 0 if none was accepted.
        improvement: How much the surrogate is above that of the old policy; 0 if none was accepted.
        kl: Mean KL from the old policy to the new one, nats; 0 if none was accepted.
    """

    fraction: float
    improvement: float
    kl: float


def flat_gradient(
    scalar: Float[Tensor, ""], parameters: Sequence[Tensor], *, create_graph: bool = False
) -> Float[Tensor, " parameters"]:
    """The gradient of a scalar as one vector; 0 for parameters on which it does not depend.

    Args:
        scalar: What is differentiated.
        parameters: With respect to which.
        create_graph: The gradient itself is to be differentiated.
    """
    gradients = torch.autograd.grad(
        scalar, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return torch.cat([each.reshape(-1) for each in gradients])


def fisher_product(kl: Float[Tensor, ""], parameters: Sequence[Tensor]) -> MatrixProduct:
    """Multiplication by the Fisher matrix, without the matrix: F·v = ∇(∇KL · v).

    F is the Hessian of the KL where new and old policy are equal, so the KL must have been computed there. Parameters
    on which it does not depend, such as a value head's, have rows of 0.

    Args:
        kl: Mean KL from the old policy to the current one, nats; analytic, as an estimate has another Hessian.
        parameters: The policy's.

    Returns:
        v ↦ F·v. Every call is one backward pass.

    Source: TRPO appendix C.1; Pearlmutter 1994.
    """
    slope = flat_gradient(kl, parameters, create_graph=True)

    def product(vector: Tensor) -> Tensor:
        parts = torch.autograd.grad(
            slope @ vector, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([each.reshape(-1) for each in parts])

    return product


def conjugate_gradient(
    product: MatrixProduct, target: Float[Tensor, " n"], *, iterations: int, tolerance: float = 1e-10
) -> Float[Tensor, " n"]:
    """Solve A·x = b approximately, from x = 0.

    Each iteration minimizes ½·xᵀAx − bᵀx over one more direction that is conjugate to those before, so n iterations
    solve it exactly but for rounding.

    Args:
        product: v ↦ A·v; A is symmetric and positive definite.
        target: b.
        iterations: At most so many products, ≥ 1.
        tolerance: Stop once |b − A·x|² is at most this share of |b|².

    Raises:
        ConfigError: fewer than one iteration.

    Source: Hestenes and Stiefel 1952; TRPO appendix C.
    """
    if iterations < 1:
        raise ConfigError(f"conjugate gradients need at least one iteration, got {iterations}")
    solution, residual, direction = torch.zeros_like(target), target.clone(), target.clone()
    squared = residual @ residual
    enough = tolerance * squared
    for _ in range(iterations):
        if squared <= enough:
            break
        image = product(direction)
        length = squared / (direction @ image)
        solution = solution + length * direction
        residual = residual - length * image
        before, squared = squared, residual @ residual
        direction = residual + squared / before * direction
    return solution


def natural_step(
    product: MatrixProduct, gradient: Float[Tensor, " n"], *, max_kl: float, damping: float, iterations: int
) -> Float[Tensor, " n"] | None:
    """The step along the natural gradient at which the quadratic model of the KL is δ.

    (F + c·I)·s = g,   step = s·√(2δ / sᵀ(F + c·I)s)

    Args:
        product: v ↦ F·v.
        gradient: g, of the surrogate, which the step is to raise.
        max_kl: δ > 0, nats.
        damping: c ≥ 0. It keeps the system solvable in directions that do not change the policy, and shortens the step.
        iterations: Of `conjugate_gradient`.

    Returns:
        The step; None without one: the gradient is 0, or F is not finite.

    Raises:
        ConfigError: δ is not above 0, or c is below 0.

    Source: TRPO appendix C; the damping is that of the authors' code.
    """
    check_positive(max_kl=max_kl)
    if not damping >= 0.0:
        raise ConfigError(f"damping must be at least 0, got {damping}")

    def damped(vector: Tensor) -> Tensor:
        return product(vector) + damping * vector

    direction = conjugate_gradient(damped, gradient, iterations=iterations)
    curvature = float(direction @ damped(direction))
    if not (math.isfinite(curvature) and curvature > 0.0):
        return None
    return math.sqrt(2.0 * max_kl / curvature) * direction


def line_search(
    evaluate: Callable[[float], tuple[float, float]], *, max_kl: float, shrink: float, max_tries: int
) -> Tried:
    """The longest of the steps 1, β, β², … that stays within the KL and improves the surrogate.

    Args:
        evaluate: Fraction of the full step ↦ improvement of the surrogate, and mean KL in nats. The last call is that
            of the accepted step.
        max_kl: δ, nats; an accepted step's KL is at most this.
        shrink: β in (0, 1).
        max_tries: Number of steps that are tried, ≥ 1.

    Returns:
        The first step accepted; its fraction is 0 if there is none. NaN is never accepted.

    Raises:
        ConfigError: β is outside (0, 1), or no step is to be tried.

    Source: TRPO appendix C.
    """
    if not 0.0 < shrink < 1.0:
        raise ConfigError(f"shrink must be above 0 and below 1, got {shrink}: each step tried is that much shorter")
    if max_tries < 1:
        raise ConfigError(f"a line search needs at least one try, got {max_tries}")
    for attempt in range(max_tries):
        fraction = shrink**attempt
        improvement, kl = evaluate(fraction)
        if improvement > 0.0 and kl <= max_kl:
            return Tried(fraction, improvement, kl)
    return Tried(0.0, 0.0, 0.0)
