"""The base of adapters of libraries that use torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppo_conformance import protocol
from ppo_conformance.protocol import METHODS, NotOffered, Settings

UNBOUNDED = 1e9
"""Replaces a clip that a library cannot turn off."""


class TorchAdapter(protocol.Adapter):
    """An adapter whose methods take and return tensors; autograd computes the gradients.

    A loss gets the rows of one micro-batch at a time, and the losses are added. Its settings also have the indices of
    these rows (`rows`), the arguments for all rows (`whole`), and the micro-batches.
    """

    def call(self, name: str, inputs: Sequence[NDArray[Any]], settings: Settings) -> Any:
        """Call the method with this name; a gradient that autograd leaves out, as when everything is clipped, is 0."""
        function, described = getattr(self, name), METHODS[name]
        whole = list(map(torch.tensor, inputs))
        if "gradient" not in described.outputs:
            return function(*whole, settings)
        first = whole[0].requires_grad_()
        if "aggregation" in described.choices:
            parts = settings.get("micro_batches") or [list(range(len(first)))]
            use = {**settings, "micro_batches": parts, "whole": whole}
            found = torch.stack([function(*(x[rows] for x in whole), {**use, "rows": rows}) for rows in parts]).sum()
        else:
            found = function(*whole, settings)
        if found.requires_grad:
            found.sum().backward()
        return found.detach(), torch.zeros_like(first) if first.grad is None else first.grad


def num_ranks(settings: Any) -> int:
    """The number of ranks that share the micro-batches."""
    return len({*settings.get("ranks", [0])})


def by_group(groups: Any, least: int = 2) -> tuple[Any, int]:
    """The order that puts the rows of each group together, and the groups' common size.

    Raises:
        NotOffered: The sizes differ, or are below `least`.
    """
    first, *others = np.unique(groups, return_counts=True)[1].tolist()
    if first < least or any(size != first for size in others):
        raise NotOffered(f"groups have one size, above {least - 1}")
    return np.argsort(groups, kind="stable"), first
