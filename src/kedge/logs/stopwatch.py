"""Where the time of an update goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Seconds by phase of one update, from its making to `metrics`.

    Args:
        device: Where the work is done; a GPU is waited for at the end of each phase, or its time would be the next's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside towards `time/<name>`."""
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    def metrics(self, *, num_tokens: int) -> dict[str, float]:
        """`time/<phase>` and `time/update` in seconds, and `tokens_per_second` of the whole update.

        Args:
            num_tokens: Real tokens of the update, prompts and responses; padding is not counted.
        """
        total = time.perf_counter() - self._started
        phases = {f"time/{name}": seconds for name, seconds in self._phases.items()}
        return {**phases, "time/update": total, "tokens_per_second": num_tokens / total}
