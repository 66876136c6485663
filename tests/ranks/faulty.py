"""The `kedge` command with a fault in one of its ranks: `python -m tests.ranks.faulty RANK UPDATE FAULT ppo …`.

The fault happens in the middle of an update of PPO, before its optimizer steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from kedge.cli import main
from kedge.errors import RewardError
from kedge.pipelines.ppo.steps import PpoSteps

FAULTY_RANK, UPDATE, FAULT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
learner = PpoSteps.learner


def failing(steps: PpoSteps, update: int, *arguments: Any) -> Any:
    if update == UPDATE and int(os.environ["RANK"]) == FAULTY_RANK:
        if FAULT == "exception":
            raise ZeroDivisionError("a bug on one rank")
        if FAULT == "user error":
            raise RewardError("the reward on one rank failed")
        if FAULT == "hang":
            print("now hanging", flush=True)
            time.sleep(600)
        os.kill(os.getpid(), {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}[FAULT])
    return learner(steps, update, *arguments)


PpoSteps.learner = failing  # type: ignore[method-assign]
sys.argv[1:4] = []
main()
