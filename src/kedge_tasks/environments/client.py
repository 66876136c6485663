"""Runs environments in a worker process: one that hangs, crashes or prints does not disturb training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge_base.environment_turn import EnvironmentTurn
from kedge_base.errors import DataError, EnvError
from kedge_base.texts import error_text
from kedge_base.workers.log import CallLog
from kedge_base.workers.process import Request, WorkerError, WorkerProcess
from kedge_tasks.environments.openenv import PREFIX
from kedge_tasks.environments.session import Session
from kedge_tasks.environments.tools import Tools

STARTUP_SECONDS = 120.0
GRACE = 5.0
"""Seconds after a call's limit at which a process that could not be interrupted is killed."""
PAUSE = 1.0
"""Seconds to wait before another attempt to open an episode."""


class Environment:
    """Episodes of an environment.

    Args:
        source: `path/to/file.py:Class`, `package.module:Class` or `openenv:URL`, which runs in a worker process; or the
            class itself, or a function that makes an environment, which runs in this process and cannot be interrupted.
            Instead of a class, a function of a row and a client: see `agent`.
        timeout: Seconds that one call of an episode may take. Longer calls end the episode, or the run if they cannot
            be interrupted.
        log: The file for its output; None discards it.
        temperature: The temperature that an agent's requests may name; None for none.

    Attributes:
        failure: The message about the last failed call.

    Raises:
        EnvError: The environment cannot be imported, or is not one.
    """

    failure = ""

    def __init__(
        self,
        source: str | Callable[..., Any],
        *,
        timeout: float = 30.0,
        log: Path | None = None,
        temperature: float | None = 1.0,
    ) -> None:
        if not isinstance(source, str):
            self.name = getattr(source, "__name__", type(source).__name__)
        else:
            self.name = "openenv" if source.startswith(PREFIX) else source.rpartition(":")[2]
        self._timeout = timeout
        self._lock = threading.Lock()  # responses may be sampled ahead in another thread
        self._log = CallLog(log, self.name)
        self._worker: WorkerProcess | None = None
        if isinstance(source, str):
            self._settings = {"spec": source, "name": self.name, "timeout": timeout, "temperature": temperature}
            about = self._started()
        else:
            self._session = Session(source, self.name, temperature=temperature)
            about = self._session.describe()
        self.tools = Tools(about["tools"]) if about["tools"] else None
        self._is_async: bool = about["is_async"]
        self.is_scored: bool = about["is_scored"]

    def open(self, episodes: Mapping[int, tuple[Mapping[str, Any], int]]) -> dict[int, EnvironmentTurn | None]:
        """Start or restart episodes. One that fails is tried again on another instance, after a pause.

        Args:
            episodes: The row of the data and a seed, by the episode's number.

        Returns:
            For each, the messages that follow the row's prompt, and privileged information; None for one that failed.

        Raises:
            EnvError: The process ended, or could not be interrupted; also raised by the other methods.
            DataError: A row has a value that cannot be sent to another process.
        """
        arguments = {number: {"row": dict(row), "seed": seed} for number, (row, seed) in episodes.items()}
        turns = self._call("open", arguments)
        if failed := [number for number, turn in turns.items() if turn.ending == "failed"]:
            time.sleep(PAUSE)
            turns |= self._call("open", {number: arguments[number] for number in failed})
        return _successful(turns)

    def tools_of(self, schemas: Sequence[Mapping[str, Any]]) -> Tools:
        """The tools with some JSON schemas."""
        return Tools(schemas)

    def step(self, said: Mapping[int, str | Mapping[str, Any]]) -> dict[int, EnvironmentTurn]:
        """Send a turn of the policy to each of some episodes; return the replies. A failure ends the episode.

        Args:
            said: The turn's text; or its `text`, `num_tokens` sampled, `num_read` before it, and whether it
                `is_complete`.
        """
        return self._call(
            "step", {number: {"text": turn} if isinstance(turn, str) else turn for number, turn in said.items()}
        )

    def finish(self, episodes: Iterable[int]) -> dict[int, EnvironmentTurn | None]:
        """End episodes early; return the rewards of each beyond those of its turns, or None for a failure."""
        return _successful(self._call("finish", {number: {} for number in episodes}))

    def close(self) -> None:
        """End the worker process, or an agent's episodes in this process."""
        if self._worker is not None:
            self._worker.close()
        else:
            self._session.close()

    def _started(self) -> Any:
        """Start the worker process; return its description of the environment."""
        self._worker = WorkerProcess("kedge_tasks.environments.session", self._log)
        load = Request.of(self.name, "load", **self._settings)
        [about] = self._replies([load], STARTUP_SECONDS, "importing its module")
        return about

    def _call(self, what: str, episodes: Mapping[int, Mapping[str, Any]]) -> dict[int, EnvironmentTurn]:
        """See `Session.call`."""
        if not episodes:
            return {}
        calls = [{"episode": number, **arguments} for number, arguments in episodes.items()]
        with self._lock:
            results = self._session.call(what, calls) if self._worker is None else self._send(what, calls)
            return dict(zip(episodes, map(self._turn, results), strict=True))

    def _send(self, what: str, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Make the worker process run some calls; return their results."""
        assert self._worker is not None
        if what == "open" and not self._worker.is_running:
            self._started()  # an earlier call failed or was interrupted, and the caller went on
        # One request per call, so that each has its own deadline, unless the calls run concurrently.
        parts = [calls] if self._is_async else [[call] for call in calls]
        try:
            requests = [Request.of(self.name, "call", what=what, episodes=part) for part in parts]
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"the prompts have a value that cannot be sent to the process of {self.name} ({error_text(error)}); "
                "remove it, or pass the class as a Python object"
            ) from error
        replies = self._replies(requests, self._timeout + GRACE, "a call")
        return [result for results in replies for result in results]

    def _turn(self, result: Mapping[str, Any]) -> EnvironmentTurn:
        """Convert a result to a turn; log an error of the environment, and return a failed turn."""
        if "failed" not in result:
            return EnvironmentTurn(**result)
        self.failure = result["failed"]
        self._log.end(*result["traceback"].splitlines(), f"[{self.failure}]")
        return EnvironmentTurn(ending="failed")

    def _replies(self, requests: Sequence[Request], seconds: float, doing: str) -> list[Any]:
        assert self._worker is not None
        try:
            self._worker.send(*requests, seconds=seconds)
            return [self._worker.reply(request, seconds, doing) for request in requests]
        except BaseException as error:  # includes Ctrl-C: an abandoned call leaves its episodes in an unknown state
            self._worker.kill()
            if isinstance(error, WorkerError):
                raise EnvError(str(error)) from error
            raise


def _successful(turns: Mapping[int, EnvironmentTurn]) -> dict[int, EnvironmentTurn | None]:
    """Return the turns of some episodes, with None for those that failed."""
    return {number: None if turn.ending == "failed" else turn for number, turn in turns.items()}
