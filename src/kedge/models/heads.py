"""Initialization of scalar heads."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

__all__ = ["HeadInit", "initialize_head"]

HeadInit = Literal["zero", "normal"]


def initialize_head(head: nn.Linear, init: HeadInit) -> nn.Linear:
    """Initialize a scalar head in place: weights 0, or normal with std 1/√(d+1); the bias is 0 either way.

    Source: spec §3.8 (N+), §7.34.
    """
    if init == "zero":
        nn.init.zeros_(head.weight)
    else:
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    return head
