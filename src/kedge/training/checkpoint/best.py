"""The best update of a run so far by one of its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BestUpdate"]


@dataclass
class BestUpdate:
    """The best value so far of a metric; saved and resumed with the run.

    Attributes:
        metric: The metric, as in `metrics.jsonl`.
        higher_is_better: Whether its best value is the largest.
        is_kept: Whether the checkpoint of the best update is kept.
        update: The update with the best value; None before the first value.
        value: The best value.
        num_since: Values since the best one, none of them better.
    """

    metric: str
    higher_is_better: bool
    is_kept: bool = True
    update: int | None = None
    value: float | None = None
    num_since: int = 0

    def observe(self, update: int, metrics: Mapping[str, float]) -> bool:
        """Record an update's metrics; True if it is the new best. The first of equal values is the best."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return False
        sign = 1.0 if self.higher_is_better else -1.0
        if self.value is not None and sign * value <= sign * self.value:
            self.num_since += 1
            return False
        self.update = update
        self.value = float(value)
        self.num_since = 0
        return True

    def summary(self) -> dict[str, object]:
        """Update, metric and value, for files about the run."""
        return {"update": self.update, "metric": self.metric, "value": self.value}

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return {**self.summary(), "num_since": self.num_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; that of another metric is ignored, since its values cannot be compared."""
        if state["metric"] == self.metric:
            self.update = state["update"]
            self.value = state["value"]
            self.num_since = state["num_since"]
