"""The critic's warm-up: the first updates, which train the critic alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.training.checkpoint.run_state import Stateful

__all__ = ["ValueWarmup"]

EXPLAINED = "value/explained_variance"
STATE = "value warm-up"
"""Its name in a checkpoint."""


class ValueWarmup:
    """Ends after a number of updates, or after the first one whose explained variance is high enough.

    An update's explained variance is measured before the critic is fitted to its responses.

    Args:
        most: Updates after which it ends in any case (`ppo.value_warmup_updates`).
        until: Explained variance that ends it (`ppo.value_warmup_until`); None for none.
        num_updates: Updates of the run.

    Source: VC-PPO (arXiv 2503.01491) and VAPO (2504.05118) train the critic until loss and explained variance are good
    enough; spec §7.34.
    """

    def __init__(self, *, most: int, until: float | None, num_updates: int) -> None:
        self._most, self._until, self._total = most, until, num_updates
        self._length: int | None = None

    @property
    def num_updates(self) -> int:
        """Its length: as many updates as it took, or the most that it can take."""
        return self._most if self._length is None else self._length

    @property
    def num_policy_updates(self) -> int:
        """Updates of the run that train the policy, at least."""
        return self._total - self.num_updates

    @property
    def ends_by_result(self) -> bool:
        """Whether the length is not known from the start."""
        return self._until is not None

    @property
    def state(self) -> dict[str, Stateful]:
        """What is saved and resumed with the run: nothing if the length is known from the start."""
        return {STATE: self} if self.ends_by_result else {}

    def trains_policy(self, update: int) -> bool:
        """False for the updates of the warm-up."""
        return update > self.num_updates

    def metrics(self, update: int) -> dict[str, float]:
        """1 in the warm-up and 0 after it; nothing in a run without one."""
        return {"value/warmup": float(not self.trains_policy(update))} if self._most else {}

    def see(self, update: int, metrics: Mapping[str, float]) -> str | None:
        """Take note of an update; return a line for the user if the warm-up ends after it.

        Args:
            update: Its number, from 1.
            metrics: Its metrics.
        """
        if self.trains_policy(update):
            return None
        explained = metrics[EXPLAINED]
        reached = self._until is not None and explained >= self._until
        if not reached and update < self._most:
            return None
        self._length = update
        return f"The critic's warm-up ends after update {update}: {self._result(explained, reached)}."

    def _result(self, explained: float, reached: bool) -> str:
        measured = f"its values explain {explained:.3g} of the variance of the returns on new responses"
        if self._until is None:
            return measured
        limit = f"ppo.value_warmup_until={self._until:g}"
        if reached:
            return f"{measured} ({limit})"
        return f"{measured}, less than {limit}, but ppo.value_warmup_updates={self._most} is the most"

    def state_dict(self) -> dict[str, Any]:
        """Its length, null while it goes on."""
        return {"length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._length = state["length"]

    def resume(self, progress: Mapping[str, Any]) -> ValueWarmup:
        """Restore it from the saved progress of a run, if it is there; return it."""
        if saved := progress.get(STATE):
            self.load_state_dict(saved)
        return self
