"""`python -m bench.table1`: Table 1 of the PPO paper in miniature, and three older algorithms beside it.

Every variant trains on the same tasks with the same seeds, and differs from the others only as its row states.
A run's score is the mean return of its last 100 episodes, as in the paper. Scores are scaled per task so that the
untrained policy has 0 and the best variant's mean has 1, and averaged over tasks and seeds. What is recorded is not run
again: the same command resumes.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from bench.control.jobs import Job, Outcome, Peers, read_outcomes, run_jobs
from bench.control.recipes import Recipe
from bench.control.tables import machine_line, markdown
from bench.processes import BenchError
from bench.study.statistics import Strata, with_interval

HERE = Path(__file__).parent
RECORD = HERE / "results" / "table1.jsonl"
WORK = HERE / ".work" / "table1"

KL = "policy/distance_moved"
RETURN = "episode/return_mean"

TASKS: Final[Mapping[str, int]] = {"HalfCheetah-v5": 200_000, "InvertedPendulum-v5": 100_000, "Hopper-v5": 150_000}
"""Steps of a run: a tenth to a fifth of the paper's million, on three of its seven tasks."""

COMMON: Final[Mapping[str, Any]] = {
    "control.schedule": "constant",
    "control.max_grad_norm": None,
    "control.whiten_advantages": "batch",
    "control.action_bounds": "none",
    "control.compile": True,
}
"""As in the code behind the paper. Gymnasium charges HalfCheetah and Hopper for actions as they were given, so clipping
them to the bounds rewards a policy with actions far outside. Compiled steps are the same and take less time.
"""


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Attributes:
        name: As in the paper.
        settings: By dotted name.
        published: The paper's score; None for what its table does not have.
        recipe: Changes of the common settings.
        kl_target: KL per update that it aims at, nats; None without an aim.
    """

    name: str
    settings: Mapping[str, Any]
    published: float | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    kl_target: float | None = None


def _adaptive(target: float, published: float) -> Variant:
    settings = {"control.policy_loss": "kl_penalty_adaptive", "control.kl_target": target}
    return Variant(f"adaptive KL, d = {target:g}", settings, published, kl_target=target)


def _fixed(coef: float, published: float) -> Variant:
    settings = {"control.policy_loss": "kl_penalty_fixed", "control.surrogate_kl_coef": coef}
    return Variant(f"fixed KL, β = {coef:g}", settings, published)


UNCLIPPED: Final[Mapping[str, Any]] = {"control.policy_loss": "unclipped"}
ONE_STEP: Final[Mapping[str, Any]] = {"num_epochs": 1, "num_minibatches": 1, "gae_lambda": 1.0}
TRPO: Final[Mapping[str, Any]] = {"control.policy_loss": "trust_region", "control.compile": False}
BOUNDED: Final[Mapping[str, Any]] = {"control.max_grad_norm": 0.5}
A2C: Final[Mapping[str, Any]] = {"num_envs": 8, "num_steps": 8, "learning_rate": 7e-4}

VARIANTS: Final[Sequence[Variant]] = (
    Variant("clipping, ε = 0.2", {}, 0.82),
    Variant("no clipping or penalty", UNCLIPPED, -0.39),
    _adaptive(0.01, 0.74),
    _fixed(3.0, 0.72),
    Variant("clipping, ε = 0.1", {}, 0.76, {"clip_range": 0.1}),
    Variant("clipping, ε = 0.3", {}, 0.70, {"clip_range": 0.3}),
    _adaptive(0.003, 0.68),
    _adaptive(0.03, 0.71),
    _fixed(0.3, 0.62),
    _fixed(1.0, 0.71),
    _fixed(10.0, 0.69),
    Variant("TRPO, δ = 0.01", TRPO, None, {"learning_rate": 1e-3}, kl_target=0.01),
    Variant("A2C", {**UNCLIPPED, "control.whiten_advantages": "none"}, None, {**ONE_STEP, **A2C}),
    Variant("vanilla policy gradient", UNCLIPPED, None, {**ONE_STEP, "learning_rate": 3e-3}),
    Variant("clipping, ε = 0.2, gradients bounded", BOUNDED),
    Variant("no clipping or penalty, gradients bounded", {**UNCLIPPED, **BOUNDED}),
)
"""The four that the paper's text compares come first. TRPO's rate is the critic's. The three after the paper's rows are
as in kedge's presets `trpo`, `a2c` and `vanilla-pg`. The last two bound the gradient's norm, as PPO's later code does.
"""


def main() -> int:
    """Run the command line; returns 2 after an error."""
    options = arguments()
    try:
        if not options.page:
            jobs = list(jobs_of(options))
            run_jobs(jobs, record=options.record, work=WORK, peers=Peers(), processes=options.processes)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; the same command resumes", file=sys.stderr)
        return 130
    found = [each for each in read_outcomes(options.record).values() if each.kind == "table"]
    if found:
        print(f"\n{table(found)}\n{machine_line(found)}")
    return 0


def jobs_of(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Seed by seed, so that what is recorded after any time is a whole table of fewer seeds."""
    for seed in range(1, options.seeds + 1):
        for variant in VARIANTS[: options.variants]:
            for env, steps in TASKS.items():
                recipe = replace(Recipe(env), **variant.recipe)
                settings = {**COMMON, **variant.settings}
                steps = round(steps * options.share)
                yield variant.name, Job("table", "kedge", recipe, seed, steps, settings=settings, metrics=(KL, RETURN))


def longest(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The runs of each task with the most steps: a trial with fewer is not mixed with them."""
    steps = {each.env: max(other.total_steps for other in outcomes if other.env == each.env) for each in outcomes}
    return [each for each in outcomes if each.total_steps == steps[each.env]]


def final_return(outcome: Outcome) -> float:
    """Mean return of the last 100 episodes, or of all where there were fewer.

    Raises:
        BenchError: No episode was finished.
    """
    known = [each for each in outcome.metrics[RETURN] if each is not None]
    if not known:
        raise BenchError(f"{outcome.name} on {outcome.env}: no episode was finished")
    return known[-1]


def scores_of(outcomes: Sequence[Outcome]) -> dict[str, Strata]:
    """Scaled scores of each variant: a list per task, a number per seed.

    (return − untrained) / (best − untrained), with the best variant's mean over seeds. The untrained policy's return is
    that of the first update of every run that plays as many steps in it as PPO does.
    """
    finals: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, list[float]] = defaultdict(list)
    for each in sorted(outcomes, key=lambda outcome: outcome.seed):
        finals[each.name][each.env].append(final_return(each))
        if each.metrics[RETURN][0] is not None and each.marks[0][0] == Recipe(each.env).steps_per_update:
            first[each.env].append(each.metrics[RETURN][0] or 0.0)
    best = {env: max(fmean(tasks[env]) for tasks in finals.values() if env in tasks) for env in first}
    start = {env: fmean(values) for env, values in first.items()}
    return {
        name: [
            [(value - start[env]) / (best[env] - start[env]) for value in tasks[env]] for env in TASKS if env in tasks
        ]
        for name, tasks in finals.items()
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """The table: scores with 95 % intervals, the KL of an update, and the paper's scores."""
    outcomes = longest(outcomes)
    scores = scores_of(outcomes)
    kls: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, int] = defaultdict(int)
    for each in outcomes:
        kls[each.name] += [kl for kl in each.metrics[KL] if kl is not None]
        failed[each.name] += bool(each.failed)
    rows: list[list[str]] = []
    for variant in VARIANTS:
        if variant.name in scores:
            strata = scores[variant.name]
            interval = with_interval(mean_of, strata)
            published = "–" if variant.published is None else f"{variant.published:.2f}"
            aim = "" if variant.kl_target is None else f" (aim {variant.kl_target:g})"
            seeds = ", ".join(str(len(each)) for each in strata)
            rows.append(
                [variant.name, f"{interval}", published, f"{median(kls[variant.name]):.4f}{aim}", seeds,
                 str(failed[variant.name] or "–")]
            )  # fmt: skip
    head = ("variant", "score (95 %)", "paper", "median KL of an update", "seeds per task", "runs that diverged")
    return markdown(head, rows)


def mean_of(strata: Strata) -> np.ndarray:
    """The mean over tasks of the means over seeds, for each resample."""
    return np.mean([np.mean(each, axis=-1) for each in strata], axis=0)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.table1", description="Table 1 of the PPO paper in miniature."
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--variants", type=int, default=len(VARIANTS), help="only the first so many rows; 4 are the core"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of each task's steps, for a trial")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, one per core")
    parser.add_argument("--page", action="store_true", help="print what is recorded")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file of the runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
