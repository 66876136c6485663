"""Starts several ranks with torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 400.0
"""Seconds after which a launch counts as hanging; far more than it takes, even on a loaded machine."""


@contextmanager
def started(count: int, *arguments: str, restarts: int = 0, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Ranks that run a module, with its arguments; whatever is left of them at the end is killed.

    Args:
        count: Number of ranks.
        arguments: The module and its arguments.
        restarts: How often torchrun starts all again.
        more: Environment variables.
    """
    # The loopback interface: the machine's host name may not resolve.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": _path(), **more}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    process = subprocess.Popen(
        [*command, "--max-restarts", str(restarts), "-m", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_restore_signals,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def torchrun(count: int, *arguments: str, restarts: int = 0, **more: str) -> tuple[int, str]:
    """Exit code and output of ranks that run a module, without the error line that torchrun repeats in its report."""
    with started(count, *arguments, restarts=restarts, **more) as process:
        output, _ = process.communicate(timeout=LONGEST)
        return process.returncode, re.sub(r"^  traceback : error: .*\n", "", output, flags=re.MULTILINE)


def _path() -> str:
    """Where modules are found: those of the tests, and kedge from where this process has it."""
    import kedge

    return os.pathsep.join([str(Path(kedge.__file__).parents[1]), str(ROOT)])


def _restore_signals() -> None:
    """A shell starts background jobs with Ctrl-C ignored, which its children inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
