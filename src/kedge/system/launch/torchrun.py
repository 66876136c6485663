"""The command lines that start a run's ranks with torchrun on each machine."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence

__all__ = ["PORT", "torchrun_line"]

PORT = 29500
"""Where the machines meet, unless another port is given; torchrun's own default."""


def torchrun_line(
    command: Sequence[str], *, nodes: int, devices: int, head: str | None = None, port: int = PORT
) -> str:
    """The line to start on each machine; it is the same on all of them.

    Args:
        command: A stage with its options, as behind `kedge`.
        nodes: Number of machines.
        devices: Ranks per machine.
        head: Host name or address of one of the machines, which the others can reach; None: this one.
        port: A free port there.
    """
    if nodes == 1:
        where = ["--standalone"]
    else:
        where = ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        where += ["--rdzv-endpoint", f"{head or socket.gethostname()}:{port}"]
    return shlex.join(["torchrun", *where, "--nproc-per-node", str(devices), "-m", "kedge", *command])
