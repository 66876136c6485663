"""Models in float64, whose results differ by less than 1e-10 where they are computed in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def in_float64(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute a model's results and gradients in float64, even where its code asks for float32."""
    model.double()
    usual = torch.Tensor.to

    def to(each: torch.Tensor, *kind: Any, **settings: Any) -> torch.Tensor:
        is_rounding = each.dtype == torch.float64 and kind == (torch.float32,)
        return each if is_rounding else usual(each, *kind, **settings)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "float", lambda each: to(each, torch.float32))
