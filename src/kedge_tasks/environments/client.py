"""Environments in a worker process: one that hangs, crashes or prints does not harm the training."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kedge_base.errors import DataError, EnvError
from kedge_base.texts import error_text
from kedge_base.workers.codec import decode, encode
from kedge_base.workers.log import CallLog
from kedge_base.workers.process import WorkerEnded, WorkerProcess, WorkerTimeout
from kedge_tasks.environments.openenv import PREFIX
from kedge_tasks.environments.session import Session
from kedge_tasks.environments.shapes import Turn
from kedge_tasks.environments.tools import Tools

STARTUP_SECONDS = 120.0
GRACE = 5.0
"""Seconds after a call's limit at which its process is killed: it could not be interrupted."""
FAILED: dict[str, Any] = {"ending": "failed"}
"""A turn whose answer could not be had."""
PAUSE = 1.0
"""Seconds before an episode that could not be opened is opened again."""


class Environment:
    """Episodes of an environment.

    Args:
        given: `path/to/file.py:Class`, `package.module:Class` or `openenv:URL`, which runs in a worker process; or the
            class itself, or a function that makes an environment, which runs in this process and cannot be interrupted.
        timeout: Seconds that one call of an episode may take. Longer ones end the episode, or the run where they cannot
            be interrupted.
        log: The file for its output; None discards it.

    Attributes:
        failure: The line about the last call that failed.

    Raises:
        EnvError: It cannot be imported, or is not an environment.
    """

    failure = ""

    def __init__(self, given: str | Callable[[], Any], *, timeout: float = 30.0, log: Path | None = None) -> None:
        if not isinstance(given, str):
            self.name = getattr(given, "__name__", type(given).__name__)
        else:
            self.name = "openenv" if given.startswith(PREFIX) else given.rpartition(":")[2]
        self._timeout = timeout
        self._lock = threading.Lock()  # responses may be sampled ahead in another thread
        self._log = CallLog(log, self.name)
        self._worker: WorkerProcess | None = None
        if isinstance(given, str):
            self._load = {"do": "load", "spec": given, "timeout": timeout}
            about = self._started()
        else:
            self._session = Session(given, self.name)
            about = self._session.describe()
        self.tools = Tools(about["tools"]) if about["tools"] else None
        self._is_async: bool = about["is_async"]

    def open(self, episodes: Mapping[int, tuple[Mapping[str, Any], int]]) -> dict[int, list[dict[str, str]] | None]:
        """Start episodes, or start them again. Where it fails, another instance is tried after a pause.

        Args:
            episodes: By number, the row of the data and a seed.

        Returns:
            The messages that follow each row's prompt; None where it failed.

        Raises:
            EnvError: Its process ended, or could not be interrupted; so do the other methods.
            DataError: A row has a value that cannot be sent to another process.
        """
        asked = {
            number: {"episode": number, "row": dict(row), "seed": seed} for number, (row, seed) in episodes.items()
        }
        found = dict(zip(episodes, self._call("open", [*asked.values()]), strict=True))
        if again := [number for number, messages in found.items() if messages is None]:
            time.sleep(PAUSE)
            found.update(zip(again, self._call("open", [asked[number] for number in again]), strict=True))
        return found

    def step(self, said: Mapping[int, str]) -> dict[int, Turn]:
        """Say something in each of some episodes; the answers. A failure ends the episode."""
        turns = self._call("step", [{"episode": number, "text": text} for number, text in said.items()])
        return {number: Turn(**(turn or FAILED)) for number, turn in zip(said, turns, strict=True)}

    def finish(self, episodes: Sequence[int]) -> dict[int, float | None]:
        """End episodes that the environment has not ended; what each earned besides its turns' rewards.

        None where it failed.
        """
        return dict(zip(episodes, self._call("finish", [{"episode": number} for number in episodes]), strict=True))

    def close(self) -> None:
        """End the worker process."""
        if self._worker is not None:
            self._worker.close()

    def _started(self) -> Any:
        """Start the worker process; what it says of the environment."""
        self._worker = WorkerProcess("kedge_tasks.environments.session", self._log.add)
        [about] = self._replies([self._load], STARTUP_SECONDS, "importing its module")
        return about

    def _call(self, what: str, episodes: list[dict[str, Any]]) -> list[Any]:
        """The results; None where the environment failed."""
        if not episodes:
            return []
        with self._lock:
            if self._worker is None:
                return [self._noted(result) for result in self._session.call(what, episodes)]
            if what == "open" and not self._worker.is_running:
                self._started()  # a call before was interrupted, or has failed, and the caller goes on
            # A request for each, so that each has its own deadline, unless all run at the same time.
            parts = [episodes] if self._is_async else [[episode] for episode in episodes]
            requests = [{"do": what, "episodes": part} for part in parts]
            found = self._replies(requests, self._timeout + GRACE, "a call")
            return [self._noted(result) for part in found for result in part]

    def _noted(self, result: Any) -> Any:
        if not isinstance(result, Mapping) or "failed" not in result:
            return result
        failure = cast("Mapping[str, str]", result)
        self.failure = failure["failed"]
        self._log.end(*failure["traceback"].splitlines(), f"[{self.failure}]")
        return None

    def _replies(self, requests: Sequence[Mapping[str, Any]], seconds: float, doing: str) -> list[Any]:
        assert self._worker is not None
        numbers = [secrets.randbits(64) for _ in requests]
        try:
            lines = [
                encode({"id": number, "name": self.name, **request})
                for number, request in zip(numbers, requests, strict=True)
            ]
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"the prompts have a value that cannot be sent to the process of {self.name} ({error_text(error)}); "
                "remove it, or pass the class as a Python object"
            ) from error
        try:
            self._worker.send(b"".join(lines))
            return [self._reply(number, seconds, doing) for number in numbers]
        except BaseException:  # also an interrupt, at any place: a late reply must not be read as the next one
            self._worker.kill()  # the episodes are lost
            raise

    def _reply(self, number: int, seconds: float, doing: str) -> Any:
        assert self._worker is not None
        try:
            reply = decode(self._worker.receive(time.monotonic() + seconds))
            if reply.get("id") != number or not {"result", "error"} & set(reply):
                raise ValueError("not a reply")
        except WorkerTimeout as error:
            raise self._failed(f"{self.name}: {doing} took over {seconds:g} s; it was killed") from error
        except WorkerEnded as error:
            raise self._failed(f"{self.name}: its process {error}") from error
        except (ValueError, RecursionError) as error:
            raise self._failed(f"{self.name}: its process sent something other than an answer") from error
        if "error" in reply:
            raise self._failed(str(reply["error"]), str(reply.get("traceback", "")))
        self._log.end()
        return reply["result"]

    def _failed(self, message: str, traceback: str = "") -> EnvError:
        self._log.end(*traceback.splitlines(), f"[{message}]")
        return EnvError(message)
