"""The worker process of a reward function: loads the function, and answers requests to score responses."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from kedge.rewards.function import FunctionReward, find_function
from kedge.rewards.source import Responses, plain_scores
from kedge_base.errors import RewardError
from kedge_base.generators import seed_generators
from kedge_base.machine.invocation import loading_user_code
from kedge_base.workers.serving import serve

LAST_RESORT = 3600.0
"""Seconds after a call's deadline at which the kernel kills the worker, in case kedge has died and cannot."""


def main(descriptor: int, tie: int) -> None:
    """Answer requests until the connection closes.

    Args:
        descriptor: The worker's end of the connection, an open file descriptor.
        tie: The reading end of a pipe that closes when kedge ends.
    """
    session = _Session()
    functions = {"load": session.load, "check": session.check, "score": session.score}
    with loading_user_code():
        serve(descriptor, tie, functions, error=RewardError)


class _Session:
    """A function, and the handlers of requests to it."""

    def load(
        self, *, spec: str, name: str | None, settings: dict[str, Any], skips_missing: bool = False
    ) -> dict[str, Any]:
        seed_generators(0)  # for draws while its module is imported
        self._function = FunctionReward(find_function(spec), name=name, settings=settings, skips_missing=skips_missing)
        loaded = self._function
        return {"name": loaded.name, "argument_names": loaded.argument_names, "checks_rows": loaded.checks_rows}

    def check(self, *, columns: list[str] | dict[str, list[Any]]) -> tuple[float, int]:
        self._function.check(columns)
        return self._function.pace

    def score(self, *, responses: dict[str, Any], timeout: float) -> dict[str, Any]:
        batch = Responses(**responses)
        seed_generators(batch.seed)  # also covers an async function, which draws after its call
        # No handler: the default action does not need the interpreter, so it also ends a loop in C.
        signal.setitimer(signal.ITIMER_REAL, timeout + LAST_RESORT)
        try:
            return {"scores": plain_scores(self._function.score(batch)), "memory": _resident_memory()}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _resident_memory() -> int:
    """Resident memory in bytes: the current value on Linux, the peak elsewhere."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
