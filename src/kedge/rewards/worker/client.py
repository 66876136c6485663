"""A reward function in a process of its own, which may hang, crash, leak or print without harm to the training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.errors import DataError, NonfiniteScoreError, RewardError
from kedge.rewards.function import words_of
from kedge.rewards.retries import CallRules, CallTimeout
from kedge.rewards.source import Responses, Scores
from kedge.rewards.worker.codec import decode, encode
from kedge.rewards.worker.log import RewardLog
from kedge.rewards.worker.process import WorkerEnded, WorkerLate, WorkerProcess

__all__ = ["RemoteFunction"]

UNSENDABLE = (TypeError, ValueError, RecursionError)
"""What `encode` raises."""


class RemoteFunction:
    """The function that `path/to/file.py:function` or `package.module:function` names, run by a worker.

    A worker that was late, died, or holds much more memory than after its first call is replaced by a fresh one, which
    imports the module anew: what the function kept in memory is gone then. A file that was edited since is refused: a
    run's scores must not change their meaning half-way.

    Args:
        spec: The function.
        name: What messages and metrics call it; the function's own name by default.
        settings: Fixed keyword arguments for every call.
        rules: Deadlines, and the memory that a worker may gain.
        log: Where what it prints is kept.

    Raises:
        RewardError: There is no such function, importing it failed or took too long, or its signature is wrong.
    """

    def __init__(
        self,
        spec: str,
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        rules: CallRules | None = None,
        log: Path | None = None,
    ) -> None:
        self.name = name or spec.rpartition(":")[2]
        self._rules, self._log = rules or CallRules(), RewardLog(log, self.name)
        self._loading = {"spec": spec, "name": name, "settings": dict(settings or {})}
        self._source = _source_of(spec)
        self._takes: list[str] | None = None
        self._first_memory: int | None = None
        self._last_number = 0
        if unsendable := [word for word, value in self._loading["settings"].items() if not _can_be_sent(value)]:
            raise RewardError(f"{self.name}: setting {unsendable[0]!r} cannot be sent to another process")
        self._worker = self._fresh_worker()

    def check_columns(self, columns: Collection[str]) -> None:
        """See `FunctionReward.check_columns`."""
        self._request("check", {"columns": list(columns)}, self._rules.startup_timeout)()

    def scores(self, responses: Responses) -> Scores:
        """See `ask`."""
        return self.ask(responses)()

    def ask(self, responses: Responses, *, timeout: float | None = None) -> Callable[[], Scores]:
        """Begin a call; its scores, or its `RewardError`, come from calling what is returned.

        Args:
            responses: What to score. Of the columns, those that the function takes are sent.
            timeout: Seconds that it may take, where that is less than the rules allow.

        Raises:
            DataError: A column holds what cannot be sent to another process.
        """
        seconds = min(self._rules.timeout, timeout or self._rules.timeout)
        sent = self._taken(responses)
        try:
            collect = self._request("score", {"responses": vars(sent), "timeout": seconds}, seconds)
        except UNSENDABLE as error:
            culprit = next(name for name, column in sent.columns.items() if not _can_be_sent(column))
            raise DataError(
                f"the prompts' column {culprit!r} holds what cannot be sent to the process of {self.name} "
                f"({words_of(error)}); leave it out, or hand the function over from Python"
            ) from error

        def scores() -> Scores:
            answer = collect()
            self._watch_memory(answer["memory"])
            return answer["scores"]

        return scores

    def close(self) -> None:
        """End the worker; a further call starts another."""
        self._worker.close()

    def _taken(self, responses: Responses) -> Responses:
        """The responses without what the function does not take: ids are most of the bytes."""
        if self._takes is None:
            return responses
        unused: list[Any] = [None] * len(responses)
        return replace(
            responses,
            prompt_ids=responses.prompt_ids if "prompt_ids" in self._takes else unused,
            response_ids=responses.response_ids if "completion_ids" in self._takes else unused,
            columns={name: column for name, column in responses.columns.items() if name in self._takes},
        )

    def _fresh_worker(self) -> WorkerProcess:
        """A worker that has loaded the function."""
        if _source_of(self._loading["spec"]) != self._source:
            raise RewardError(f"{self.name}: its file was edited during the run, and its process had to be replaced")
        self._first_memory = None
        worker = WorkerProcess(self._log.add)
        number, line = self._message("load", self._loading)
        worker.send(line)
        loaded = self._reply(worker, number, "load", self._rules.startup_timeout)
        self.name = self._log.name = loaded["name"]
        self._takes = loaded["takes"]
        return worker

    def _request(self, what: str, given: Mapping[str, Any], seconds: float) -> Callable[[], Any]:
        """Send a request, if there is a worker to take it at once; its reply comes from calling what is returned."""
        number, line = self._message(what, given)
        taker = self._worker if self._worker.is_running else None
        if taker is not None:
            taker.send(line)

        def collect() -> Any:
            if taker is None:
                self._worker.kill()  # it is gone, and what it started may not be
                self._worker = self._fresh_worker()
                self._worker.send(line)
            return self._reply(taker or self._worker, number, what, seconds)

        return collect

    def _message(self, what: str, given: Mapping[str, Any]) -> tuple[int, bytes]:
        self._last_number += 1
        return self._last_number, encode({"id": self._last_number, "do": what, "of": self.name, "given": given})

    def _reply(self, worker: WorkerProcess, number: int, what: str, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        reply: dict[str, Any] = {}
        try:
            while reply.get("id") != number:  # the reply to a request that nobody waited for may come before it
                reply = decode(worker.receive(deadline))
        except WorkerLate as error:
            doing = "importing its module" if what == "load" else "a call"
            raise self._failed(CallTimeout(f"{self.name}: {doing} took over {seconds:g} s; it was killed")) from error
        except WorkerEnded as error:
            raise self._failed(RewardError(f"{self.name}: its process {error}")) from error
        except ValueError as error:
            worker.kill()
            raise self._failed(RewardError(f"{self.name}: its process sent something else than scores")) from error
        if "error" in reply:
            words, row = reply["error"], reply["row"]
            error = RewardError(words) if row is None else NonfiniteScoreError(words, row)
            raise self._failed(error, reply["traceback"])
        self._log.end()
        return reply["answer"]

    def _failed(self, error: RewardError, traceback: str = "") -> RewardError:
        self._log.end(*traceback.splitlines(), f"[{error}]")
        return error

    def _watch_memory(self, memory: int) -> None:
        """Replace a worker that leaks before the next call; what it held after its first one, it needs."""
        if self._first_memory is None:
            self._first_memory = memory
        grown = memory - self._first_memory
        if grown > self._rules.memory_growth:
            self._log.end(f"[replaced: its process holds {grown / 2**20:,.0f} MiB more than at first]")
            self._worker.close()


def _source_of(spec: str) -> bytes | None:
    """The text of a function's file; None where the function is in a module, or there is no such file."""
    path = Path(os.path.expanduser(spec.rpartition(":")[0]))
    return path.read_bytes() if path.suffix == ".py" and path.is_file() else None


def _can_be_sent(value: object) -> bool:
    try:
        encode({"value": value})
    except UNSENDABLE:
        return False
    return True
