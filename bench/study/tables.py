"""The tables of the study."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean
from typing import Final

import numpy as np

from bench.study.statistics import improvement, interquartile_mean, with_interval
from bench.study.study import Study
from bench.study.unit import Outcome
from bench.tables import MISSING, Table

MOST: Final = 0.9
"""Share of plain PPO's gain. At its whole gain the curves are flat, and noise decides when they get there."""

TITLES: Final = {
    "sort": "Sorting on a scratchpad",
    "summaries": "Summaries of the demo's world",
    "stories": "Cheerful stories",
}


def tables(study: Study) -> list[Table]:
    """The tables of all that is recorded."""
    found = [_comparison(study, task) for task in study.tasks]
    found += [_until(study, task) for task in study.tasks]
    found += [_believed(study, task) for task in study.tasks]
    found += [_over_tasks(study, axis) for axis in ("flops", "tokens")]
    found += [_ablation(study, task) for task in study.plan.ablation.tasks if task in study.tasks]
    found += [_tuning(study, task) for task in study.tasks]
    return [table for table in found if table.rows]


def compared(study: Study, task: str) -> dict[str, list[Outcome]]:
    """The runs of every algorithm with all seeds recorded."""
    found = {name: study.compared(task, name) for name in study.plan.algorithms}
    return {name: outcomes for name, outcomes in found.items() if outcomes}


def _comparison(study: Study, task: str) -> Table:
    header = ("algorithm", "score at equal FLOPs", "score at equal tokens", "start", "tokens at equal FLOPs",
              "explained variance, late", "SFT steps per update", "learning rate", "epochs", "s per run")  # fmt: skip
    budget = study.plan.tasks[task].budget
    rows = []
    for name, outcomes in compared(study, task).items():
        point = study.tuned(task, name) or {}
        rows.append([
            name,
            _scores(study, task, outcomes, "flops"),
            _scores(study, task, outcomes, "tokens"),
            f"{fmean(each.scores[0] for each in outcomes):.3f}",
            f"{fmean(each.tokens_at(budget.flops) for each in outcomes):,.0f}",
            _explained(outcomes),
            f"{fmean(each.last['cost/sft_steps'] for each in outcomes):.1f}",
            f"{point['ppo.learning_rate']:g}",
            f"{point['ppo.num_epochs']}",
            f"{fmean(each.seconds for each in outcomes):.0f}",
        ])  # fmt: skip
    return Table(TITLES[task], header, rows)


def _until(study: Study, task: str) -> Table:
    """The cost of each until it has most of plain PPO's gain within its FLOPs."""
    found = compared(study, task)
    header = ("algorithm", "tokens", "FLOPs", "runs that reach it")
    if "ppo" not in found:
        return Table(TITLES[task], header, [])
    start = fmean(each.scores[0] for each in found["ppo"])
    end = float(
        interquartile_mean([[each.score_at("flops", study.plan.tasks[task].budget.flops) for each in found["ppo"]]])
    )
    goal = start + MOST * (end - start)
    rows = []
    for name, outcomes in found.items():
        tokens, flops = ([each.spent_until(axis, goal) for each in outcomes] for axis in ("tokens", "flops"))
        reached = sum(isfinite(each) for each in tokens)
        rows.append([name, _middle(tokens, ",.0f"), _middle(flops, ".2g"), f"{reached} of {len(outcomes)}"])
    title = f"{TITLES[task]}: spent until {goal:.3f}, nine tenths of plain PPO's gain; median and quartiles"
    return Table(title, header, rows)


def _middle(spent: Sequence[float], form: str) -> str:
    """The median and the quartiles; unknown for runs that never got there."""
    low, middle, high = (float(each) for each in np.quantile(spent, (0.25, 0.5, 0.75), method="nearest"))
    if not isfinite(low):
        return MISSING
    texts = [f"{each:{form}}" if isfinite(each) else "never" for each in (middle, low, high)]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def _believed(study: Study, task: str) -> Table:
    """The prefix test, averaged over a run's checks."""
    header = ("algorithm", "pairs across prompts", "ceiling", "prompt's mean", "pairs within a prompt", "ceiling",
              "explained variance of the means", "ceiling")  # fmt: skip
    figures = ("pairs_across", "pairs_across_ceiling", "pairs_across_prompt_mean", "pairs_within",
               "pairs_within_ceiling", "explained_variance", "explained_variance_ceiling")  # fmt: skip
    rows = [
        [name, *(_checked(outcomes, figure) for figure in figures)]
        for name, outcomes in compared(study, task).items()
        if any(each.checks for each in outcomes)
    ]
    return Table(f"{TITLES[task]}: can the critic be believed? Chance is 0.5", header, rows)


def _checked(outcomes: Sequence[Outcome], figure: str) -> str:
    known = [value for each in outcomes if (value := each.checked(figure)) is not None]
    return str(with_interval(interquartile_mean, [known])) if known else MISSING


def _over_tasks(study: Study, axis: str) -> Table:
    """All tasks together: 0 is the starting policy, 1 is plain PPO's interquartile mean at the same budget."""
    budgets = {task: getattr(study.plan.tasks[task].budget, axis) for task in study.tasks}
    found = {task: compared(study, task) for task in study.tasks}
    whole = [task for task, runs in found.items() if len(runs) == len(study.plan.algorithms)]
    title = f"All tasks at equal {'FLOPs' if axis == 'flops' else 'tokens'}: 0 is the start, 1 is plain PPO"
    header = ("algorithm", "score", *(f"beats {name}" for name in study.plan.algorithms))
    if len(whole) < 2:
        return Table(title, header, [])
    scores = {
        name: [_relative(found[task][name], found[task]["ppo"], axis, budgets[task]) for task in whole]
        for name in study.plan.algorithms
    }
    rows = [
        [
            name,
            f"{with_interval(interquartile_mean, own)}",
            *(MISSING if own is other else f"{with_interval(improvement, own, other)}" for other in scores.values()),
        ]
        for name, own in scores.items()
    ]
    return Table(title, header, rows)


def _relative(outcomes: Sequence[Outcome], unit: Sequence[Outcome], axis: str, budget: float) -> list[float]:
    start = fmean(each.scores[0] for each in unit)
    one = float(interquartile_mean([[each.score_at(axis, budget) for each in unit]]))
    return [(each.score_at(axis, budget) - start) / (one - start) for each in outcomes]


def _ablation(study: Study, task: str) -> Table:
    header = ("change", "score at equal FLOPs", "score at equal tokens", "beats the whole, at equal tokens",
              "explained variance, late", "SFT steps per update")  # fmt: skip
    whole = study.changed(task, None)
    tokens = study.plan.tasks[task].budget.tokens
    rows = []
    for change in (None, *study.plan.ablation.changes):
        outcomes = study.changed(task, change)
        if not outcomes or not whole:
            continue
        own, others = ([[each.score_at("tokens", tokens) for each in runs]] for runs in (outcomes, whole))
        rows.append([
            change or f"none: {study.plan.ablation.of}",
            _scores(study, task, outcomes, "flops"),
            _scores(study, task, outcomes, "tokens"),
            MISSING if change is None else f"{with_interval(improvement, own, others)}",
            _explained(outcomes),
            f"{fmean(each.last['cost/sft_steps'] for each in outcomes):.1f}",
        ])  # fmt: skip
    return Table(f"{TITLES[task]}: the stack, changed", header, rows)


def _tuning(study: Study, task: str) -> Table:
    grid = study.plan.grid(task)
    header = ("algorithm", *(f"{point['ppo.learning_rate']:g} × {point['ppo.num_epochs']}" for point in grid))
    rows = []
    for name in study.plan.algorithms:
        judged = [study.judged(task, name, point) for point in grid]
        known = [score for score in judged if score is not None]
        if known:
            cells = [MISSING if score is None else f"{score:.3f}" for score in judged]
            rows.append([name, *(f"**{c}**" if s == max(known) else c for c, s in zip(cells, judged, strict=True))])
    return Table(f"{TITLES[task]}: tuning, learning rate × epochs, score at equal FLOPs", header, rows)


def _scores(study: Study, task: str, outcomes: Sequence[Outcome], axis: str) -> str:
    budget = getattr(study.plan.tasks[task].budget, axis)
    found = with_interval(interquartile_mean, [[each.score_at(axis, budget) for each in outcomes]])
    return f"{found.value:.3f} ({found.low:.3f}–{found.high:.3f})"


def _explained(outcomes: Sequence[Outcome]) -> str:
    known = [each.explained_late for each in outcomes if each.explained_late is not None]
    return f"{interquartile_mean([known]):.2f}" if known else MISSING
