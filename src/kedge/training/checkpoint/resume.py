"""From one step of a run to the next: go on where it was left, save it when that is due, end it when that is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.errors import OutputError
from kedge.training.checkpoint.save_schedule import SaveSchedule
from kedge.training.checkpoint.state import (
    module_tensors,
    optimizer_state,
    random_state,
    restore_module,
    restore_optimizer,
    restore_random_state,
)
from kedge.training.checkpoint.store import Checkpoint, save_checkpoint
from kedge.training.stopping import Stopping

__all__ = ["CHECKPOINTS", "Keeper", "Log", "Resumable", "Unkept"]

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, inside the run's own."""


class Log(Protocol):
    """A file of rows that grows with the run."""

    def sync(self) -> None:
        """Have the disk take every row so far."""
        ...


@dataclass(frozen=True)
class Resumable:
    """All that changes in the course of a run.

    Attributes:
        modules: What is trained, by name.
        optimizer: Of all of it.
        progress: Everything else, in JSON's types: where the data stands, coefficients that adapt.
    """

    modules: Mapping[str, nn.Module]
    optimizer: Optimizer
    progress: Callable[[], dict[str, Any]] = field(default=dict)


class Keeper:
    """Keeps a run: its steps are counted, saved and ended here.

        with Keeper(…) as keeper:
            keeper.restore(Resumable(…))
            for step in keeper.steps(num_steps):
                …
                keeper.weights_change()
                …

    Args:
        folder: Where its checkpoints lie.
        kind: The stage.
        fingerprint: What the run is made from; see `Manifest`.
        schedule: When a checkpoint is due.
        keep: How many checkpoints stay.
        asked: Whether the run is asked to stop.
        found: The checkpoint that it goes on from; None begins anew.
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
        self._run: Resumable | None = None
        self._boundary: tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]] | None = None
        self._is_changing = False
        self.done = found.update if found else 0

    def sync_before_saving(self, *logs: Log) -> None:
        """A checkpoint never knows of rows that the disk does not have."""
        self._logs = logs

    def restore(self, run: Resumable) -> Mapping[str, Any] | None:
        """Keep this run from now on; put it where the newest checkpoint left it.

        Returns:
            What `progress` gave when it was saved; None where there is no checkpoint, and the run begins.

        Raises:
            DataError: The checkpoint does not fit the run.
        """
        self._run = run
        if (found := self._found) is None:
            return None
        for name, module in run.modules.items():
            restore_module(module, found.tensors(name))
        restore_optimizer(run.optimizer, found.tensors("optimizer"), found.state["optimizer"])
        restore_random_state(found.tensors("random"), found.state["random"])
        return found.state["progress"]

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the steps to come, from 1 on; between two of them the run is saved, or ended.

        Raises:
            KeyboardInterrupt, Terminated: The run was asked to stop; it is saved as it stands after the last step.
            OutputError: The disk takes no checkpoint.
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

    def weights_change(self) -> None:
        """From here to the step's end, a run that is stopped is as its last checkpoint has it: half a step is none."""
        self._is_changing = True

    def save(self) -> None:
        """Save the run as it stands after its last whole step, unless that is done already."""
        if self._run is None or self._boundary is None or self._is_changing or self._saved_at == self.done:
            return
        for log in self._logs:
            log.sync()
        progress, streams, generators = self._boundary
        moments, groups = optimizer_state(self._run.optimizer)
        tensors = {name: module_tensors(module) for name, module in self._run.modules.items()}
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

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save a run that ends on its way, for whatever reason, as it was after its last whole step."""
        if kind is not None and not issubclass(kind, OutputError) and self.done > 0:
            self.save()
        self._run = None  # who is asked for its progress may hold this keeper: models are freed now, not some day

    def _remember(self) -> None:
        """What moves before the weights do: a step that is dropped half way is taken again from here."""
        assert self._run is not None, "restore first"
        self._boundary = (self._run.progress(), *random_state())


class Unkept:
    """Stands where a keeper would for a run that nobody keeps: it begins, and ends by itself."""

    def __init__(self) -> None:
        self.done = 0

    def restore(self, run: Resumable) -> None:
        """There is nothing to go on from."""

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the steps, from 1 on."""
        for step in range(1, num_steps + 1):
            yield step
            self.done = step

    def weights_change(self) -> None:
        """Nobody asks."""

    def save(self) -> None:
        """There is nowhere to save to."""
