"""A rank as a child process, whose output is collected and which ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from kedge.system.launch.seats import News

__all__ = ["Child"]

LAST_OUTPUT_SECONDS = 1.0
"""How long the rest of the output is waited for; a process that the rank left behind may hold its end open."""


class Child:
    """A kedge command with the variables of a rank.

    Args:
        command: A stage with its options.
        variables: Added to those of this process.
        folder: Working directory.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kedge.cli.as_child", str(os.getpid()), *command],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._written = (bytearray(), bytearray())
        self._lock = threading.Lock()
        pairs = zip((self._process.stdout, self._process.stderr), self._written, strict=True)
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def news(self) -> News:
        """What it has written since the last call, and its exit status if it has ended."""
        status = self._process.poll()
        if status is not None:
            self.end(signal.SIGKILL)  # what it left behind in its group
            for reader in self._readers:
                reader.join(LAST_OUTPUT_SECONDS)
        with self._lock:
            output, errors = (bytes(written) for written in self._written)
            for written in self._written:
                written.clear()
        return News(output, errors, status)

    def end(self, signum: int) -> None:
        """Send a signal to it and to the processes of its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)

    def _read(self, stream: IO[bytes], written: bytearray) -> None:
        with suppress(OSError), stream:
            while part := os.read(stream.fileno(), 1 << 16):
                with self._lock:
                    written += part
