"""Number format of the matrix products. Weights are float32, and so is everything computed from the logits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch

from kedge.errors import ModelError

__all__ = ["Precision", "autocast", "resolve_precision"]

Precision = Literal["fp32", "bf16"]

MIN_CPU_WIDTH = 256
"""Below this hidden size, casting to bf16 on a CPU costs more than the faster products save."""


def resolve_precision(
    precision: Precision | Literal["auto"], device: str | torch.device, *, width: int | None = None
) -> Precision:
    """Resolve `auto` to bf16 where the hardware supports it natively and the model is wide enough to gain, else fp32.

    Native support: CUDA from compute capability 8.0, and CPUs with AVX-512-BF16 or AMX. A narrow model (hidden size
    below 256) spends its time outside matrix products, so on a CPU it stays in fp32.

    Args:
        precision: `auto`, or the format itself.
        device: The models' device.
        width: The model's hidden size; None if unknown.

    Raises:
        ModelError: The name is not one of the three.
    """
    if precision not in ("auto", "fp32", "bf16"):
        raise ModelError(f"runtime.precision {precision!r} is unknown; choose auto, fp32 or bf16")
    if precision != "auto":
        return precision
    kind = torch.device(device).type
    if kind == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp32"
    if kind == "cpu" and (width is None or width >= MIN_CPU_WIDTH):
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bf16" if native else "fp32"
    return "fp32"


def autocast(precision: Precision, device: str | torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in `precision`; fp32 turns autocast off."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16")
