"""The kedge command as a child that ends with its parent: `python -m kedge.cli.as_child PARENT ppo …`.

The kernel sends SIGTERM when the parent dies, also by SIGKILL (Linux; prctl(2), PR_SET_PDEATHSIG). Signals that the
parent blocks or ignores work again: Ray's workers block Ctrl-C, which children inherit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from kedge.cli import main

__all__ = ["end_with"]

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let this process be ended when its parent dies; exit if it is dead already.

    Args:
        parent: The process that started this one.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the request
        sys.exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv[:2] = ["kedge"]
    main()
