"""Starts, talks to and stops a worker process: its own process group, line-based messages, hard deadlines."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import IO, cast

from kedge_base.workers.serving import GRACE

# The worker gets kedge's own `sys.path`, so that names refer to the same modules in both.
_BOOT = (
    "import sys; _, n, tie, *sys.path = sys.argv; del sys.argv[1:]; from {module} import main; main(int(n), int(tie))"
)
_POLL_INTERVAL = 0.2
_CHUNK = 1 << 16


class WorkerEnded(Exception):
    """The process exited, crashed or was killed."""


class WorkerTimeout(Exception):
    """The process did not reply before the deadline; its process group was killed."""


class WorkerProcess:
    """A Python subprocess that exchanges lines over a socket.

    It has its own session and process group: Ctrl-C in a terminal does not reach it, and its children are killed with
    it. It cannot block the caller, whether it never replies, never reads a request or prints without end. It is killed
    when this object is garbage-collected or kedge exits; if kedge itself is killed, the kernel kills it (Linux), or it
    notices and exits.

    Args:
        module: Its `main(descriptor, tie)` runs in the process; see `serving.serve`.
        on_output: Called with the process's output as it is read.
    """

    def __init__(self, module: str, on_output: Callable[[bytes], None]) -> None:
        self._on_output = on_output
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._connection, theirs = socket.socketpair()
        boot = _BOOT.format(module=module)
        tied, tie = os.pipe()  # nothing is sent: it closes when kedge ends, however that happens
        with theirs, os.fdopen(tied, "rb", 0):
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-c",
                    boot,
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

    def send(self, line: bytes) -> None:
        """Send as much of a line as the socket takes without blocking; `receive` sends the rest."""
        self._outgoing += line
        self._send()

    def receive(self, deadline: float) -> bytes:
        """The next line from the process.

        Args:
            deadline: On the clock of `time.monotonic`, seconds.

        Raises:
            WorkerTimeout: No line arrived in time.
            WorkerEnded: The process ended; the message describes how.
        """
        try:
            while b"\n" not in self._incoming:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise WorkerTimeout
                self._exchange(min(remaining, _POLL_INTERVAL))
        except BaseException:  # includes Ctrl-C: a late reply must not be read as the next one
            self.kill()
            raise
        self._read_output()
        line, _, self._incoming = self._incoming.partition(b"\n")
        return bytes(line)

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
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
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
                self._on_output(printed)
            elif self._output.fileno() in self._watched:
                self._watched.remove(self._output.fileno())

    def _ending(self) -> str:
        """How the process ended; closing the connection counts as ending."""
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
        return  # a fork of the owner is collecting its copy; the process is not its child
    connection.close()
    if grace:
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    # Also if the process itself has ended: its children may still be running.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process blocked in the kernel, as by a dead disk, cannot be reaped
        process.wait(GRACE)
    output.close()
    os.close(tie)
