"""A vLLM server that kedge starts, in an environment and a process group of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kedge.rollout.vllm import supervisor
from kedge.system.output import writing

__all__ = ["ServerProcess"]

LONGEST_END = 2 * supervisor.GRACE + 5.0
TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Interrupt)\b: .+|\berror: .+")


class ServerProcess:
    """A server under the supervisor: it ends with `close`, with this object, or with kedge, even by SIGKILL.

    Args:
        command: The server's command line.
        environment: Its environment.
        log: The file that its output is added to.
        folder: A folder to remove if kedge ends without `close`.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, folder: Path) -> None:
        self._log = log
        with writing(log), log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                # -I: neither PYTHONPATH, which is the server's, nor the working directory count.
                [sys.executable, "-I", str(supervisor.__file__), str(folder), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in a terminal does not reach it
            )
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())

    @property
    def is_running(self) -> bool:
        """Whether the server's main process is running."""
        return self._process.poll() is None

    def ending(self) -> str:
        """How the server ended, in one line: its exit status, and the error in its output."""
        status = self._process.poll()
        how = f"exited with status {status}" if status is None or status < 128 else f"was killed by {_name(status)}"
        with self._log.open("rb") as output:
            output.seek(max(self._start, output.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = output.read().decode("utf-8", "replace")
        errors = _ERROR.findall(text)
        # The last errors only repeat that the engine failed; the first one says why.
        return f"{how}{f': {errors[0].strip()}' if errors else ''}"

    def close(self) -> None:
        """End the server and all of its processes."""
        self._finalizer()


def _name(status: int) -> str:
    with suppress(ValueError):
        return signal.Signals(status - 128).name
    return f"signal {status - 128}"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Close the supervisor's input, and wait until it has ended the server."""
    if os.getpid() != owner:
        return  # a fork of the owner is collecting its copy
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(LONGEST_END)
