"""Measures a GPU's bf16 matrix-product rate, FLOP/s: an attainable peak.

python -m bench.matmul_rate FILE     (writes the rate as a line of JSON)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

SIDE = 8192
REPEATS = 50


def matmul_rate() -> float:
    """FLOP/s of square products, after a warm-up."""
    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        torch.matmul(left, right)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        torch.matmul(left, right)
    torch.cuda.synchronize()
    return 2 * SIDE**3 * REPEATS / (time.perf_counter() - started)


if __name__ == "__main__":
    facts = {"card": torch.cuda.get_device_name(), "flops": matmul_rate()}
    Path(sys.argv[1]).write_text(json.dumps(facts) + "\n", encoding="utf-8")
