"""The process in which a reward function runs: it is told what to load and what to score, and answers.

It ends when kedge does: at the end of the connection it has a moment to finish, then its process group is killed. It
imports no more than the function needs.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from kedge.errors import NonfiniteScoreError, RewardError
from kedge.rewards.function import FunctionReward, words_of
from kedge.rewards.import_function import find_function
from kedge.rewards.source import Responses
from kedge.rewards.worker.codec import decode, encode

__all__ = ["GRACE", "main"]

GRACE = 1.0
"""Seconds that a worker has to end by itself once nobody listens to it any more."""

LAST_RESORT = 3600.0
"""Seconds beyond a call's deadline after which the kernel ends a worker that kedge did not live to end."""


def main(descriptor: int) -> None:
    """Answer requests until the connection ends.

    Args:
        descriptor: This side of the connection, an open file descriptor.
    """
    process, parted = os.getpid(), threading.Event()
    # Registered first, so that it runs last. Where kedge is still there, it is told how this process ended instead.
    atexit.register(lambda: _end_group(process) if parted.is_set() else None)
    _prefer_as_victim()
    for stream in (cast("TextIOWrapper", sys.stdout), cast("TextIOWrapper", sys.stderr)):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, process, parted), daemon=True).start()

    session = _Session()
    for line in iter(requests.get, None):
        reply = session.reply(decode(line))
        if os.getpid() != process:
            os._exit(0)  # a fork that the function left behind; it has no business here
        connection.sendall(encode(reply))


class _Session:
    """One function and the requests about it."""

    def __init__(self) -> None:
        self._doings: dict[str, Callable[..., Any]] = {"load": self._load, "check": self._check, "score": self._score}

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the request asks for, or the error that it met. A stranger's code may raise whatever it likes."""
        try:
            answer = self._doings[request["do"]](**request["given"])
        except RewardError as error:
            row = error.row if isinstance(error, NonfiniteScoreError) else None
            return {"id": request["id"], "error": str(error), "traceback": _told(error.__cause__), "row": row}
        except BaseException as error:
            words = f"{request['of']} raised {type(error).__name__}: {words_of(error)}"
            return {"id": request["id"], "error": words, "traceback": _told(error), "row": None}
        return {"id": request["id"], "answer": answer}

    def _load(self, *, spec: str, name: str | None, settings: dict[str, Any]) -> dict[str, Any]:
        self._function = FunctionReward(find_function(spec), name=name, settings=settings)
        return {"name": self._function.name, "takes": self._function.takes}

    def _check(self, *, columns: list[str]) -> None:
        self._function.check_columns(columns)

    def _score(self, *, responses: dict[str, Any], timeout: float) -> dict[str, Any]:
        batch = Responses(**responses)
        _seed_libraries(batch.seed)
        # No handler: the default action needs no interpreter, so that a loop in C ends, too.
        signal.setitimer(signal.ITIMER_REAL, timeout + LAST_RESORT)
        try:
            return {"scores": self._function.scores(batch), "memory": _resident_memory()}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _listen(
    connection: socket.socket, requests: SimpleQueue[bytes | None], process: int, parted: threading.Event
) -> None:
    """Hand requests on; when kedge is gone, end this process, whatever the function is doing."""
    with suppress(OSError), connection.makefile("rb") as lines:
        for line in lines:
            requests.put(line)
    parted.set()
    requests.put(None)
    time.sleep(GRACE)
    _end_group(process)


def _end_group(process: int) -> None:
    """Kill this process and all that it started; not from a fork of it, which ends alone."""
    if os.getpid() == process:
        os.killpg(process, signal.SIGKILL)


def _prefer_as_victim() -> None:
    """When memory runs out, let Linux end this process rather than the training."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _seed_libraries(seed: int) -> None:
    """Seed the global generators that the function can have drawn from: its own random numbers repeat, too."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _resident_memory() -> int:
    """Bytes in memory: now on Linux, at its most elsewhere."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _told(error: BaseException | None) -> str:
    if error is None:
        return ""
    with suppress(Exception):  # the error's own words are a stranger's code
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{type(error).__name__}\n"
