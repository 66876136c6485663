"""Fits of smooth models: the minimum of a loss, and the curvature there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.autograd.functional import hessian


def fitted(loss: Callable[[Tensor], Tensor], start: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Minimize a loss in double precision.

    Args:
        loss: A smooth function of the parameters.
        start: The parameters to start from.

    Returns:
        The parameters at the minimum, or at a saddle if the loss is symmetric around the start, and the inverse
        `[parameter, parameter]` of the second derivatives there: at a minimum the covariance of the posterior whose
        negative logarithm is the loss, by Laplace's approximation.
    """
    found = start.double().clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [found], max_iter=1000, tolerance_grad=1e-6, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(found)
        value.backward()
        return value

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]: its stub wants a number
    size = found.numel()
    curvature = hessian(loss, found.detach()).reshape(size, size)
    return found.detach().numpy(), np.linalg.inv(curvature.numpy())
