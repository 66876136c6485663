"""When a PPO run ends before its last update: the held-out metric has stopped improving, or the KL is too large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.config import Config
from kedge.training.checkpoint.best import BestUpdate
from kedge.training.checkpoint.run_state import Stateful

__all__ = ["EarlyEnd"]


class EarlyEnd:
    """Checks `ppo.eval_patience` and `ppo.max_kl`.

    Args:
        config: The run's configuration.
        best: The best update so far by the held-out metric.
    """

    def __init__(self, config: Config, best: BestUpdate | None) -> None:
        self._patience, self._max_kl = config.ppo.eval_patience, config.ppo.max_kl
        self._best, self._kl = best, 0.0

    @property
    def state(self) -> dict[str, Stateful]:
        """What is saved and resumed with the run: nothing without a bound on the KL."""
        return {} if self._max_kl is None else {"early end": self}

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take note of an update's KL."""
        self._kl = metrics.get("objective/kl", self._kl)

    def reason(self) -> str | None:
        """Why the run ends here; None if it goes on."""
        best = self._best
        if self._max_kl is not None and self._kl > self._max_kl:
            return f"the KL to the reference is {self._kl:.3g} nats per response, above ppo.max_kl={self._max_kl:g}"
        if self._patience is not None and best is not None and best.num_since >= self._patience:
            return (
                f"{best.metric} has not improved in {best.num_since} evaluations (ppo.eval_patience); its best value "
                f"is {best.value:.4g}, after update {best.update}"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """The last KL."""
        return {"kl": self._kl}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._kl = state["kl"]
