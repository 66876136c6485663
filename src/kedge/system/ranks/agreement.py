"""Checks that every rank has the same weights: if they drift apart, results are wrong, and nothing else shows it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kedge.errors import NumericsError
from kedge.system.ranks.ranks import Ranks

__all__ = ["check_equal_weights"]


@torch.no_grad()
def check_equal_weights(ranks: Ranks, modules: Iterable[nn.Module]) -> None:
    """Compare a checksum of all weights between the ranks; nothing to compare for a single one, or if they are sharded.

    Raises:
        NumericsError: They differ; on every rank.
    """
    if not ranks.are_several or ranks.is_sharded:
        return
    weights = [weight for module in modules for weight in module.parameters()]
    sums = [_bits(weight) for weight in weights]
    # Weighted by place, so that two weights that were swapped are noticed.
    total = sum((number + 1) * value for number, value in enumerate(sums)) % 2**53
    found = ranks.everyones(torch.tensor([total], dtype=torch.int64)).reshape(-1).tolist()
    if len(set(found)) > 1:
        other = next(number for number, value in enumerate(found) if value != found[0])
        raise NumericsError(
            f"ranks 0 and {other} have different weights; check that all machines have the same versions and hardware"
        )


def _bits(weight: Tensor) -> int:
    """The sum of a tensor's bits, read as integers."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.contiguous().view(width).sum(dtype=torch.int64))
