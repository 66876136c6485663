"""How a scalar head starts."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

__all__ = ["HeadInit", "initialise_head"]

HeadInit = Literal["zero", "normal"]


def initialise_head(head: nn.Linear, init: HeadInit) -> nn.Linear:
    """Set a scalar head's weights, in place: all 0, or normal with std 1/√(d+1); the bias is 0 either way.

    Source: spec §3.8 (N+), §7.34.
    """
    if init == "zero":
        nn.init.zeros_(head.weight)
    else:
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    return head
