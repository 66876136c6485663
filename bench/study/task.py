"""A task: a start that is trained once, and the prompts and reward that every run has."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import kedge

QUIET: Final[Mapping[str, Any]] = {
    "runtime.num_threads": 1,
    "runtime.report": False,
    "runtime.num_samples": 0,
    "runtime.num_fixed_prompts": 0,
    "checkpoint.every.minutes": None,
    "checkpoint.keep_best": "none",
}
"""Of every run: one thread, and no files that the study does not read."""

CRITIC: Final = "critic"


@dataclass(frozen=True)
class Problem:
    """The models and data of a task's runs.

    Attributes:
        model: Folder of the policy that they start from.
        prompts: Rows.
        held_out: Rows of the evaluations.
        reward: As `kedge.ppo` takes it.
        score: The column of `evaluations.jsonl` that a curve shows.
    """

    model: Path
    prompts: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    reward: Any
    score: str


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        build: Trains what the runs start from, in an existing folder.
        problem: Reads that folder.
        critic: Settings of `kedge critic`; some runs start from its critic.
        source: The file with its recipe.
    """

    build: Callable[[Path], None]
    problem: Callable[[Path], Problem]
    critic: Mapping[str, Any]
    source: str


def start_folder(name: str, task: Task, work: Path) -> Path:
    """The folder of a task's start, trained unless it exists.

    Its name has a hash of the task's module, so that a change of the recipe trains a new one.

    Args:
        name: The task's name.
        task: The task.
        work: The folder of all starts.
    """
    done = work / f"{name}-{hashlib.sha256(Path(task.source).read_bytes()).hexdigest()[:8]}"
    if not done.is_dir():
        building = done.with_suffix(".part")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        task.build(building)
        _train_critic(task, building)
        os.rename(building, done)
    return done


def critic_folder(start: Path) -> Path:
    """The critic among what a task's runs start from."""
    return start / CRITIC / "model"


def _train_critic(task: Task, folder: Path) -> None:
    problem = task.problem(folder)
    kedge.critic(
        model=problem.model,
        prompts=problem.prompts,
        eval_prompts=problem.held_out,
        reward=problem.reward,
        out=folder / CRITIC,
        **{**QUIET, **task.critic},
    )
