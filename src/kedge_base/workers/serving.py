"""The worker's side of the connection: answers requests, and ends when kedge does.

When the connection closes, the process has a second to finish before its process group is killed; when kedge itself is
killed, the group is killed immediately, where the system supports it. This module imports nothing beyond what requests
need.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from kedge_base.errors import KedgeError
from kedge_base.texts import traceback_text, typed_error_text
from kedge_base.workers.codec import decode, encode

GRACE = 1.0
"""Seconds that a worker gets to exit after the connection has closed."""


def serve(
    descriptor: int,
    tie: int,
    functions: Mapping[str, Callable[..., Any]],
    *,
    error: type[KedgeError] = KedgeError,
    idle: float | None = None,
) -> None:
    """Answer requests until the connection closes.

    Args:
        descriptor: The worker's end of the connection, an open file descriptor.
        tie: The reading end of a pipe that closes when kedge ends.
        functions: What requests call, by name.
        error: An error whose message is for the user as it is; others are named with the worker that raised them.
        idle: Seconds without a request after which the worker ends; None to stay.
    """
    _end_with_kedge(tie)
    process = os.getpid()
    closed = threading.Event()
    # Registered first, so that it runs last. While kedge is running, it reads this process's exit status instead.
    atexit.register(lambda: _end_group(process) if closed.is_set() else None)
    _prefer_for_oom_kill()
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper", stream).reconfigure(encoding="utf-8", errors="backslashreplace")
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, process, closed), daemon=True).start()
    with suppress(Empty):
        while line := requests.get(timeout=idle):
            answer = _answer(decode(line), functions, error)
            if os.getpid() != process:
                os._exit(0)  # a fork made by user code; only the original answers
            connection.sendall(encode(answer))


def _answer(
    request: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], expected: type[KedgeError]
) -> dict[str, Any]:
    """The result of a request, or its error: user code can raise anything."""
    try:
        answer = {"result": functions[request["do"]](**request["arguments"])}
    except expected as error:
        trace = "" if error.__cause__ is None else traceback_text(error.__cause__)
        answer = {"error": str(error), "traceback": trace, "row": getattr(error, "row", None)}
        answer["lasting"] = hasattr(error, "is_lasting")
    except BaseException as error:
        text = f"{request['name']} raised {typed_error_text(error)}"
        answer = {"error": text, "traceback": traceback_text(error), "row": None}
    return {"id": request["id"], **answer}


def _end_with_kedge(tie: int) -> None:
    """Make the kernel kill this process and its children when the pipe closes, even during a loop in C.

    Linux only. PR_SET_PDEATHSIG would send its signal as soon as the thread that started this process ends.
    """
    if sys.platform != "linux":
        return
    import fcntl

    os.set_inheritable(tie, False)
    fcntl.fcntl(tie, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(tie, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(tie, fcntl.F_SETFL, os.O_RDONLY | os.O_NONBLOCK | os.O_ASYNC)
    with suppress(BlockingIOError):
        if not os.read(tie, 1):  # kedge ended before the signal was set up
            os.killpg(os.getpgrp(), signal.SIGKILL)


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
    """Kill this process and its children; do nothing in a fork, which exits without killing others."""
    if os.getpid() == process:
        os.killpg(process, signal.SIGKILL)


def _prefer_for_oom_kill() -> None:
    """Make Linux kill this process, rather than the training, when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
