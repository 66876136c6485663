"""The loop over a run's steps: resumes from the newest checkpoint, saves checkpoints, stops on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.errors import DataError, NumericsError, OutputError
from kedge.output import BEST_FILE, replace_file
from kedge.training.checkpoint.best import BestUpdate
from kedge.training.checkpoint.model_folder import CheckpointModel
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

__all__ = ["CheckpointedLoop", "Log", "PlainLoop", "Stateful", "TrainingState"]


class Stateful(Protocol):
    """State of a run that is saved and restored, besides weights and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Restore a `state_dict`."""
        ...


class Log(Protocol):
    """An append-only log file."""

    def sync(self) -> None:
        """Flush all rows to the disk."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """Everything that changes during a run.

    Attributes:
        modules: The trained modules, by name.
        optimizer: The optimizer of all their parameters.
        parts: Everything else, by name: data streams, coefficients, the guard's history.
    """

    modules: Mapping[str, nn.Module]
    optimizer: Optimizer
    parts: Mapping[str, Stateful] = field(default_factory=dict)


class CheckpointedLoop:
    """Counts a run's steps, saves checkpoints, and stops on request.

        with CheckpointedLoop(…) as loop:
            loop.restore(TrainingState(…))
            for step in loop.steps(num_steps):
                …
                loop.begin_changes()
                …

    Args:
        folder: The folder of the checkpoints.
        kind: The stage.
        fingerprint: Hashes of the run's inputs; see `Manifest`.
        schedule: When to save.
        keep: Number of checkpoints to keep.
        stop: Set by Ctrl-C or SIGTERM.
        found: The checkpoint to resume from; None starts a new run.
        model: The model that each checkpoint contains; None for none.
        best: Tells which update is the best so far; its checkpoint is kept in any case.
        keep_last: Save the state after the last step.
        warn: Prints a line to the user.

    Attributes:
        done: Complete steps.
        ended: Why the run ended before its last step; None if it did not.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: str,
        fingerprint: Mapping[str, str],
        schedule: SaveSchedule,
        keep: int,
        stop: Stopping,
        found: Checkpoint | None = None,
        model: CheckpointModel | None = None,
        best: BestUpdate | None = None,
        keep_last: bool = False,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder, self._kind, self._fingerprint = folder, kind, fingerprint
        self._schedule, self._keep, self._stop, self._found = schedule, keep, stop, found
        self._model, self.best, self._keep_last, self._warn = model, best, keep_last, warn
        self._is_best = False
        self.ended: str | None = None
        self._asked_to_end: str | None = None
        self._saved_at = found.update if found else None
        self._logs: Sequence[Log] = ()
        self._state: TrainingState | None = None
        self._boundary: tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]] | None = None
        self._is_changing = False
        self.done = found.update if found else 0

    def sync_before_saving(self, *logs: Log) -> None:
        """Flush these logs before each save, so that a checkpoint never refers to rows that are not on the disk."""
        self._logs = logs

    def restore(self, state: TrainingState) -> None:
        """Register the state to save; if the run is resumed, restore all of it from the checkpoint.

        Raises:
            DataError: The checkpoint does not fit the run.
        """
        self._state = state
        if self._found is None:
            return
        self._load_weights(state, self._found)
        progress = self._found.state["progress"]
        for name in sorted(state.parts.keys() - progress.keys()):
            raise DataError(f"the checkpoint has no state of {name}: another version of kedge saved it; start anew")
        for name, part in state.parts.items():
            part.load_state_dict(progress[name])
        if self.best is not None and "best" in progress:  # absent in a run that kept no best checkpoint so far
            self.best.load_state_dict(progress["best"])
            self._point_at_best()
        restore_random_state(self._found.tensors("random"), self._found.state["random"])

    def roll_back(self, *, on_rejected: Callable[[str], None]) -> None:
        """Restore weights and optimizer from the newest valid checkpoint; keep data streams and coefficients.

        Args:
            on_rejected: Called with a line for each newer checkpoint that is invalid.

        Raises:
            NumericsError: There is no valid checkpoint.
        """
        assert self._state is not None, "restore first"
        self.begin_changes()
        found = newest_valid(self._folder, on_rejected=on_rejected)
        if found is None:
            raise NumericsError(f"{self._folder} has no valid checkpoint to restore the weights from")
        self._load_weights(self._state, found)

    def steps(self, num_steps: int, until: Callable[[], str | None] = lambda: None) -> Iterator[int]:
        """Yield the numbers of the remaining steps, counted from 1; save or stop between steps.

        Args:
            num_steps: Steps of the whole run.
            until: Called before each step; the run ends early for the reason that it returns, if any.

        Raises:
            KeyboardInterrupt, Terminated: The run was interrupted; the state after the last step is saved.
            OutputError: A checkpoint cannot be written.
        """
        self._remember()
        for step in range(self.done + 1, num_steps + 1):
            self._stop.raise_if_requested()
            if self.done > 0 and (reason := self._asked_to_end or until()) is not None:
                self.ended = reason
                self._warn(f"The run ends after update {self.done}: {reason}.")
                break
            yield step
            self.done, self._is_changing = step, False
            self._remember()
            if self._is_best or (self._schedule.is_due(step) and step < num_steps):
                self.save()
        self._stop.raise_if_requested()
        if self._keep_last and self.done > 0:
            self._save_last()

    def request_end(self, reason: str) -> None:
        """End the run after the current step, for a reason."""
        self._asked_to_end = reason

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note a step's metrics; if they are the best so far, the state after the step is saved and kept."""
        if self.best is None or not self.best.see(step, metrics) or not self.best.is_kept:
            return
        if step == self.done:  # the start
            self.save()
            self._point_at_best()
        else:
            self._is_best = True

    def summary(self) -> dict[str, object]:
        """For `finished.json`: complete steps, why the run ended early, and the best checkpoint."""
        return {
            "updates": self.done,
            **({} if self.ended is None else {"ended": self.ended}),
            **({} if self.best is None or self._kept is None else {"best": self.best.summary()}),
        }

    def begin_changes(self) -> None:
        """Mark the start of the weight changes: if the run stops before the end of the step, the step is discarded."""
        self._is_changing = True

    def save(self) -> None:
        """Save the state after the last complete step, unless it is already saved."""
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
            model=self._model,
            protected=() if self._kept is None else (self._kept,),
        )
        self._saved_at, self._is_best = self.done, False
        self._point_at_best()
        self._schedule.saved()

    def __enter__(self) -> CheckpointedLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After any exception, save the state after the last complete step."""
        if kind is not None and not issubclass(kind, OutputError) and self.done > 0:
            self.save()
        self._state = self._model = None  # frees the models now: their owner may keep a reference to this loop

    def _load_weights(self, state: TrainingState, found: Checkpoint) -> None:
        for name, module in state.modules.items():
            restore_module(module, found.tensors(name))
        restore_optimizer(state.optimizer, found.tensors("optimizer"), found.state["optimizer"])

    def _save_last(self) -> None:
        """Save the final state; the run has succeeded even if the disk has no room for it."""
        try:
            self.save()
        except OutputError as error:
            self._warn(f"{error}; the run cannot be extended")

    def _point_at_best(self) -> None:
        """Write which checkpoint is the best, once it exists."""
        if self.best is not None and self._kept is not None:
            replace_file(self._folder / BEST_FILE, [json.dumps(self.best.summary()).encode()])

    @property
    def _kept(self) -> int | None:
        """The update whose checkpoint is kept as the best."""
        return self.best.update if self.best is not None and self.best.is_kept else None

    def _remember(self) -> None:
        """Copy the state that changes before the weights do: a discarded step is repeated from here."""
        assert self._state is not None, "restore first"
        progress = {name: part.state_dict() for name, part in self._state.parts.items()}
        if self.best is not None:
            progress["best"] = self.best.state_dict()
        self._boundary = (progress, *random_state())


class PlainLoop:
    """The loop without checkpoints."""

    def __init__(self) -> None:
        self.done = 0

    def restore(self, state: TrainingState) -> None:
        """Do nothing."""

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yield the numbers of the steps, from 1."""
        for step in range(1, num_steps + 1):
            yield step
            self.done = step

    def begin_changes(self) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing."""
