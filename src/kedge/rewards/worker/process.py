"""kedge's side of a worker: a process group of its own, one line out and one line back, and a deadline that is kept."""

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

from kedge.rewards.worker.main import GRACE

__all__ = ["WorkerEnded", "WorkerLate", "WorkerProcess"]

# The folders that modules are found in are kedge's own: a name must not mean something else there.
_BOOT = (
    "import sys; _, n, *sys.path = sys.argv; del sys.argv[1:]; from kedge.rewards.worker.main import main; main(int(n))"
)
_LOOK_INTERVAL = 0.2
_CHUNK = 1 << 16


class WorkerEnded(Exception):
    """The process is gone: it exited or crashed, or something killed it."""


class WorkerLate(Exception):
    """No answer came before the deadline; the process group is killed."""


class WorkerProcess:
    """A spawned interpreter that answers lines with lines.

    It has a session and a process group of its own: Ctrl-C in a terminal does not reach it, and whatever it starts can
    be killed with it. Nothing it does blocks the caller: not an answer that never comes, not a request that is never
    read, and not output without end. It is killed at the latest when this object is collected, or kedge exits; should
    kedge be killed itself, the worker notices.

    Args:
        on_output: Is given what the process prints, as it is read.
    """

    def __init__(self, on_output: Callable[[bytes], None]) -> None:
        self._on_output = on_output
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, str(theirs.fileno()), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # Sets of texts are walked in the same order in every process, so that a resumed run scores alike.
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        self._output = cast("IO[bytes]", self._process.stdout)
        self._connection.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        self._watched = [self._connection.fileno(), self._output.fileno()]
        self._parts = (self._process, self._connection, self._output, os.getpid())
        self._finalizer = weakref.finalize(self, _end, *self._parts, grace=GRACE)

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._finalizer.alive and self._process.poll() is None

    def send(self, line: bytes) -> None:
        """Send a line as far as the process reads it at once; `receive` sends the rest."""
        self._outgoing += line
        self._send()

    def receive(self, deadline: float) -> bytes:
        """The next line that the process sends.

        Args:
            deadline: In the seconds of `time.monotonic`.

        Raises:
            WorkerLate: None came in time.
            WorkerEnded: None will come, and why.
        """
        try:
            while b"\n" not in self._incoming:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise WorkerLate
                self._exchange(min(remaining, _LOOK_INTERVAL))
        except BaseException:  # Ctrl-C, too: an answer that is still under way must not be taken for the next one
            self.kill()
            raise
        self._read_output()
        line, _, self._incoming = self._incoming.partition(b"\n")
        return bytes(line)

    def close(self) -> None:
        """Let the process end by itself, within moments; then as `kill`."""
        self._finalizer()

    def kill(self) -> None:
        """Kill the process and all that it started."""
        if self._finalizer.detach():
            self._read_output()
            _end(*self._parts, grace=0.0)

    def _exchange(self, timeout: float) -> None:
        """Wait until something can be read or sent, at most `timeout` seconds, and do so."""
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        if self._outgoing:
            poll.register(self._connection, select.POLLIN | select.POLLOUT)
        if not poll.poll(timeout * 1000):
            # A child of the process may hold its end of the connection open, so that its end does not show there.
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
        """Pass on what was printed; one piece per look, so that output without end cannot hold the deadline up."""
        with suppress(BlockingIOError):
            printed = os.read(self._output.fileno(), _CHUNK)
            if printed:
                self._on_output(printed)
            elif self._output.fileno() in self._watched:
                self._watched.remove(self._output.fileno())

    def _ending(self) -> str:
        """How the process ended. One that has only closed its connection is taken for ended, too."""
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
    process: subprocess.Popen[bytes], connection: socket.socket, output: IO[bytes], owner: int, *, grace: float
) -> None:
    """End a process: by itself within `grace` seconds of the end of its connection, then with its whole group."""
    if os.getpid() != owner:
        return  # a fork of the owner is collecting its copies; the process is not its own
    connection.close()
    if grace:
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    # Also when the process itself is gone: its children may not be.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process in the middle of a read from a dead disk cannot be reaped
        process.wait(GRACE)
    output.close()
