"""The `kedge` command with a fault in one of its ranks: `python -m tests.ranks.faulty RANK PLACE FAULT ppo …`.

PLACE is the number of an update of PPO, in which the fault happens before the optimizer steps; `step-N`, before a step
of supervised training; `sampled`, after the first batch of responses that a frozen policy has sampled; or `save`, where
a rank writes its part of the second checkpoint; or `pass`, in every training pass of PPO over more than 20 tokens.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from kedge.algorithm.experience import Experience
from kedge.cli import main
from kedge.stages import policy
from kedge.stages.ppo.trainer import Trainer
from kedge.training.checkpoint import shards
from kedge.training.learner import LanguageLearner
from kedge.training.supervised import loop
from kedge_base.errors import RewardError

FAULTY_RANK, PLACE, FAULT = int(sys.argv[1]), sys.argv[2], sys.argv[3]
estimate, describe, write_files = Trainer.estimate, policy.describe_responses, shards.write_files
take_step, taken, evaluate = loop._take_step, count(1), LanguageLearner.evaluate


def fail_at(place: str) -> None:
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if place == PLACE and int(os.environ["RANK"]) == FAULTY_RANK and not is_restart:
        if FAULT == "exception":
            raise ZeroDivisionError("a bug on one rank")
        if FAULT == "user error":
            raise RewardError("the reward on one rank failed")
        if FAULT == "out of memory":
            torch.empty(2**50, dtype=torch.uint8)
        if FAULT == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        if FAULT == "hang":
            print("now hanging", flush=True)
            time.sleep(600)
        os.kill(os.getpid(), {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}[FAULT])


def failing_estimate(trainer: Trainer, *arguments: Any, **named: Any) -> Any:
    fail_at(str(trainer.update))
    return estimate(trainer, *arguments, **named)


def failing_description(*arguments: Any, **named: Any) -> Any:
    fail_at("sampled")
    return describe(*arguments, **named)


def failing_write(part: Path, *arguments: Any) -> Any:
    if part.name.startswith(".update-000002."):
        fail_at("save")
    return write_files(part, *arguments)


def failing_step(*arguments: Any, **named: Any) -> Any:
    fail_at(f"step-{next(taken)}")
    return take_step(*arguments, **named)


def failing_pass(learner: LanguageLearner, batch: Experience) -> Any:
    outputs = evaluate(learner, batch)
    if batch.rollout.num_tokens > 20:
        fail_at("pass")
    return outputs


loop._take_step = failing_step
LanguageLearner.evaluate = failing_pass  # type: ignore[method-assign]
shards.write_files = failing_write
Trainer.estimate = failing_estimate  # type: ignore[method-assign]
policy.describe_responses = failing_description
sys.argv[1:4] = []
main()
