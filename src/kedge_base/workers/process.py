"""Starts and stops a worker process and sends it requests: with its own process group, a reply per request, and hard
deadlines.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from kedge_base.errors import ConfigError
from kedge_base.workers.codec import decode, encode
from kedge_base.workers.log import CallLog
from kedge_base.workers.serving import GRACE

# The worker gets kedge's own `sys.path`, so that names refer to the same modules in both.
_BOOT = (
    "import sys; _, n, tie, *sys.path = sys.argv; del sys.argv[1:]; from {module} import main; main(int(n), int(tie))"
)
_POLL_INTERVAL = 0.2
LONGEST_SEND = 2.0
"""Seconds that `send` waits for a process to read; a batch of responses is more than fits into the socket's buffer."""
_CHUNK = 1 << 16


class WorkerError(Exception):
    """A request failed; the message is one line that starts with the worker's name.

    Attributes:
        row: The row of a batch on which the request failed; None if unknown.
        is_lasting: Whether every further request would fail.
    """

    def __init__(self, message: str, row: int | None = None, *, is_lasting: bool = False) -> None:
        super().__init__(message)
        self.row = row
        self.is_lasting = is_lasting


class WorkerEnded(WorkerError):
    """The process exited, crashed or was killed."""


class WorkerTimeout(WorkerError):
    """The process did not reply before the deadline; its process group was killed."""


@dataclass(frozen=True)
class Request:
    """An encoded request, and the number that identifies its reply."""

    number: int
    line: bytes

    @classmethod
    def of(cls, name: str, do: str, /, **arguments: Any) -> Request:
        """Encode a request; raises the errors of `encode`.

        Args:
            name: The worker's name, for errors.
            do: The worker's function to call; see `serving.serve`.
            arguments: The function's arguments.
        """
        number = secrets.randbits(64)  # random, so that user code in the worker cannot guess it
        return cls(number, encode({"id": number, "name": name, "do": do, "arguments": arguments}))


class WorkerProcess:
    """A Python subprocess that answers requests over a socket.

    It has its own session and process group: Ctrl-C in a terminal does not reach it, and its children are killed with
    it. It cannot block the caller, even if it never replies, never reads a request or prints endlessly. It is killed
    when this object is garbage-collected or kedge exits; if kedge itself is killed, the kernel kills it (Linux), or it
    notices and exits.

    Args:
        module: Its `main(descriptor, tie)` runs in the process; see `serving.serve`.
        log: Receives the process's output, and the error of each failed request; has the worker's name.
    """

    def __init__(self, module: str, log: CallLog) -> None:
        if not hasattr(os, "killpg"):
            raise ConfigError("environments in a separate process need process groups; Linux and macOS have them")
        self._log = log
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._sending = 0.0
        self._connection, theirs = socket.socketpair()
        tied, tie = os.pipe()  # nothing is sent: it closes when kedge ends, however that happens
        with theirs, os.fdopen(tied, "rb", 0):
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-c",
                    _BOOT.format(module=module),
                    str(theirs.fileno()),
                    str(tied),
                    *map(str, sys.path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[theirs.fileno(), tied],
                start_new_session=True,
                # Sets of strings iterate in the same order in every process: a resumed run gets the same scores.
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        self._output = cast("IO[bytes]", self._process.stdout)
        self._connection.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        self._watched = [self._connection.fileno(), self._output.fileno()]
        self._parts = (self._process, self._connection, self._output, tie, os.getpid())
        self._finalizer = weakref.finalize(self, _end, *self._parts, grace=GRACE)

    @property
    def is_running(self) -> bool:
        """True if the process is running."""
        return self._finalizer.alive and self._process.poll() is None

    def send(self, *requests: Request, seconds: float) -> None:
        """Send requests, which the process reads in a thread while it answers others.

        `reply` sends the rest to a process that has not read them after `seconds`, the time limit of a call, or sooner.
        """
        self._outgoing += b"".join(request.line for request in requests)
        start = time.monotonic()
        with suppress(WorkerEnded):  # `reply` raises it
            while self._outgoing and time.monotonic() < start + min(seconds, LONGEST_SEND):
                self._exchange(_POLL_INTERVAL)
        self._sending = time.monotonic() - start

    def reply(
        self,
        request: Request,
        seconds: float,
        doing: str = "a call",
        *,
        is_valid: Callable[[Any], bool] = lambda result: True,
    ) -> Any:
        """Wait for the result of a request; replies to abandoned requests are skipped.

        Args:
            request: A request that was sent.
            seconds: The time limit, from now; the first reply's includes the time that `send` took.
            doing: The activity of the process, for the error.
            is_valid: Checks the form of the result, which user code could have written.

        Raises:
            WorkerTimeout: There was no reply in time; the process was killed.
            WorkerEnded: The process ended.
            WorkerError: The request failed, or the process sent something other than a reply, and was killed.
        """
        deadline = time.monotonic() + seconds - self._sending
        self._sending = 0.0
        reply: dict[str, Any] = {}
        try:
            while reply.get("id") != request.number:
                reply = decode(self._line(deadline))
            match reply:
                case {"error": str(message), "traceback": str(traceback), "row": int() | None as row}:
                    is_lasting = reply.get("lasting") is True
                    raise self._failed(WorkerError(message, row, is_lasting=is_lasting), traceback)
                case {"result": result} if is_valid(result):
                    self._log.end()
                    return result
                case _:
                    raise ValueError("not a reply")
        except WorkerTimeout as error:
            raise self._failed(
                WorkerTimeout(f"{self._log.name}: {doing} took over {seconds:g} s; it was killed")
            ) from error
        except WorkerEnded as error:
            raise self._failed(WorkerEnded(f"{self._log.name}: its process {error}")) from error
        except (ValueError, RecursionError) as error:
            self.kill()
            raise self._failed(
                WorkerError(f"{self._log.name}: its process sent something other than an answer")
            ) from error

    def _failed(self, error: WorkerError, traceback: str = "") -> WorkerError:
        self._log.end(*traceback.splitlines(), f"[{error}]")
        return error

    def _line(self, deadline: float) -> bytes:
        """Read the next line from the process; raises `WorkerTimeout`, or `WorkerEnded` with how it ended."""
        searched = 0
        try:
            while (end := self._incoming.find(b"\n", searched)) < 0:
                searched = len(self._incoming)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise WorkerTimeout("")
                self._exchange(min(remaining, _POLL_INTERVAL))
        except BaseException:  # includes Ctrl-C: a late reply must not be read as the next one
            self.kill()
            raise
        self._read_output()
        line = bytes(self._incoming[:end])
        del self._incoming[: end + 1]
        return line

    def close(self) -> None:
        """Give the process a second to exit, then `kill` it."""
        self._finalizer()

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._finalizer.detach():
            self._read_output()
            _end(*self._parts, grace=0.0)

    def _exchange(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until data can be read or sent, and read or send it."""
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        if self._outgoing:
            poll.register(self._connection, select.POLLIN | select.POLLOUT)
        if not poll.poll(timeout * 1000):
            # A child may keep the worker's end of the connection open after the worker itself has ended.
            if self._process.poll() is not None:
                raise WorkerEnded(self._ending())
            return
        self._read_output()
        self._send()
        self._receive()

    def _send(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]

    def _receive(self) -> None:
        try:
            received = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionResetError:
            received = b""
        if not received:
            raise WorkerEnded(self._ending())
        self._incoming += received

    def _read_output(self) -> None:
        """Pass on output, one chunk per call, so that endless output cannot delay the deadline."""
        with suppress(BlockingIOError):
            printed = os.read(self._output.fileno(), _CHUNK)
            if printed:
                self._log.add(printed)
            elif self._output.fileno() in self._watched:
                self._watched.remove(self._output.fileno())

    def _ending(self) -> str:
        """Describe how the process ended; closing the connection counts as ending."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        status = self._process.returncode
        if status is None:
            return "closed its connection"
        if status >= 0:
            return f"exited with status {status}"
        name = signal.Signals(-status).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _end(
    process: subprocess.Popen[bytes],
    connection: socket.socket,
    output: IO[bytes],
    tie: int,
    owner: int,
    *,
    grace: float,
) -> None:
    """End a process: close its connection, wait up to `grace` seconds for it to exit, then kill its process group."""
    if os.getpid() != owner:
        return  # garbage collection in a fork of the owner, which is not the process's parent
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    # Also done if the process itself has ended, because its children may still be running.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process blocked in the kernel, as by a dead disk, cannot be reaped
        process.wait(GRACE)
    output.close()
    os.close(tie)
