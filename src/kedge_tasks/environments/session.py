"""Episodes of one environment class, in this process: many at a time, each on its own instance.

Also the worker process of an environment, which has one.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from kedge_base.errors import EnvError, RunEnded
from kedge_base.generators import seed_generators, seeded
from kedge_base.importing import find_named
from kedge_base.machine.invocation import loading_user_code
from kedge_base.texts import place_of, traceback_text, typed_error_text
from kedge_base.workers.event_loop import event_loop
from kedge_base.workers.serving import serve
from kedge_tasks.environments.openenv import PREFIX, find_served
from kedge_tasks.environments.shapes import Game, ToolUser, Turn, adapter_of


class Session:
    """The episodes of an environment.

    Args:
        kind: A class without arguments, or a function that makes an environment.
        name: Its name in errors.
        timeout: Seconds that one call may take; None for no limit, as in the user's own process.

    Raises:
        EnvError: It is not an environment.
    """

    def __init__(self, kind: Callable[[], Any], name: str, timeout: float | None = None) -> None:
        with seeded(0):
            self._make = _adapter(kind, name)
            with _one_line_errors(name):
                first = self._make()
        self.name = name
        self._timeout = timeout
        self._has_reset = first.has_reset
        self._free: list[Game | ToolUser] = [first] * first.has_reset
        self._playing: dict[int, Game | ToolUser] = {}
        self._turns: dict[int, tuple[int, int]] = {}
        self.tools = first.tools
        self.is_async = first.is_async

    def describe(self) -> dict[str, Any]:
        """Describe the tools, and say whether calls run concurrently."""
        schemas = () if self.tools is None else self.tools.schemas
        return {"tools": [dict(schema) for schema in schemas], "is_async": self.is_async}

    def call(self, what: str, episodes: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Do something in several episodes; those of async environments run concurrently.

        Args:
            what: `open` (with `row` and `seed`), `step` (with `text`) or `finish`.
            episodes: For each, its number `episode` and the arguments.

        Returns:
            For each, the messages that open it; the `Turn` as a mapping; or the reward. Where the environment raised,
            or returned something else, a mapping with the line in `failed`, and its traceback.
        """
        calls = [self._guarded(what, **episode) for episode in episodes]
        with seeded(0):  # each call is seeded for itself; the run's own generators are restored
            if not self.is_async:
                return [self._alone(call) for call in calls]

            async def together() -> list[Any]:
                return await asyncio.gather(*calls)

            return event_loop().run(together())

    async def _guarded(self, what: str, episode: int, **arguments: Any) -> Any:
        try:
            with _one_line_errors(self.name):
                return await self._one(what, episode, **arguments)
        except EnvError as error:
            self._forget(episode)
            return {"failed": str(error), "traceback": traceback_text(error)}

    async def _one(self, what: str, episode: int, **arguments: Any) -> Any:
        match what:
            case "open":
                return await self._open(episode, **arguments)
            case "step":
                return await self._step(episode, **arguments)
            case _:
                reward = await self._run(episode, self._playing[episode].finish())
                self._end(episode)
                return reward

    async def _open(self, episode: int, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        if episode in self._playing:  # it starts again
            self._end(episode)
        if not self._free:  # nothing of an instance for many episodes may depend on the first: a resumed run skips it
            seed_generators(0 if self._has_reset else seed)
            self._free.append(self._make())
        self._playing[episode] = self._free.pop()
        self._turns[episode] = (seed, 0)
        return await self._run(episode, self._playing[episode].open(row, seed))

    async def _step(self, episode: int, text: str) -> dict[str, Any]:
        try:
            turn = await self._run(episode, self._playing[episode].step(text))
        except _Late:
            self._forget(episode)
            return asdict(Turn(ending="timeout"))
        if turn.ending is not None:
            self._end(episode)
        return asdict(turn)

    async def _run(self, episode: int, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call, within the time limit."""

        async def begun() -> Any:
            seed, turn = self._turns[episode]
            self._turns[episode] = (seed, turn + 1)
            seed_generators(seed + turn)  # where it starts: calls that run at the same time share the generators
            return await call

        if not self.is_async:
            with _deadline(self._timeout):
                return await begun()
        task = asyncio.ensure_future(begun())
        try:
            done, _ = await asyncio.wait([task], timeout=self._timeout)
            if not done:
                raise _Late
            return task.result()
        finally:
            task.cancel()

    def _end(self, episode: int) -> None:
        environment = self._playing.pop(episode)
        if environment.has_reset:
            self._free.append(environment)
        del self._turns[episode]

    def _forget(self, episode: int) -> None:
        """Leave an episode whose environment is in an unknown state."""
        self._playing.pop(episode, None)
        self._turns.pop(episode, None)

    def _alone(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a call that never waits."""
        try:
            call.send(None)
        except StopIteration as result:
            return result.value
        finally:
            call.close()
        raise EnvError(f"{self.name} returns something to be awaited; declare its methods with async def")


class _Late(BaseException):
    """A call has exceeded its limit; no `except Exception` of the environment stops it."""


@contextmanager
def _deadline(seconds: float | None) -> Iterator[None]:
    """Interrupt the block after some seconds; works in the main thread, and not in the middle of a call in C."""
    if seconds is None:
        yield
        return

    def interrupt(*_: object) -> None:
        raise _Late

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _adapter(kind: Callable[[], Any], name: str) -> Callable[[], Game | ToolUser]:
    """See `adapter_of`. What a class with async methods makes for itself, such as a client, needs their event loop."""

    async def in_loop() -> Callable[[], Game | ToolUser]:
        with _one_line_errors(name):
            return adapter_of(kind, name)

    if inspect.getmembers(kind, inspect.iscoroutinefunction):
        return event_loop().run(in_loop())
    with _one_line_errors(name):
        return adapter_of(kind, name)


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Convert any exception of user code into one line with the place."""
    try:
        yield
    except (EnvError, RunEnded):
        raise
    except _Late as error:
        raise EnvError(f"{name} took longer than its limit to open or end an episode (environment.timeout)") from error
    except (Exception, SystemExit) as error:
        raise EnvError(f"{name} raised {typed_error_text(error)} ({place_of(error)})") from error


def main(descriptor: int, tie: int) -> None:
    """Answer requests until the connection closes.

    Args:
        descriptor: The worker's end of the connection, an open file descriptor.
        tie: The reading end of a pipe that closes when kedge ends.
    """
    sessions: list[Session] = []

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        """The result of a request, or its error."""
        try:
            if request["do"] == "load":
                spec = request["spec"]
                is_served = spec.startswith(PREFIX)
                seed_generators(0)  # for what its module draws
                kind = find_served(spec) if is_served else find_named(spec, word="environment", error=EnvError)
                sessions.append(Session(kind, request["name"], request["timeout"]))
                return {"id": request["id"], "result": sessions[0].describe()}
            return {"id": request["id"], "result": sessions[0].call(request["do"], request["episodes"])}
        except BaseException as error:  # user code can raise anything
            text = str(error) if isinstance(error, EnvError) else f"{request['name']} raised {type(error).__name__}"
            return {"id": request["id"], "error": text, "traceback": traceback_text(error)}

    with loading_user_code():
        serve(descriptor, tie, reply)
