"""Which number format the matrix products run in. Weights are float32, and so is all that follows the logits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch

from kedge.errors import ModelError

__all__ = ["Precision", "autocast", "resolve_precision"]

Precision = Literal["auto", "fp32", "bf16"]


# Below this hidden size the casts of a processor's bf16 cost more than its faster products save.
MIN_CPU_WIDTH = 256


def resolve_precision(
    precision: Precision, device: str | torch.device, *, width: int | None = None
) -> Literal["fp32", "bf16"]:
    """`auto` is bf16 where the hardware multiplies bf16 natively and the model is wide enough to gain, else fp32.

    Native are CUDA from compute capability 8.0 on, and processors with AVX-512-BF16 or AMX. A narrow model (hidden size
    below 256) spends its time outside of matrix products: on a processor it stays in fp32.

    Args:
        precision: `auto`, or the format itself.
        device: Where the models live.
        width: The model's hidden size; None where it is not known.

    Raises:
        ModelError: The word is none of the three.
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


def autocast(precision: Literal["fp32", "bf16"], device: str | torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in `precision`; for fp32 it switches autocast off."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16")
