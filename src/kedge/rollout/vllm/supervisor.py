"""Runs a server as a child and ends all of its processes when the trainer ends for any reason.

    python supervisor.py FOLDER COMMAND…

Its standard input is a pipe from the trainer. The kernel closes the pipe's other end when the trainer dies, also by
SIGKILL: then the server's process group gets SIGTERM, and SIGKILL after a grace period, and FOLDER is removed. It
imports only the standard library, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL, in which the server's processes remove their shared memory."""
POLL = 0.05


def main(folder: str, command: list[str]) -> int:
    """Run the command until it ends or standard input is closed; return its exit status."""
    trainer = os.getppid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_default_signals)
    threading.Thread(target=_end_with_trainer, args=(server,), daemon=True).start()
    status = server.wait()
    _end_group(server.pid)  # its workers may still be running
    if os.getppid() != trainer:  # it died, and cannot clean up itself
        shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _default_signals() -> None:
    """Restore signals that this process ignores, because the server would inherit that."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def _end_with_trainer(server: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    _kill(server.pid, signal.SIGTERM)
    time.sleep(GRACE)
    _kill(server.pid, signal.SIGKILL)


def _end_group(group: int) -> None:
    deadline = time.monotonic() + GRACE
    while _kill(group, signal.SIGTERM) and time.monotonic() < deadline:
        time.sleep(POLL)
    _kill(group, signal.SIGKILL)


def _kill(group: int, signum: int) -> bool:
    """Send a signal to a group; True if the group exists."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
