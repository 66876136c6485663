"""The requests of a run to its judges: limits that are never exceeded, and answers that are never asked for again.

    reserve an upper bound ─▶ on disk ─▶ send ─▶ settle with what was used, and the answer ─▶ on disk

Several processes of a run may share the file. What a killed process has reserved stays counted.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge_base.errors import LastingRewardError, RewardError

_OWNER = secrets.token_hex()
"""This process, whose id another one may have had before."""

POLL = 0.05
"""Seconds after which a request that waits looks again at what others have settled."""

WINDOW = 60.0
"""Seconds that `requests_per_minute` counts over."""

_SETUP = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "CREATE TABLE IF NOT EXISTS requests (owner TEXT, process INT, until REAL, ended REAL, prompt INT, answer INT)",
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT)",
    # Sums and an index: before each request, all others would be read.
    "CREATE INDEX IF NOT EXISTS ends ON requests (ended)",
    "CREATE TABLE IF NOT EXISTS totals (number INTEGER PRIMARY KEY, requests INT, prompt INT, answer INT)",
    "CREATE TRIGGER IF NOT EXISTS reserved AFTER INSERT ON requests BEGIN UPDATE totals SET requests = requests + 1,"
    " prompt = prompt + NEW.prompt, answer = answer + NEW.answer; END",
    "CREATE TRIGGER IF NOT EXISTS settled AFTER UPDATE OF prompt, answer ON requests BEGIN UPDATE totals SET"
    " prompt = prompt + NEW.prompt - OLD.prompt, answer = answer + NEW.answer - OLD.answer; END",
    "INSERT OR IGNORE INTO totals SELECT 1, COUNT(*), IFNULL(SUM(prompt), 0), IFNULL(SUM(answer), 0) FROM requests",
)


class JudgeLimitError(LastingRewardError):
    """A limit of the run is reached."""


@dataclass(frozen=True)
class Limits:
    """Limits on the requests of a run, and how each is sent.

    Attributes:
        concurrency: Requests at the same time.
        requests_per_minute: In any 60 seconds; None for no limit.
        max_requests: In the whole run, with those that failed.
        max_total_tokens: Tokens of prompts and answers in the whole run.
        max_cost: `cost` of the whole run, with `price_in` and `price_out` of a million tokens of prompts and answers.
        timeout: Seconds that one request may take.
        retries: Further requests after one that failed for a passing reason.
        key_variable: The environment variable with the key; None to send none.
        allow_http: Allow sending the key unencrypted to another machine.
    """

    concurrency: int = 8
    requests_per_minute: int | None = None
    max_requests: int | None = None
    max_total_tokens: int | None = None
    max_cost: Mapping[str, float] | None = None
    timeout: float = 120.0
    retries: int = 5
    key_variable: str | None = "OPENAI_API_KEY"
    allow_http: bool = False


class Ledger:
    """The file with a run's requests and answers, a database of SQLite.

    Args:
        path: The file, in a folder that exists; None to keep everything in memory.
        limits: The limits.

    Raises:
        RewardError: The file cannot be written, or is not a database.
    """

    def __init__(self, path: Path | None, limits: Limits) -> None:
        self._path = path
        self._limits = limits
        self._lock = threading.Lock()
        with self._failing():
            name = ":memory:" if path is None else os.fspath(path)
            self._base = sqlite3.connect(name, timeout=60, isolation_level=None, check_same_thread=False)
            weakref.finalize(self, self._base.close)
            for statement in _SETUP:
                self._base.execute(statement)

    def usage(self) -> dict[str, Any]:
        """The requests and tokens so far, their cost if prices are known, and the questions without an answer."""
        with self._held() as base:
            requests, prompt, answer = _totals(base)
            [unanswered] = base.execute("SELECT COUNT(*) FROM answers WHERE answer = 'null'").fetchone()
        cost = None if self._limits.max_cost is None else self._cost(prompt, answer)
        return {"requests": requests, "tokens": prompt + answer, "cost": cost, "unanswered": unanswered}

    def answers(self, keys: list[str]) -> dict[str, Any]:
        """The answers so far to some questions; None for a question without a usable one."""
        with self._held() as base:
            rows = [base.execute("SELECT key, answer FROM answers WHERE key = ?", (key,)).fetchone() for key in keys]
        return {key: json.loads(answer) for key, answer in filter(None, rows)}

    def keep(self, key: str, answer: Any) -> None:
        """Keep the answer to a question; None for an unusable one."""
        with self._held() as base:
            base.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))

    def reserve(self, prompt: int, answer: int, stop: threading.Event) -> int:
        """Wait until a request may be sent, and count it.

        Args:
            prompt: Most tokens of the prompt.
            answer: Most tokens of the answer.
            stop: Set to send nothing more.

        Returns:
            Its number.

        Raises:
            JudgeLimitError: A limit of the whole run would be exceeded.
        """
        while not stop.is_set():
            with self._held() as base:
                now = time.time()
                wait = self._wait(base, now, prompt, answer)
                if not wait:
                    until = now + 4 * self._limits.timeout  # connecting, sending, and the parts of the answer
                    row = (_OWNER, os.getpid(), until, None, prompt, answer)
                    return int(base.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?)", row).lastrowid or 0)
            stop.wait(min(wait, 1.0))
        raise JudgeLimitError("the run has ended")

    def settle(self, number: int, used: tuple[int, int] | None) -> None:
        """Note that a request has ended, and the tokens that it used; None if unknown: its bounds stay counted."""
        with self._held() as base:
            base.execute("UPDATE requests SET ended = ? WHERE rowid = ?", (time.time(), number))
            if used is not None:
                base.execute("UPDATE requests SET prompt = ?, answer = ? WHERE rowid = ?", (*used, number))

    def _wait(self, base: sqlite3.Connection, now: float, prompt: int, answer: int) -> float:
        """Seconds to wait before a request may be sent; 0 if it may be now."""
        limits = self._limits
        for number, owner, process, until in base.execute(
            "SELECT rowid, owner, process, until FROM requests WHERE ended IS NULL"
        ).fetchall():
            if (owner, process) != (_OWNER, os.getpid()) and (until < now or not _is_running(process)):
                base.execute("UPDATE requests SET ended = ? WHERE rowid = ?", (now, number))
        [flying] = base.execute("SELECT COUNT(*) FROM requests WHERE ended IS NULL").fetchone()
        requests, prompts, answers = _totals(base)
        for name, used, most in (
            ("max_requests", requests + 1, limits.max_requests),
            ("max_total_tokens", prompts + answers + prompt + answer, limits.max_total_tokens),
            ("max_cost.cost", self._cost(prompts + prompt, answers + answer), (limits.max_cost or {}).get("cost")),
        ):
            if most is not None and used > most:
                if flying and name != "max_requests":  # requests under way may use less than they reserved
                    return POLL
                raise JudgeLimitError(
                    f"judge.{name}={most} is reached: {requests:,} requests with {prompts + answers:,} tokens so "
                    f"far, and the next may need {prompt + answer:,}. Raise it and continue with --resume (kedge "
                    "evaluate: with the same --out); nothing is asked twice"
                )
        if flying >= limits.concurrency:
            return POLL
        if limits.requests_per_minute is None:
            return 0.0
        # A server may see a request at any time until it ends, so the minute starts then, or when a clock is set back.
        base.execute("UPDATE requests SET ended = ? WHERE ended > ?", (now, now))
        ends = base.execute("SELECT ended FROM requests WHERE ended > ? ORDER BY ended", (now - WINDOW,)).fetchall()
        if flying + len(ends) < limits.requests_per_minute:
            return 0.0
        return max(ends[0][0] + WINDOW - now, POLL) if ends else POLL

    def _cost(self, prompt: int, answer: int) -> float:
        price = self._limits.max_cost or {"price_in": 0.0, "price_out": 0.0}
        return (prompt * price["price_in"] + answer * price["price_out"]) / 1e6

    @contextmanager
    def _held(self) -> Iterator[sqlite3.Connection]:
        """Lock the file against other threads and processes; writes reach the disk at the end, all or none."""
        with self._lock, self._failing(), self._base:
            self._base.execute("BEGIN IMMEDIATE")
            yield self._base

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RewardError(f"{self._path}: {error}") from error


def read_usage(path: Path, max_cost: Mapping[str, float] | None = None) -> dict[str, Any] | None:
    """The requests and tokens in a file, see `Ledger.usage`; None if there is no such file."""
    return Ledger(path, Limits(max_cost=max_cost)).usage() if path.is_file() else None


def _totals(base: sqlite3.Connection) -> tuple[int, int, int]:
    return base.execute("SELECT requests, prompt, answer FROM totals").fetchone()


def _is_running(process: int) -> bool:
    if os.name != "posix" or process == os.getpid():  # a process id that was reused, here by this process
        return os.name != "posix"
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
