"""Runs reward functions in worker processes: one that hangs, crashes, leaks or prints does not disturb training."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.rewards.function import given_columns
from kedge.rewards.source import Responses, Score, checked_scores
from kedge.rewards.weighted import CallLimits, CallTimeout
from kedge_base.errors import DataError, LastingRewardError, NonfiniteScoreError, RewardError
from kedge_base.term_names import source_name
from kedge_base.texts import error_text
from kedge_base.workers.codec import encode
from kedge_base.workers.log import CallLog
from kedge_base.workers.process import Request, WorkerError, WorkerProcess, WorkerTimeout

ENCODE_ERRORS = (TypeError, ValueError, RecursionError)
EMPTY_PROMPTS = {"prompts": "", "prompt_ids": ()}


class RemoteFunction:
    """A function, `path/to/file.py:function` or `package.module:function`, that runs in a worker process.

    A worker that timed out, died, or grew too much is replaced by a new one, which imports the module again: state
    that the function kept in memory is lost. If its file has been edited since the start, it is not loaded again,
    because the meaning of a run's scores must not change midway.

    Args:
        spec: The function.
        name: Its name in metrics and messages; the function's own name by default.
        settings: Fixed keyword arguments for every call.
        limits: Deadlines, and how much the worker may grow.
        log: The file for its output.
        skips_missing: See `FunctionReward`.

    Raises:
        RewardError: There is no such function, its import failed or took too long, or its signature is wrong.
    """

    def __init__(
        self,
        spec: str,
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        limits: CallLimits | None = None,
        log: Path | None = None,
        skips_missing: bool = False,
    ) -> None:
        self.name = name or source_name(spec)
        self._limits = limits or CallLimits()
        self._log = CallLog(log, self.name)
        self._loading: dict[str, Any] = {
            "spec": spec,
            "name": name,
            "settings": dict(settings or {}),
            "skips_missing": skips_missing,
        }
        self._source = _source_of(spec)
        self._argument_names: list[str] | None = None
        self._checks_rows = False
        self._pace = 0.0, 1
        self._first_memory: int | None = None
        if bad := [name for name, value in self._loading["settings"].items() if not _is_encodable(value)]:
            raise RewardError(f"{self.name}: setting {bad[0]!r} cannot be sent to another process")
        self._worker = self._new_worker()

    def check(self, columns: Collection[str]) -> None:
        """See `FunctionReward.check`.

        Raises:
            DataError: A column contains a value that cannot be sent to another process.
        """
        entries: dict[str, Sequence[Any]] = {}
        if self._checks_rows and isinstance(columns, Mapping):
            # Columns that the function does not take are sent without entries, which may not be serializable.
            given = given_columns(columns)
            entries = {name: column if self._takes(name) else [] for name, column in given.items()}
        with self._sending(entries):
            collect = self._request("check", self._limits.startup_timeout, columns=entries or list(columns))
        self._pace = max(self._pace, tuple(collect()))

    def score(self, responses: Responses) -> Sequence[Score]:
        """See `start`."""
        return self.start(responses)()

    def start(self, responses: Responses, *, timeout: float | None = None) -> Callable[[], Sequence[Score]]:
        """Start a call; the returned function waits for its scores, or raises its `RewardError`.

        Args:
            responses: The responses to score. Only the columns and prompts that the function takes are sent.
            timeout: Seconds that the call may take, if less than the limit. The time that the function's `check_rows`
                gives for the responses is added to both.

        Raises:
            DataError: A column contains a value that cannot be sent to another process.
        """
        longest, at_a_time = self._pace
        seconds = min(self._limits.timeout, timeout or self._limits.timeout)
        seconds += longest * -(-len(responses) // at_a_time)
        columns = {name: column for name, column in given_columns(responses.columns).items() if self._takes(name)}
        # Prompts may be longer than responses, and no function takes an environment's rewards.
        prompts = {name: [empty] * len(responses) for name, empty in EMPTY_PROMPTS.items() if not self._takes(name)}
        sent = vars(replace(responses, columns=columns, paid=[], **prompts))
        with self._sending(columns):
            collect = self._request("score", seconds, responses=sent, timeout=seconds)

        def scores() -> Sequence[Score]:
            result = collect()
            # The function could have written to the connection itself, so accept nothing but scores.
            found = checked_scores(result["scores"], name=self.name, lengths=responses.lengths)
            self._check_memory(result["memory"])
            return found

        return scores

    def close(self) -> None:
        """Stop the worker; a further call starts another."""
        self._worker.close()

    def _takes(self, name: str) -> bool:
        """True if the function has an argument of this name, or `**columns`."""
        return self._argument_names is None or name in self._argument_names

    def _new_worker(self) -> WorkerProcess:
        """Start a worker that loads the function."""
        if _source_of(self._loading["spec"]) != self._source:
            raise RewardError(f"{self.name}: its file was changed during the run, and its process had to be restarted")
        self._first_memory = None
        worker = WorkerProcess("kedge.rewards.worker.main", self._log)
        request = Request.of(self.name, "load", **self._loading)
        seconds = self._limits.startup_timeout
        try:
            worker.send(request, seconds=seconds)
            loaded = _reply(worker, request, "load", seconds)
        except BaseException:
            worker.kill()  # the error's traceback refers to the worker, which would run until that is garbage-collected
            raise
        self.name = self._log.name = loaded["name"]
        self._argument_names = loaded["argument_names"]
        self._checks_rows = loaded["checks_rows"]
        return worker

    @contextmanager
    def _sending(self, columns: Mapping[str, Sequence[Any]]) -> Iterator[None]:
        """Raise a `DataError` that names the column with a value that cannot be sent."""
        try:
            yield
        except ENCODE_ERRORS as error:
            bad = next(name for name, column in columns.items() if not _is_encodable(column))
            raise DataError(
                f"the prompts' column {bad!r} contains a value that cannot be sent to the process of {self.name} "
                f"({error_text(error)}); remove it, or pass the function as a Python object"
            ) from error

    def _request(self, do: str, seconds: float, **arguments: Any) -> Callable[[], Any]:
        """Send a request, if the worker is running; the returned function waits for the result."""
        request = Request.of(self.name, do, **arguments)
        receiver = self._worker if self._worker.is_running else None
        if receiver is not None:
            receiver.send(request, seconds=seconds)

        def collect() -> Any:
            if receiver is None:
                self._worker.kill()  # the process has ended, but its children may still be running
                self._worker = self._new_worker()
                self._worker.send(request, seconds=seconds)
            return _reply(receiver or self._worker, request, do, seconds)

        return collect

    def _check_memory(self, memory: int) -> None:
        """Stop the worker if it has grown too much since its first call; the next call starts another."""
        if self._first_memory is None:
            self._first_memory = memory
        grown = memory - self._first_memory
        if grown > self._limits.memory_growth:
            self._log.end(f"[replaced: its process has grown by {grown / 2**20:,.0f} MiB since its first call]")
            self._worker.close()


def _reply(worker: WorkerProcess, request: Request, do: str, seconds: float) -> Any:
    def is_valid(result: Any) -> bool:
        match do, result:
            case (
                ("load", {"name": str(), "argument_names": list() | None, "checks_rows": bool()})
                | ("score", {"scores": _, "memory": int()})
                | ("check", [float() | int(), int()])
            ):
                return True
        return False

    doing = "importing its module" if do == "load" else "a call"
    try:
        return worker.reply(request, seconds, doing, is_valid=is_valid)
    except WorkerTimeout as error:
        raise CallTimeout(str(error)) from error
    except WorkerError as error:
        text = str(error)
        if error.is_lasting:
            raise LastingRewardError(text) from error
        raise (RewardError(text) if error.row is None else NonfiniteScoreError(text, error.row)) from error


def _source_of(spec: str) -> bytes | None:
    """Read the file of a function; None if there is no such file, or the function is named by module."""
    path = Path(os.path.expanduser(spec.rpartition(":")[0]))
    return path.read_bytes() if path.suffix == ".py" and path.is_file() else None


def _is_encodable(value: object) -> bool:
    try:
        encode({"value": value})
    except ENCODE_ERRORS:
        return False
    return True
