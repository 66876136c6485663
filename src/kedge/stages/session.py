"""A run that stays open between its owner's calls, such as those in a notebook's cells."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kedge.data.records import table_rows
from kedge.runs.run import Run
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.runtime import Stopping, default_modes, listening
from kedge_base.errors import ConfigError, DataError, KedgeError, RewardError
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import is_run

P = ParamSpec("P")
T = TypeVar("T")

LISTS = ("prompts", "responses", "scores")
"""Arguments with one entry per prompt or response."""


class _NoUpdate(KedgeError):
    """Raised to discard a run that made no update."""


@dataclass(eq=False)
class Session:
    """A run that stays open between calls. It holds no reference to its owner.

    Attributes:
        run: The run.
        loop: Its loop.
        stop: Set by signals during a call.
        num_updates: Updates of the whole run.
        contexts: The contexts in which the run is open; closing them saves and ends the run.
        variables: The context variables that they set, which must be reset in the same context; a notebook runs every
            cell in another one.
        process: The process that trains; forks of it do not touch the run.
        closed_by: The reason for closing, for errors, empty if the owner closed it; None if the run is open.
    """

    run: Run
    loop: CheckpointedLoop
    stop: Stopping
    num_updates: int
    contexts: ExitStack
    variables: Context
    process: int = field(default_factory=os.getpid)
    closed_by: str | None = None
    _calling: threading.Lock = field(default_factory=threading.Lock)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.shared_folder

    def close_with(self, owner: object) -> None:
        """Close the run when its owner is garbage-collected or the interpreter exits."""
        self._forgotten: weakref.finalize[Any, Any] = weakref.finalize(owner, self._close_forgotten)
        # Finalizers run at exit after functions that were registered later, such as those for the folders of other
        # ranks.
        self._forgotten.atexit = False
        atexit.register(self._forgotten)

    def check_usable(self) -> None:
        """Check that the run is open, in this process, and not in a call already (`ConfigError` if not)."""
        if self.closed_by is not None:
            raise ConfigError(f"the trainer of {self.folder} is closed{self.closed_by}; open another with resume=True")
        if self.process != os.getpid():
            raise ConfigError(f"process {self.process} trains in {self.folder}, and a fork of it cannot")
        if self._calling.locked():
            raise ConfigError(
                f"a call of the trainer of {self.folder} has not returned yet; on_update, rewards and other threads "
                "cannot use the trainer meanwhile"
            )

    def call(self, do: Callable[[], T]) -> T:
        """Call a function that uses the models.

        A signal ends it: in a single process at once, unless that would leave something half done. The signal does not
        affect the next call. An error that comes after an update has changed weights closes the run: the update is
        discarded.
        """
        try:
            with self._calling:
                return self.variables.run(self._interruptible, do)
        except BaseException as error:
            if self.loop.is_changing:
                self.close(error, f" after an error in update {self.loop.done + 1}")
            raise

    @default_modes()
    def _interruptible(self, do: Callable[[], T]) -> T:
        try:
            with listening(self.stop):
                self.stop.at_once = True
                result = do()
            self.stop.raise_if_requested()
            return result
        finally:
            self.stop.forget()

    def close(self, error: BaseException | None = None, why: str = "") -> None:
        """Save and end the run, only once, and never in a fork.

        Args:
            error: The error that ends it; None if its owner does.
            why: The reason, for errors of later calls.

        Raises:
            ConfigError: A call is in progress.
        """
        if self.closed_by is not None or self.process != os.getpid():
            return
        self.check_usable()
        self.closed_by = why
        self._forgotten.detach()
        atexit.unregister(self._forgotten)
        is_whole = False
        try:
            with listening(self.stop):
                self.variables.run(self._end, error)
            if error is None:
                self.stop.raise_if_requested()
                is_whole = True
        except _NoUpdate:
            if not is_run(self.folder):  # unless the start was measured
                say("No update was made, so no run is left.")
        finally:
            if self.loop.done and not (is_whole and self.loop.done >= self.num_updates):
                say(f"Resume: the same loop with kedge.PpoTrainer(..., out={str(self.folder)!r}, resume=True)")
            if is_whole:
                say(f"Model:  {self.folder / 'model'}")

    @default_modes()
    def _end(self, error: BaseException | None) -> None:
        if error is not None and self.loop.done:
            self.contexts.__exit__(type(error), error, error.__traceback__)
            return
        with self.contexts:  # ends the run even if it cannot be saved
            if not self.loop.done:
                raise _NoUpdate
            if self.loop.done < self.num_updates and self.loop.ended is None:
                self.loop.ended = "the loop ended it"
            self.loop.save()

    def _close_forgotten(self) -> None:
        try:
            self.close()
        except KedgeError as error:  # no caller could catch the error
            say(f"error: {error}")
        if self.process != os.getpid():
            _keep_forever(self.contexts)


def session_call(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Decorate a method that uses the models: it runs in its owner's `_session`, with the lists of the first rank.

    If it fails, even at its very end, the next call draws the same prompts and random numbers again.
    """
    declared = signature(method)
    places = [
        "[…]" if name in LISTS else name
        for name, each in declared.parameters.items()
        if name != "self" and each.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    example = f"{method.__name__}({', '.join(places)})"

    @wraps(method)
    def call(self: Any, *args: P.args, **arguments: P.kwargs) -> T:
        session: Session = self._session
        session.check_usable()
        bound = declared.bind(self, *args, **arguments)
        lists = {name: bound.arguments[name] for name in LISTS if bound.arguments.get(name) is not None}
        # Outside of the session, because an iterable may call the trainer.
        bound.arguments |= session.run.ranks.first(
            lambda: {name: _listed(name, each, example) for name, each in lists.items()}
        )
        drawn = self._drawn()
        try:
            return session.call(partial(method, *bound.args, **bound.kwargs))
        except BaseException:
            self._draw_again(*drawn)
            raise

    return call


def _listed(name: str, given: Any, call: str) -> list[Any]:
    """Convert an argument to a list; a single text or row is rejected, as it would be split into characters or keys.

    Raises:
        DataError: The argument is a single text, row or number, is unordered, or is not iterable; `RewardError` for
            scores.
    """
    is_one = isinstance(given, (str, bytes, Mapping, Set)) or not getattr(given, "ndim", 1)
    if is_one or not isinstance(given, Iterable):
        raise (RewardError if name == "scores" else DataError)(
            f"{name} are of type {type(given).__name__}; pass a list: {call}"
        )
    return list(table_rows(given, name))


def _keep_forever(contexts: ExitStack) -> None:
    """Keep the interpreter from closing the contexts of a parent's run when a fork exits.

    It frees all objects at exit, and freeing a context exits it as an error would.
    """
    kept: list[Any] = [contexts]
    kept.append(kept)  # a cycle, which only the garbage collector could free
    gc.freeze()  # from here on, no collection considers it
