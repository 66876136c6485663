"""Ragged batches, and garbage for their padding."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30, -1e9)


@dataclass(frozen=True)
class Batch:
    mask: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    old_values: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    scores: Tensor


@pytest.fixture(scope="session")
def ragged() -> Callable[..., Batch]:
    """A batch of rows of random lengths 1 … time, float64, 0 in the padding."""

    def make(seed: int, batch: int = 5, time: int = 7) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, time + 1, (batch,), generator=draw)
        mask = torch.arange(time) < lengths.unsqueeze(-1)

        def normal(scale: float = 1.0, mean: float = 0.0) -> Tensor:
            noise = torch.randn(batch, time, generator=draw, dtype=torch.float64)
            return torch.where(mask, mean + scale * noise, 0.0)

        old_logprobs, old_values = normal(0.5, -2.0), normal()
        return Batch(
            mask=mask,
            logprobs=old_logprobs + normal(0.3),
            old_logprobs=old_logprobs,
            ref_logprobs=old_logprobs + normal(0.3),
            values=old_values + normal(0.3),
            old_values=old_values,
            rewards=normal(),
            advantages=normal(),
            returns=normal(2.0),
            scores=torch.randn(batch, generator=draw, dtype=torch.float64),
        )

    return make


@pytest.fixture(scope="session")
def soil() -> Callable[[Tensor, Tensor, float], Tensor]:
    """The tensor with garbage written into its masked slots."""
    return lambda x, mask, garbage: torch.where(mask, x.detach(), garbage)
