"""The loop over a run's steps: resumes from the newest checkpoint, saves checkpoints, stops on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kedge.training.checkpoint.state import Deferred, Log, RunState, Stateful, TrainingState
from kedge.training.runtime import Stopping
from kedge_base.errors import OutputError
from kedge_base.machine.memory import in_phase, is_out_of_memory, release

CHECK_EVERY = 8
"""Steps between two comparisons of the ranks' weights."""


class CheckpointedLoop:
    """Counts a run's steps, saves checkpoints, and stops on request.

    A step is an update: in PPO it has several optimizer steps, in supervised training one.

        with CheckpointedLoop(…) as loop:
            loop.restore(TrainingState(…))
            for step in loop.steps(num_steps):
                …
                loop.begin_changes()
                …

    Args:
        state: Saves and restores the run.
        schedule: When to save.
        stop: Set by Ctrl-C or SIGTERM.
        keep_last: Save the state after the last step.
        warn: Prints a line to the user.

    Attributes:
        done: Complete steps.
        ended: Why the run ended before its last step; None if it did not.
        until: Called after each step; the run ends early for the reason that it returns, if any.
        at_end: Called with the last step's number if the run ends early, before its state is saved.
        record: Called with a step's number once it is complete, and again, with `saved=True`, once its state is saved.
        is_changing: A step has changed weights and is not complete.
        saves_start: Save the state before the first step, so that there is a checkpoint to roll back to.
    """

    def __init__(
        self,
        state: RunState,
        *,
        schedule: SaveSchedule,
        stop: Stopping,
        keep_last: bool = False,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._run_state = state
        self._schedule = schedule
        self._stop = stop
        self._keep_last = keep_last
        self._when_restored: list[Callable[[], object]] = []
        self._warn = warn
        self._is_best = self.is_changing = False
        self._asked_to_end: str | None = None
        self._num_steps: int | None = None
        self.register("end", self, optional=True)
        self.best = state.best
        self.ended: str | None = None
        self.done = state.found.update if state.found else 0
        self.until: Callable[[], str | None] = lambda: None
        self.at_end: Callable[[int], object] = lambda step: None
        self.record: Callable[..., object] = lambda step, saved=False: None
        self.saves_start = False

    def sync_before_saving(self, *logs: Log) -> None:
        """Flush these logs before each save, so that a checkpoint never refers to rows that are not on disk."""
        self._run_state.logs = logs

    def when_restored(self, *do: Callable[[], object]) -> None:
        """Call these functions once the run is restored: before that it can be rejected, and its folder must not
        change.
        """
        self._when_restored += do

    def register(self, name: str, part: Stateful, *, optional: bool = False) -> None:
        """Save a part of the run with every checkpoint; `restore` restores it.

        Args:
            name: Its name in a checkpoint.
            part: The part.
            optional: A checkpoint may lack it, because runs with other settings do not have it.
        """
        self._run_state.parts[name] = part
        if optional:
            self._run_state.optional.add(name)

    def register_ahead(self, ahead: Deferred) -> None:
        """Save work for later steps with every checkpoint; `restore` restores it."""
        self._run_state.ahead = ahead

    def restore(self, state: TrainingState) -> None:
        """Register the state to save; if the run is resumed, restore all of it from the checkpoint.

        Raises:
            DataError: The checkpoint does not fit the run.
        """
        self._run_state.restore(state)
        for do in self._when_restored:
            do()
        self._run_state.point_at_best()

    def roll_back(self, *, on_rejected: Callable[[str], None]) -> None:
        """Restore weights and optimizer from the newest valid checkpoint; keep data streams and coefficients.

        Args:
            on_rejected: Called with a line for each newer checkpoint that is invalid.

        Raises:
            NumericsError: No checkpoint is valid.
        """
        self.is_changing = True  # delays a requested stop, which would save the weights about to be replaced
        self._run_state.restore_weights(on_rejected=on_rejected)

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps, counted from 1; save or stop between steps.

        Raises:
            KeyboardInterrupt, Terminated: The run was interrupted between two steps; the state after the last is saved.
            OutputError: A checkpoint cannot be written.
        """
        if self._num_steps != num_steps:  # a longer run continues
            self._asked_to_end = None
        self._num_steps = num_steps
        self._run_state.remember()
        if 0 < self.done < num_steps:
            self._end_early()
        for step in range(self.done + 1, num_steps + 1):
            self._stop.raise_if_requested()
            if self.ended is not None:
                break
            if step == 1 and self.saves_start:
                self.save()
            yield step
            self.complete(step)
            if step < num_steps and self._end_early():
                self.at_end(step)
                self._run_state.remember()
            if step % CHECK_EVERY == 1:
                self._run_state.check_equal_weights()
            if self._is_best or (
                self._run_state.ranks.first(lambda step=step: self._schedule.is_due(step)) and step < num_steps
            ):
                self.save()
        self._stop.raise_if_requested()
        if self._keep_last and self.done > 0:
            self._save_last()

    def _end_early(self) -> bool:
        """End the run here if there is a reason to; returns whether it ends."""
        self.ended = self._asked_to_end or self.until()
        if self.ended is not None:
            self._warn(f"The run ends after update {self.done}: {self.ended}.")
        return self.ended is not None

    def request_end(self, reason: str) -> None:
        """End the run after the current step, for a reason."""
        self._asked_to_end = reason

    def state_dict(self) -> dict[str, Any]:
        """The reason to end that was given, and the length of the run that it was given for."""
        return {"reason": self._asked_to_end, "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._asked_to_end = state["reason"]
        self._num_steps = state["num_steps"]

    def on_first_rank(self, do: Callable[[], object]) -> None:
        """Let the first rank do something that may end the run; the run then ends on all ranks."""

        def done() -> str | None:
            do()
            return self._asked_to_end

        self._asked_to_end = self._run_state.ranks.first(done)

    def observe(self, step: int, metrics: Mapping[str, float], *, is_start: bool = False) -> None:
        """Record a step's metrics; if they are the best so far, the state after the step is saved and kept.

        Args:
            step: The step.
            metrics: Its metrics.
            is_start: They are those of the weights at the start, after steps without effect if there were any.
        """
        if self.best is None or not self.best.observe(step, metrics) or not self.best.is_kept:
            return
        if is_start:
            self.save()
            self._run_state.point_at_best()
        else:
            self._is_best = True

    def summary(self) -> dict[str, object]:
        """For `finished.json`: complete steps, why the run ended early, and the best checkpoint."""
        return {
            "updates": self.done,
            **({} if self.ended is None else {"ended": self.ended}),
            **({} if self.best is None or self._run_state.kept is None else {"best": self.best.summary()}),
        }

    def begin_changes(self) -> None:
        """Mark the start of the weight changes: if the run stops before the end of the step, the step is discarded.

        As late as possible, right before the optimizer's first step: until then the state after the last complete step
        is intact, so a requested stop takes place here, unless this is the first step and there is nothing to save.

        Raises:
            KeyboardInterrupt, Terminated: The run was interrupted; the state after the last complete step is saved.
        """
        if self.done > 0 and not self.is_changing:
            self._stop.raise_if_requested()
        self.is_changing = True

    def complete(self, step: int) -> None:
        """Mark a step as complete, so that an error from here on does not discard it; its metrics have been seen."""
        is_new = step != self.done
        self.done = step
        self.is_changing = False
        self._run_state.remember()
        if is_new:
            self.record(step)

    @property
    def can_save(self) -> bool:
        """True if the state can be saved after an exception.

        Sharded weights can be gathered only if all ranks are here, that is, after an agreed stop.
        """
        return not self._run_state.ranks.is_sharded or self._stop.was_agreed

    def save(self) -> None:
        """Save the state after the last complete step, unless it is already saved."""
        with self._stop.saving(), in_phase("saving"):
            if self.is_changing or not self._run_state.save(self.done):
                return
            self.record(self.done, saved=True)
        self._is_best = False
        self._schedule.saved()

    def __enter__(self) -> CheckpointedLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After any exception, save the state after the last complete step if it can be saved.

        If memory ran out, the failed step's tensors are freed first, to make room for saving.
        """
        if is_out_of_memory(error):
            release(error)
            self._run_state.drop_gradients()
        if kind is not None and not issubclass(kind, OutputError) and self.done > 0 and self.can_save:
            self.save()
        self._run_state.release()
        self.at_end = self.until = lambda *_: None  # they refer to objects that hold this loop and the models

    def _save_last(self) -> None:
        """Save the final state; the run has succeeded even if the disk has no room for it."""
        try:
            self.save()
        except OutputError as error:
            self._warn(f"{error}; the run cannot be extended")


class PlainLoop:
    """The loop without checkpoints."""

    can_save = True

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


@dataclass(eq=False, kw_only=True)
class SaveSchedule:
    """Decides after each update whether a checkpoint is due; this affects no result.

    Args:
        every: Updates between checkpoints, ≥ 1; None for no such limit.
        every_minutes: Minutes between checkpoints, > 0; None for no such limit.
        clock: A monotonic clock, in seconds.
    """

    every: int | None
    every_minutes: float | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.saved()

    def is_due(self, update: int) -> bool:
        """True if a checkpoint is due after this update, counted from 1."""
        by_count = self.every is not None and update % self.every == 0
        minutes = (self.clock() - self._saved_at) / 60
        return by_count or (self.every_minutes is not None and minutes >= self.every_minutes)

    def saved(self) -> None:
        """Restart the timer after a save."""
        self._saved_at = self.clock()
