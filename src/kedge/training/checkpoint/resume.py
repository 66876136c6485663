"""The loop over a run's steps: resumes from the newest checkpoint, saves when one is due, stops when asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.errors import NumericsError, OutputError
from kedge.training.checkpoint.save_schedule import SaveSchedule
from kedge.training.checkpoint.state import (
    module_tensors,
    optimizer_state,
    random_state,
    restore_module,
    restore_optimizer,
    restore_random_state,
)
from kedge.training.checkpoint.store import Checkpoint, newest_valid, save_checkpoint
from kedge.training.stopping import Stopping

__all__ = ["CHECKPOINTS", "CheckpointedLoop", "Log", "PlainLoop", "Stateful", "TrainingState"]

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, inside the run's own."""


class Stateful(Protocol):
    """Anything besides weights and optimizer that changes in the course of a run and is resumed."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in JSON's types."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Continue from a `state_dict`."""
        ...


class Log(Protocol):
    """A file of rows that grows with the run."""

    def sync(self) -> None:
        """Force every row so far to the disk."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes in the course of a run.

    Attributes:
        modules: The trained modules, by name.
        optimizer: Of all their parameters.
        parts: Everything else, by name: data streams, coefficients, the guard's memory.
    """

    modules: Mapping[str, nn.Module]
    optimizer: Optimizer
    parts: Mapping[str, Stateful] = field(default_factory=dict)


class CheckpointedLoop:
    """Counts a run's steps, saves them, and ends the run.

        with CheckpointedLoop(…) as loop:
            loop.restore(TrainingState(…))
            for step in loop.steps(num_steps):
                …
                loop.begin_changes()
                …

    Args:
        folder: Where the checkpoints are.
        kind: The stage.
        fingerprint: Hashes of the run's inputs; see `Manifest`.
        schedule: When a checkpoint is due.
        keep: How many checkpoints are kept.
        asked: Whether the run is asked to stop.
        found: The checkpoint to resume from; None starts a new run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: str,
        fingerprint: Mapping[str, str],
        schedule: SaveSchedule,
        keep: int,
        asked: Stopping,
        found: Checkpoint | None = None,
    ) -> None:
        self._folder, self._kind, self._fingerprint = folder, kind, fingerprint
        self._schedule, self._keep, self._asked, self._found = schedule, keep, asked, found
        self._saved_at = found.update if found else None
        self._logs: Sequence[Log] = ()
        self._state: TrainingState | None = None
        self._boundary: tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]] | None = None
        self._is_changing = False
        self.done = found.update if found else 0

    def sync_before_saving(self, *logs: Log) -> None:
        """Force these logs to the disk before each save: a checkpoint never refers to rows that the disk lacks."""
        self._logs = logs

    def restore(self, state: TrainingState) -> None:
        """Checkpoint this state from now on; if the run is resumed, load all of it from the checkpoint.

        Raises:
            DataError: The checkpoint does not fit the run.
        """
        self._state = state
        if self._found is None:
            return
        self._load_weights(state, self._found)
        progress = self._found.state["progress"]
        for name, part in state.parts.items():
            part.load_state_dict(progress[name])
        restore_random_state(self._found.tensors("random"), self._found.state["random"])

    def roll_back(self, *, on_rejected: Callable[[str], None]) -> None:
        """Load weights and optimizer from the newest valid checkpoint; data streams and coefficients stay.

        Args:
            on_rejected: Receives a line for each newer checkpoint that is not valid.

        Raises:
            NumericsError: There is no valid checkpoint.
        """
        assert self._state is not None, "restore first"
        self.begin_changes()
        found = newest_valid(self._folder, on_rejected=on_rejected)
        if found is None:
            raise NumericsError(f"{self._folder} has no valid checkpoint to restore the weights from")
        self._load_weights(self._state, found)

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the remaining steps, from 1; between two steps the run is saved or stopped.

        Raises:
            KeyboardInterrupt, Terminated: The run was asked to stop; it is saved as it is after the last step.
            OutputError: A checkpoint cannot be written.
        """
        self._remember()
        for step in range(self.done + 1, num_steps + 1):
            self._asked.raise_if_requested()
            yield step
            self.done, self._is_changing = step, False
            self._remember()
            if self._schedule.is_due(step) and step < num_steps:
                self.save()
        self._asked.raise_if_requested()

    def begin_changes(self) -> None:
        """Weights change from here to the end of the step: if the run stops before that, the step is discarded."""
        self._is_changing = True

    def save(self) -> None:
        """Save the state after the last complete step, unless it is saved already."""
        if self._state is None or self._boundary is None or self._is_changing or self._saved_at == self.done:
            return
        for log in self._logs:
            log.sync()
        progress, streams, generators = self._boundary
        moments, groups = optimizer_state(self._state.optimizer)
        tensors = {name: module_tensors(module) for name, module in self._state.modules.items()}
        save_checkpoint(
            self._folder,
            update=self.done,
            kind=self._kind,
            fingerprint=self._fingerprint,
            tensors={**tensors, "optimizer": moments, "random": streams},
            state={"optimizer": groups, "random": generators, "progress": progress},
            keep=self._keep,
        )
        self._saved_at = self.done
        self._schedule.saved()

    def __enter__(self) -> CheckpointedLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save an interrupted run, whatever the reason, as it was after its last complete step."""
        if kind is not None and not issubclass(kind, OutputError) and self.done > 0:
            self.save()
        self._state = None  # frees the models now: what they belong to may hold this loop

    def _load_weights(self, state: TrainingState, found: Checkpoint) -> None:
        for name, module in state.modules.items():
            restore_module(module, found.tensors(name))
        restore_optimizer(state.optimizer, found.tensors("optimizer"), found.state["optimizer"])

    def _remember(self) -> None:
        """Keep what changes before the weights do: a discarded step is repeated from here."""
        assert self._state is not None, "restore first"
        progress = {name: part.state_dict() for name, part in self._state.parts.items()}
        self._boundary = (progress, *random_state())


class PlainLoop:
    """The same loop without checkpoints."""

    def __init__(self) -> None:
        self.done = 0

    def restore(self, state: TrainingState) -> None:
        """Nothing is restored."""

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the steps, from 1."""
        for step in range(1, num_steps + 1):
            yield step
            self.done = step

    def begin_changes(self) -> None:
        """Nothing is saved."""

    def save(self) -> None:
        """Nothing is saved."""
