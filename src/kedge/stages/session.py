"""A run that stays open between calls of its owner, such as those of a notebook's cells."""

from __future__ import annotations

import atexit
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from kedge.errors import ConfigError, DataError, KedgeError, RewardError
from kedge.logs.progress import say
from kedge.runs.run import Run
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.runtime import default_modes
from kedge.training.stopping import Stopping, listening

P = ParamSpec("P")
T = TypeVar("T")

LISTS = ("prompts", "responses", "scores")
"""Arguments with an entry per prompt or response."""


class _NoUpdate(KedgeError):
    """Raised to discard a run that made no update."""


@dataclass(eq=False)
class Session:
    """A run that is open between calls. It keeps no reference to its owner.

    Attributes:
        run: The run.
        loop: Its loop.
        stop: Set by signals during a call.
        num_updates: Updates of the whole run.
        contexts: The contexts that the run is open in; they save and end it.
        variables: The variables that they set. A notebook runs every cell in another context, and they have to be
            reset in the same one.
        process: The process that trains; a fork of it leaves the run alone.
        is_open: The run has not ended.
        closed_by: Why it was closed, for errors; empty if the owner closed it.
    """

    run: Run
    loop: CheckpointedLoop
    stop: Stopping
    num_updates: int
    contexts: ExitStack
    variables: Context
    process: int = field(default_factory=os.getpid)
    is_open: bool = True
    closed_by: str = ""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.shared_folder

    def close_with(self, owner: object) -> None:
        """Close the run when nothing refers to its owner any more, or when the interpreter ends."""
        self._forgotten: weakref.finalize[Any, Any] = weakref.finalize(owner, self._close_forgotten)
        # Finalizers run at the end after functions that are registered later, such as for the folders of other ranks.
        self._forgotten.atexit = False
        atexit.register(self._forgotten)

    def check_usable(self) -> None:
        """Check that the run is open, and in this process (`ConfigError` if not)."""
        if not self.is_open:
            raise ConfigError(f"the trainer of {self.folder} is closed{self.closed_by}; open another with resume=True")
        if self.process != os.getpid():
            raise ConfigError(f"process {self.process} trains in {self.folder}, and a fork of it cannot")

    def call(self, do: Callable[[], T]) -> T:
        """The result of a function that uses the models.

        A signal ends it: in a single process at once, unless that would leave something half done. Nothing of the
        signal is left for the next call. An error that comes after an update has changed weights closes the run: the
        update is discarded.
        """
        try:
            return self.variables.run(self._interruptible, do)
        except BaseException as error:
            if self.loop.is_changing:
                self.closed_by = f" after an error in update {self.loop.done + 1}"
                self.close(error)
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

    def close(self, error: BaseException | None = None) -> None:
        """Save the run and end it, once, and not in a fork.

        Args:
            error: The error that ends it; None if its owner does.
        """
        if not self.is_open or self.process != os.getpid():
            return
        self.is_open = False
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
            say("No update was made, so no run is left.")
        finally:
            if self.loop.done:
                self._say_ending(is_whole=is_whole)

    @default_modes()
    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.contexts.__exit__(type(error), error, error.__traceback__)
            return
        with self.contexts:  # which also ends the run if it cannot be saved
            if not self.loop.done:
                raise _NoUpdate("no update was made")
            if self.loop.done < self.num_updates and self.loop.ended is None:
                self.loop.ended = "the loop ended it"
            self.loop.save()

    def _say_ending(self, *, is_whole: bool) -> None:
        if not is_whole or self.loop.done < self.num_updates:
            say(f"Resume: the same loop with kedge.PpoTrainer(..., out={str(self.folder)!r}, resume=True)")
        if is_whole:
            say(f"Model:  {self.folder / 'model'}")

    def _close_forgotten(self) -> None:
        try:
            self.close()
        except KedgeError as error:  # which no caller gets
            say(f"error: {error}")
        if self.process != os.getpid():
            _keep_forever(self.contexts)


class Owner(Protocol):
    """An object with a session."""

    @property
    def _session(self) -> Session: ...


OwnerT = TypeVar("OwnerT", bound=Owner)


def session_call(method: Callable[Concatenate[OwnerT, P], T]) -> Callable[Concatenate[OwnerT, P], T]:
    """Decorate a method of an owner that uses the models: it runs in the session, with the lists of the first rank."""
    declared = signature(method)
    kinds = {name: each.kind for name, each in declared.parameters.items() if name != "self"}
    places = [
        "[…]" if name in LISTS else name for name, kind in kinds.items() if kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    example = f"{method.__name__}({', '.join(places)})"

    @wraps(method)
    def call(self: OwnerT, *args: P.args, **arguments: P.kwargs) -> T:
        session = self._session
        session.check_usable()
        bound = declared.bind(self, *args, **arguments)
        lists = {name: bound.arguments[name] for name in LISTS if bound.arguments.get(name) is not None}
        # Outside of the session, because what makes them may call the trainer.
        bound.arguments |= session.run.ranks.first(
            lambda: {name: _listed(name, each, example) for name, each in lists.items()}
        )
        return session.call(partial(method, *bound.args, **bound.kwargs))

    return call


def _listed(name: str, given: Any, call: str) -> list[Any]:
    """A list that a caller passes; a text or row in its place would be taken apart into characters or keys.

    Raises:
        DataError: It is one text, row or number, has no order, or cannot be iterated over; `RewardError` for scores.
    """
    is_one = isinstance(given, (str, bytes, Mapping, Set)) or not getattr(given, "ndim", 1)
    if is_one or not isinstance(given, Iterable):
        kind = RewardError if name == "scores" else DataError
        raise kind(f"{name} are a {type(given).__name__}; pass a list: {call}")
    return list(cast("Iterable[Any]", given))


def _keep_forever(contexts: ExitStack) -> None:
    """Keep the interpreter from closing the contexts of a parent's run where a fork of it ends.

    It frees everything at its end, and a context that is freed is left as by an error.
    """
    kept: list[Any] = [contexts]
    kept.append(kept)  # a cycle, which the garbage collector alone would free
    gc.freeze()  # it takes no part in any collection from here on
