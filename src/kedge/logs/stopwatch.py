"""Time per phase of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kedge.system.memory import note_exhaustion

__all__ = ["Stopwatch"]

PHASES = {"rollout": "sampling", "reward": "scoring", "train": "the update"}
"""Display names of the phases that have another name in the code."""


class Stopwatch:
    """Seconds by phase of one update, measured from construction to `metrics`.

    Args:
        device: Where the work is done; a GPU is synchronized at the end of each phase so that its time counts there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `time/<name>`."""
        started = time.perf_counter()
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as error:
            note_exhaustion(error, PHASES.get(name, name))
            raise
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def metrics(self, *, num_tokens: int) -> dict[str, float]:
        """`time/<phase>` and `time/update` in seconds, and `tokens_per_second` of the whole update.

        Args:
            num_tokens: Tokens of prompts and responses in the update, without padding.
        """
        total = time.perf_counter() - self._started
        phases = {f"time/{name}": seconds for name, seconds in self._phases.items()}
        return {**phases, "time/update": total, "tokens_per_second": num_tokens / total}
