"""The `kedge` command with a fault in one of its ranks: `python -m tests.ranks.faulty RANK PLACE FAULT ppo …`.

PLACE is the number of an update of PPO, in which the fault happens before the optimizer steps; or `sampled`, after the
first batch of responses that a frozen policy has sampled.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from kedge.cli import main
from kedge.errors import RewardError
from kedge.evaluation import policy
from kedge.pipelines.ppo.steps import PpoSteps

FAULTY_RANK, PLACE, FAULT = int(sys.argv[1]), sys.argv[2], sys.argv[3]
learner, describe = PpoSteps.learner, policy.describe_responses


def fail_at(place: str) -> None:
    if place == PLACE and int(os.environ["RANK"]) == FAULTY_RANK:
        if FAULT == "exception":
            raise ZeroDivisionError("a bug on one rank")
        if FAULT == "user error":
            raise RewardError("the reward on one rank failed")
        if FAULT == "hang":
            print("now hanging", flush=True)
            time.sleep(600)
        os.kill(os.getpid(), {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}[FAULT])


def failing_learner(steps: PpoSteps, update: int, *arguments: Any) -> Any:
    fail_at(str(update))
    return learner(steps, update, *arguments)


def failing_description(*arguments: Any, **named: Any) -> Any:
    fail_at("sampled")
    return describe(*arguments, **named)


PpoSteps.learner = failing_learner  # type: ignore[method-assign]
policy.describe_responses = failing_description
sys.argv[1:4] = []
main()
