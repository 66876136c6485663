"""The worker process of a reward function: loads the function, and answers requests to score responses.

It ends when kedge does: when the connection closes, it has a second to finish, then its process group is killed; when
kedge itself is killed, at once, where the system can. It imports nothing beyond what the function needs.
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
from kedge.rewards.function import FunctionReward
from kedge.rewards.import_function import find_function
from kedge.rewards.source import Responses
from kedge.rewards.worker.codec import decode, encode
from kedge.texts import error_text

__all__ = ["GRACE", "main"]

GRACE = 1.0
"""Seconds for a worker to exit by itself after the connection has closed."""

LAST_RESORT = 3600.0
"""Seconds after a call's deadline at which the kernel ends a worker that kedge could not, because it died itself."""


def main(descriptor: int, tie: int) -> None:
    """Answer requests until the connection closes.

    Args:
        descriptor: The worker's end of the connection, an open file descriptor.
        tie: The reading end of a pipe that closes when kedge ends.
    """
    _end_with_kedge(tie)
    process, closed = os.getpid(), threading.Event()
    # Registered first, so that it runs last. While kedge is running, it reads this process's exit status instead.
    atexit.register(lambda: _end_group(process) if closed.is_set() else None)
    _prefer_for_oom_kill()
    for stream in (cast("TextIOWrapper", sys.stdout), cast("TextIOWrapper", sys.stderr)):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, process, closed), daemon=True).start()

    session = _Session()
    for line in iter(requests.get, None):
        reply = session.reply(decode(line))
        if os.getpid() != process:
            os._exit(0)  # a fork made by the function; only the original answers
        connection.sendall(encode(reply))


def _end_with_kedge(tie: int) -> None:
    """Let the kernel kill this process and its children when a pipe closes: a loop in C runs no code that could.

    Linux alone can. The signal for a parent's death would come with the end of the thread that started this process.
    """
    if sys.platform != "linux":
        return
    import fcntl

    os.set_inheritable(tie, False)
    fcntl.fcntl(tie, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(tie, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(tie, fcntl.F_SETFL, os.O_RDONLY | os.O_NONBLOCK | os.O_ASYNC)
    with suppress(BlockingIOError):
        if not os.read(tie, 1):  # kedge has ended before this
            os.killpg(os.getpgrp(), signal.SIGKILL)


class _Session:
    """One function and its request handlers."""

    def __init__(self) -> None:
        self._handlers: dict[str, Callable[..., Any]] = {"load": self._load, "check": self._check, "score": self._score}

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of a request, or its error: user code can raise anything."""
        try:
            result = self._handlers[request["do"]](**request["arguments"])
        except RewardError as error:
            row = error.row if isinstance(error, NonfiniteScoreError) else None
            return {"id": request["id"], "error": str(error), "traceback": _traceback(error.__cause__), "row": row}
        except BaseException as error:
            message = f"{request['name']} raised {type(error).__name__}: {error_text(error)}"
            return {"id": request["id"], "error": message, "traceback": _traceback(error), "row": None}
        return {"id": request["id"], "result": result}

    def _load(self, *, spec: str, name: str | None, settings: dict[str, Any]) -> dict[str, Any]:
        self._function = FunctionReward(find_function(spec), name=name, settings=settings)
        return {"name": self._function.name, "argument_names": self._function.argument_names}

    def _check(self, *, columns: list[str]) -> None:
        self._function.check(columns)

    def _score(self, *, responses: dict[str, Any], timeout: float) -> dict[str, Any]:
        batch = Responses(**responses)
        _seed_libraries(batch.seed)
        # No handler: the default action needs no interpreter, so it also ends a loop in C.
        signal.setitimer(signal.ITIMER_REAL, timeout + LAST_RESORT)
        try:
            return {"scores": self._function.score(batch), "memory": _resident_memory()}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _listen(
    connection: socket.socket, requests: SimpleQueue[bytes | None], process: int, closed: threading.Event
) -> None:
    """Queue requests; when the connection closes, end this process, even if the function is running."""
    with suppress(OSError), connection.makefile("rb") as lines:
        for line in lines:
            requests.put(line)
    closed.set()
    requests.put(None)
    time.sleep(GRACE)
    _end_group(process)


def _end_group(process: int) -> None:
    """Kill this process and its children; a fork of it exits alone."""
    if os.getpid() == process:
        os.killpg(process, signal.SIGKILL)


def _prefer_for_oom_kill() -> None:
    """When memory runs out, Linux kills this process rather than the training."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _seed_libraries(seed: int) -> None:
    """Seed the global generators, so that a function that draws from them is reproducible."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _resident_memory() -> int:
    """Resident memory in bytes: the current value on Linux, the peak elsewhere."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _traceback(error: BaseException | None) -> str:
    if error is None:
        return ""
    with suppress(Exception):  # formatting runs the error's own code
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{type(error).__name__}\n"
