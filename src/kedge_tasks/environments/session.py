"""Runs episodes of one environment class in this process: many at a time, each on its own instance.

It is also the module that an environment's worker process runs.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any, TypeAlias

from kedge_base.environment_turn import EnvironmentTurn
from kedge_base.errors import EnvError, RunEnded
from kedge_base.generators import seed_generators, seeded
from kedge_base.importing import find_named
from kedge_base.machine.invocation import loading_user_code
from kedge_base.texts import place_of, traceback_text, typed_error_text
from kedge_base.workers.event_loop import event_loop
from kedge_base.workers.serving import serve
from kedge_tasks.environments.agent import Agent, is_agent
from kedge_tasks.environments.endpoint import Endpoint
from kedge_tasks.environments.openenv import PREFIX, find_served
from kedge_tasks.environments.shapes import Game, ToolUser, adapter_of

_Adapter: TypeAlias = Game | ToolUser | Agent


class Session:
    """The episodes of an environment.

    Args:
        kind: A class without arguments, or a function that makes an environment.
        name: Its name in errors.
        timeout: Seconds that one call may take; None for no limit, as in the user's own process.
        temperature: The temperature that an agent's requests may name; None for none.

    Raises:
        EnvError: It is not an environment.
    """

    def __init__(
        self,
        kind: Callable[..., Any],
        name: str,
        timeout: float | None = None,
        temperature: float | None = 1.0,
    ) -> None:
        self._endpoint: Endpoint | None = None
        with seeded(0), _one_line_errors(name):
            if is_agent(kind):
                self._endpoint = endpoint = event_loop().run(Endpoint(temperature).start())
                self._make = lambda: Agent(kind, name, endpoint)
            else:
                self._make = _adapter(kind, name)
            first = self._make()
        self.name = name
        self._timeout = timeout
        self._has_reset = first.has_reset
        self._free: list[_Adapter] = [first] * first.has_reset
        self._episodes: dict[int, tuple[_Adapter, Iterator[int]]] = {}  # with the seeds of its calls
        self.tools = first.tools
        self.is_async = first.is_async
        self.is_scored = not isinstance(first, ToolUser) or first.is_scored

    def describe(self) -> dict[str, Any]:
        """Describe the tools, and say whether calls run concurrently and episodes have rewards."""
        return {
            "tools": [*map(dict, self.tools.schemas)] if self.tools else [],
            "is_async": self.is_async,
            "is_scored": self.is_scored,
        }

    def call(self, what: str, episodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Call a method in several episodes, concurrently if the environment is async.

        Args:
            what: `open` (with `row` and `seed`), `step` (with `text`, and more for agents) or `finish`.
            episodes: For each episode, its number `episode` and the arguments.

        Returns:
            The `EnvironmentTurn` of each episode as a mapping. If the environment raised, or returned something else, a
            mapping with the error's line in `failed`, and its `traceback`.
        """
        with seeded(0):  # each call is seeded separately; this restores the run's own generators
            if not self.is_async:
                return [self._without_waiting(self._guarded(what, **episode)) for episode in episodes]

            async def together() -> list[dict[str, Any]]:
                return await asyncio.gather(*(self._guarded(what, **episode) for episode in episodes))

            return event_loop().run(together())

    def close(self) -> None:
        """End the endpoint of agents, and with it their requests."""
        if self._endpoint is not None:
            event_loop().run(self._endpoint.close())

    def _without_waiting(self, call: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Run a call of plain methods in this thread, where signals interrupt it and no event loop is needed."""
        try:
            call.send(None)
        except StopIteration as result:
            return result.value
        finally:
            call.close()
        raise EnvError(f"{self.name} returns something to be awaited; declare its methods with async def")

    async def _guarded(self, what: str, episode: int, **arguments: Any) -> dict[str, Any]:
        try:
            with _one_line_errors(self.name):
                if what == "open":
                    self._begin(episode, arguments["seed"])
                turn = await self._within_limit(what, episode, arguments)
        except EnvError as error:
            if episode in self._episodes:
                self._end(episode, reuse=False)  # its environment is in an unknown state
            return {"failed": str(error), "traceback": traceback_text(error)}
        if turn.ending is not None:
            self._end(episode, reuse=turn.ending != "timeout")
        return asdict(turn)

    def _begin(self, episode: int, seed: int) -> None:
        if episode in self._episodes:  # a restart
            self._end(episode)
        if not self._free:  # a reused instance must not depend on its first episode, which a resumed run skips
            seed_generators(0 if self._has_reset else seed)
            self._free.append(self._make())
        self._episodes[episode] = self._free.pop(), count(seed)

    def _end(self, episode: int, *, reuse: bool = True) -> None:
        environment, _ = self._episodes.pop(episode)
        if isinstance(environment, Agent):
            environment.close()
        if reuse and environment.has_reset:
            self._free.append(environment)

    async def _within_limit(self, what: str, episode: int, arguments: Mapping[str, Any]) -> EnvironmentTurn:
        """Make one call within the time limit; a late answer to a step ends the episode."""
        environment, seeds = self._episodes[episode]

        async def begun() -> EnvironmentTurn:
            seed_generators(next(seeds))  # only at the start, because concurrent calls share the generators
            return await getattr(environment, what)(**arguments)

        try:
            if not self.is_async:
                with _deadline(self._timeout):
                    return await begun()
            task = asyncio.ensure_future(begun())
            try:
                if not (await asyncio.wait([task], timeout=self._timeout))[0]:
                    raise _TimeLimit
                return task.result()
            finally:
                task.cancel()
                del task  # a cycle with its error's traceback, which would keep a failed environment
        except _TimeLimit:
            if what == "step" or (what == "finish" and self._endpoint is not None):
                return EnvironmentTurn(ending="timeout")
            raise


class _TimeLimit(BaseException):
    """Raised in a call that exceeds its limit; not an `Exception`, so that the environment does not catch it."""


@contextmanager
def _deadline(seconds: float | None) -> Iterator[None]:
    """Interrupt the block after some seconds; works in the main thread, and not in the middle of a call in C."""
    if seconds is None:
        yield
        return

    def interrupt(*_: object) -> None:
        raise _TimeLimit

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _adapter(kind: Callable[[], Any], name: str) -> Callable[[], _Adapter]:
    """See `adapter_of`. Instances are made in the event loop, to which an async class's clients belong."""

    async def in_loop() -> Callable[[], _Adapter]:
        return adapter_of(kind, name)

    is_async = bool(inspect.getmembers(kind, inspect.iscoroutinefunction))
    return event_loop().run(in_loop()) if is_async else adapter_of(kind, name)


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Convert any exception of user code into one line with its location."""
    try:
        yield
    except (EnvError, RunEnded):
        raise
    except _TimeLimit as error:
        raise EnvError(f"{name} took longer than its limit to open or end an episode (environment.timeout)") from error
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise EnvError(f"{name} raised {typed_error_text(error)} ({place_of(error)})") from error


def main(descriptor: int, tie: int) -> None:
    """Answer requests until the connection closes.

    Args:
        descriptor: The worker's end of the connection, an open file descriptor.
        tie: The reading end of a pipe that closes when kedge ends.
    """
    sessions: list[Session] = []

    def load(spec: str, name: str, timeout: float, temperature: float | None) -> dict[str, Any]:
        seed_generators(0)  # for draws while its module is imported
        is_served = spec.startswith(PREFIX)
        kind = find_served(spec) if is_served else find_named(spec, word="environment", error=EnvError)
        sessions.append(Session(kind, name, timeout, temperature))
        return sessions[0].describe()

    def call(what: str, episodes: Sequence[Mapping[str, Any]]) -> list[Any]:
        return sessions[0].call(what, episodes)

    with loading_user_code():
        serve(descriptor, tie, {"load": load, "call": call}, error=EnvError)
