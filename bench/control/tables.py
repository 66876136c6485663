"""The tables of the benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from bench.control.jobs import Outcome
from kedge_base.intervals import mean_interval

NAMES = {"kedge": "kedge", "sb3": "Stable-Baselines3", "cleanrl": "CleanRL", "alone": "environment alone"}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(each) + " |" for each in lines) + "\n"


def speed_table(outcomes: Iterable[Outcome]) -> str:
    """Environment steps per CPU second: the median over the rounds, with the lowest and highest, and ratios."""
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in outcomes:
        if each.kind == "speed":
            found[each.env, each.system, each.name].append(each.speed(first_steps=0.25 * each.total_steps))
    rows: list[list[str]] = []
    for (env, system, name), speeds in found.items():
        others = {peer: found.get((env, peer, "")) for peer in ("sb3", "cleanrl", "alone")}
        times = [f"{_ratio(speeds, each):.2f}" if each else "–" for each in others.values()]
        label = f"{NAMES[system]}{f', {name}' if name else ''}"
        spread = f"{median(speeds):,.0f} ({min(speeds):,.0f}–{max(speeds):,.0f})"
        rows.append([env, label, spread, *times, str(len(speeds))])
    head = ("environment", "system", "steps per CPU second", "× SB3", "× CleanRL", "of the environment", "rounds")
    return markdown(head, rows)


def _ratio(speeds: Sequence[float], others: Sequence[float]) -> float:
    """The median over the rounds of the ratio within a round: its runs are close in time."""
    return median(one / other for one, other in zip(speeds, others, strict=False))


def learning_table(
    outcomes: Iterable[Outcome], *, levels: Mapping[str, tuple[float, int]], chosen_on: Mapping[str, int]
) -> str:
    """Returns at the end of the budget, or the steps to a return where runs end at one.

    Args:
        outcomes: All runs.
        levels: By environment the return to be reached, and in how many steps; shorter runs are not asked for it.
        chosen_on: The last of the seeds on which settings were chosen, by environment; later ones have rows of their
            own.
    """
    groups: defaultdict[tuple[str, bool, str, str, int], list[Outcome]] = defaultdict(list)
    for each in outcomes:
        if each.kind == "learn":
            is_fresh = each.seed > chosen_on.get(each.env, 0)
            groups[each.env, is_fresh, each.system, each.name, each.total_steps].append(each)
    rows: list[list[str]] = []
    for (env, _, system, name, steps), runs in sorted(groups.items(), key=lambda item: item[0][:2]):
        seeds = [each.seed for each in runs]
        level, budget = levels[env]
        is_asked = steps >= budget
        reached = [first for each in runs if is_asked and (first := each.reached(level))]
        finals = [each.final_return for each in runs if each.final_return is not None]
        rows.append(
            [
                env,
                f"{NAMES[system]}{f', {name}' if name else ''}",
                f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else str(seeds[0]),
                f"{steps:,}",
                f"{len(reached)} of {len(runs)} ({level:,.0f})" if is_asked else "–",
                f"{median(each[0] for each in reached):,.0f}" if reached else "–",
                f"{median(each[1] for each in reached):.1f}" if reached else "–",
                f"{mean_interval(finals)}" if finals else "–",
                f"{median(each.cpu_seconds for each in runs):.1f}",
            ]
        )
    head = (
        "environment", "system", "seeds", "steps at most", "runs that reached (a return)", "steps to it (median)",
        "CPU s to it (median)", "return at the end", "CPU s (median)",
    )  # fmt: skip
    return markdown(head, rows)


def machine_line(outcomes: Iterable[Outcome]) -> str:
    """The load average under which runs were made: CPU seconds of a busy machine are longer than of an idle one."""
    loads = [load for each in outcomes for load in each.load]
    return f"load average during the runs: median {median(loads):.1f}, {min(loads):.1f} to {max(loads):.1f}"
