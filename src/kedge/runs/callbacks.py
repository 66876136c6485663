"""Callbacks: functions of the user that are called after each update of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import nn

from kedge.training.checkpoint.resume import CheckpointedLoop

__all__ = ["Callback", "Update", "Watcher"]


@dataclass(frozen=True)
class Update:
    """A complete update of PPO, or an optimizer step of sft, reward and critic, as a callback sees it.

    Attributes:
        stage: `sft`, `reward`, `critic`, `ppo` or `control`.
        number: The update's number, from 1.
        num_updates: Updates of the whole run.
        metrics: Its row of `metrics.jsonl`; read-only.
        folder: The run's folder, whose files include the row.
        model: The trained model with its current weights: the transformers model of the policy, the reward model or
            the critic; in control, the networks. It may be read, and a policy sampled from; what is changed in it is
            trained on.
        tokenizer: Its tokenizer; None in control.
    """

    stage: str
    number: int
    num_updates: int
    metrics: Mapping[str, float]
    folder: Path
    model: nn.Module
    tokenizer: Any
    _loop: CheckpointedLoop

    def stop(self, reason: str = "a callback stopped it") -> None:
        """End the run after this update, as if it were complete: the model is saved, `finished.json` has the reason."""
        self._loop.request_end(reason)


Callback: TypeAlias = Callable[[Update], object]
"""Called with each update; what it returns is ignored, and what it raises ends the run."""


@dataclass(frozen=True)
class Watcher:
    """A callback with what it gets to see.

    Attributes:
        callback: The user's function; None for none.
        model: The trained model.
        tokenizer: Its tokenizer; None if it has none.
    """

    callback: Callback | None
    model: nn.Module
    tokenizer: Any = None

    def see(
        self,
        loop: CheckpointedLoop,
        number: int,
        metrics: Mapping[str, float],
        *,
        stage: str,
        num_updates: int,
        folder: Path,
    ) -> None:
        """Call the callback with an update, which is complete: what the callback raises does not undo it."""
        if self.callback is not None:
            loop.complete(number)
            known = MappingProxyType(dict(metrics))
            update = Update(stage, number, num_updates, known, folder, self.model, self.tokenizer, loop)
            loop.on_first_rank(lambda: self.callback and self.callback(update))
