"""The global random generators: their state, for checkpoints and for passes that are repeated."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of the global generators of torch, Python and NumPy: a user's functions may use any of them."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    tensors = {"cpu": torch.get_rng_state(), **{f"cuda:{index}": state for index, state in enumerate(cuda)}}
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return tensors, {"python": [version, list(words), gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def restore_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore the global generators."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if f"cuda:{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda:{index}"], index)
