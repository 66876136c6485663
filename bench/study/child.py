"""`python -m bench.study.child JOB.json`: trains a task's start, or runs one unit, in a process with one thread.

The job names the task, the files of the stories, the folder of the starts, and for a unit its settings and where the
outcome goes. Everything runs through the functions that users call.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import kedge
from bench.study.sort_task import SORT
from bench.study.stories_task import StoryFiles, stories_task
from bench.study.summaries_task import SUMMARIES
from bench.study.task import QUIET, Problem, Task, critic_folder, start_folder
from bench.study.unit import Budget, Outcome, Unit
from kedge_base.run_folder.output import replace_file
from kedge_base.run_folder.record_format import EVALUATIONS_FILE, read_json_lines

EXPLAINED: Final = "value/explained_variance"
KEPT: Final = (
    "reward/score_mean", "reward/score_std", "objective/kl", "policy/entropy", "policy/clip_fraction",
    "response/length", "response/eos_rate", "cost/sft_steps", "value/returns_std", "group/constant",
    "advantage/critic_weight", "advantage/variance_saved",
)  # fmt: skip
PRETRAINED: Final = "{critic}"
CHECKED: Final = "critic/"
CHECK: Final = "critic/pairs_across"


def main(job: Mapping[str, Any]) -> None:
    """Do a job."""
    task = _task(job["task"], job["stories"])
    folder = start_folder(job["task"], task, Path(job["starts"]))
    if "unit" not in job:
        return
    unit = Unit(**{**job["unit"], "budget": Budget(**job["unit"]["budget"])})
    outcome = run_unit(unit, task.problem(folder), critic_folder(folder), Path(job["out"]))
    replace_file(Path(job["outcome"]), [json.dumps(asdict(outcome)).encode()])


def run_unit(
    unit: Unit, problem: Problem, critic: Path, out: Path, *, read: Callable[[Path], None] = lambda out: None
) -> Outcome:
    """Train until both budgets are spent.

    Args:
        unit: The run.
        problem: The task's model, prompts and reward.
        critic: The folder that replaces `{critic}` in its settings.
        out: The run's folder; an earlier one is replaced, and it is removed at the end.
        read: Called with it before that.
    """
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    cpu_started = time.process_time()
    result = kedge.ppo(
        model=problem.model,
        prompts=problem.prompts,
        eval_prompts=problem.held_out,
        reward=problem.reward,
        out=out,
        on_update=_Stop(unit.budget, unit.responses),
        **QUIET,
        **{
            **with_critic(unit.settings, critic),
            "ppo.eval_every.num_prompts": len(problem.held_out),
            "runtime.seed": unit.seed,
        },
    )
    outcome = outcome_of(
        unit,
        result.metrics,
        read_json_lines(out / EVALUATIONS_FILE),
        score=problem.score,
        start=_digest(problem.model),
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
    )
    read(out)
    shutil.rmtree(out)
    return outcome


def with_critic(settings: Mapping[str, Any], critic: Path) -> dict[str, Any]:
    """The settings with the critic's folder instead of `{critic}`, which is the same on every machine."""
    return {name: str(critic) if value == PRETRAINED else value for name, value in settings.items()}


def outcome_of(
    unit: Unit, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], *, score: str, **more: Any
) -> Outcome:
    """The record of a run.

    Args:
        unit: The run.
        rows: Its metrics.
        evaluations: Its evaluations, the start's first.
        score: The column of the evaluations that the curve shows.
        more: Further attributes of the outcome.
    """
    at = [int(each["update"]) for each in evaluations]
    spans = [rows[: at[0]], *(rows[before:now] for before, now in pairwise(at))]
    return Outcome(
        key=unit.key,
        task=unit.task,
        seed=unit.seed,
        updates=at,
        tokens=[sum(sampled_tokens(row, unit.responses) for row in rows[:update]) for update in at],
        flops=[sum(map(flops, rows[:update])) for update in at],
        scores=[float(each[score]) for each in evaluations],
        explained=[_mean(row.get(EXPLAINED) for row in span) for span in spans],
        last={name: value for name, value in rows[-1].items() if name in KEPT},
        checks=[
            {name: value for name, value in row.items() if name.startswith(CHECKED)} for row in rows if CHECK in row
        ],
        **more,
    )


def sampled_tokens(row: Mapping[str, float], responses: int) -> float:
    """The tokens that an update sampled.

    Args:
        row: Its metrics.
        responses: Its responses.
    """
    return row.get("response/length", 0.0) * responses


def flops(row: Mapping[str, float]) -> float:
    """The FLOPs of an update; a judge of weight 0 is no part of it."""
    return sum(value for name, value in row.items() if name.startswith("flops/") and name != "flops/judge")


class _Stop:
    """Ends a run with the first evaluation after both budgets are spent."""

    def __init__(self, budget: Budget, responses: int) -> None:
        self._budget = budget
        self._responses = responses
        self._tokens = 0.0
        self._flops = 0.0

    def __call__(self, update: kedge.Update) -> None:
        self._tokens += sampled_tokens(update.metrics, self._responses)
        self._flops += flops(update.metrics)
        if "eval/score" in update.metrics and self._budget.is_spent(tokens=self._tokens, flops=self._flops):
            update.stop("the budget is spent")


def _task(name: str, stories: Mapping[str, str] | None) -> Task:
    if name == "stories":
        assert stories is not None, "the parent skips the stories without files"
        return stories_task(StoryFiles(**{part: Path(path) for part, path in stories.items()}))
    return {"sort": SORT, "summaries": SUMMARIES}[name]


def _digest(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:12]


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
