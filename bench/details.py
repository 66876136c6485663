"""`python -m bench.details`: what the details of PPO's implementations change, one at a time.

The first row is kedge's defaults; every other differs from them in one detail. Tasks, scores and intervals are those of
`bench.table1`: a run's score is the mean return of its last 100 episodes, scaled per task so that the untrained policy
has 0 and the best row's mean has 1. What is recorded is not run again: the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.control.jobs import Job, Outcome, Peers, read_outcomes, run_jobs
from bench.control.recipes import Recipe
from bench.control.tables import machine_line, markdown
from bench.processes import BenchError
from bench.study.statistics import with_interval
from bench.table1 import KL, RETURN, TASKS, final_return, longest, mean_of, scores_of

HERE = Path(__file__).parent
RECORD = HERE / "results" / "details.jsonl"
WORK = HERE / ".work" / "details"


@dataclass(frozen=True)
class Detail:
    """A row of the table.

    Attributes:
        name: The difference.
        settings: By dotted name.
    """

    name: str
    settings: Mapping[str, Any]


DETAILS: Final[Sequence[Detail]] = (
    Detail("kedge's defaults", {}),
    Detail("observations as they are", {"control.normalize_observations": False}),
    Detail("rewards as they are", {"control.reward_scaling": "none"}),
    Detail("advantages not whitened", {"control.whiten_advantages": "none"}),
    Detail("constant learning rate", {"control.schedule": "constant"}),
    Detail("gradients not clipped", {"control.max_grad_norm": None}),
    Detail("one network for both", {"control.critic": "shared"}),
    Detail("λ = 1: returns as played", {"control.gae_lambda": 1.0}),
    Detail("actions squashed by a tanh", {"control.action_bounds": "squash"}),
    Detail("ReLU", {"control.activation": "relu"}),
)


def main() -> int:
    """Run the command line; returns 2 after an error."""
    options = arguments()
    try:
        if not options.page:
            run_jobs(
                list(jobs_of(options)), record=options.record, work=WORK, peers=Peers(), processes=options.processes
            )
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; the same command resumes", file=sys.stderr)
        return 130
    if found := list(read_outcomes(options.record).values()):
        print(f"\n{table(found)}\n{machine_line(found)}")
    return 0


def jobs_of(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Seed by seed, so that what is recorded after any time is a whole table of fewer seeds."""
    for seed in range(1, options.seeds + 1):
        for detail in DETAILS:
            for env in TASKS if options.envs is None else options.envs:
                steps = round(TASKS[env] * options.share)
                settings = {"control.compile": True, **detail.settings}
                yield (
                    detail.name,
                    Job("detail", "kedge", Recipe(env), seed, steps, settings=settings, metrics=(KL, RETURN)),
                )


def table(outcomes: Sequence[Outcome]) -> str:
    """The table: scores with 95 % intervals, and the mean return on every task."""
    outcomes = longest(outcomes)
    scores = scores_of(outcomes)
    tasks = [env for env in TASKS if any(each.env == env for each in outcomes)]
    rows: list[list[str]] = []
    for detail in DETAILS:
        if detail.name in scores:
            own = [each for each in outcomes if each.name == detail.name]
            fields = ", ".join(f"`{name}={_shown(value)}`" for name, value in detail.settings.items())
            finals = ([final_return(each) for each in own if each.env == env] for env in tasks)
            means = [f"{fmean(each):,.0f}" if each else "–" for each in finals]
            seeds = ", ".join(str(len(each)) for each in scores[detail.name])
            rows.append([detail.name, fields, f"{with_interval(mean_of, scores[detail.name])}", *means, seeds])
    return markdown(("detail", "field", "score (95 %)", *tasks, "seeds per task"), rows)


def _shown(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.details", description="Details of PPO, one at a time.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--envs", nargs="+", choices=sorted(TASKS), metavar="ID", help="tasks; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="of each task's steps, for a trial")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, one per core")
    parser.add_argument("--page", action="store_true", help="print what is recorded")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file of the runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
