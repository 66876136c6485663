"""Judges the runs that `bench.abroad.make` has made: `python -m bench.abroad RUNS --write` writes RESULTS.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.abroad.cases import CASES, Case
from kedge_inspect.abroad.runs import Origin, read_any_run
from kedge_inspect.abroad.sources import ARGS
from kedge_inspect.doctor import Finding, diagnose

RESULTS = Path(__file__).with_name("RESULTS.md")
ALARMS = ("serious", "warning")
NONE = "–"


@dataclass(frozen=True)
class Verdict:
    """What the doctor says of a run."""

    case: Case
    seed: int
    findings: Sequence[Finding]

    @property
    def place(self) -> int:
        """The place of the first finding that names the fault; 0 if none does."""
        places = [number for number, found in enumerate(self.findings, 1) if found.rule in self.case.rules]
        return min(places, default=0)

    @property
    def alarms(self) -> list[Finding]:
        """The findings that are more than notes."""
        return [found for found in self.findings if found.severity in ALARMS]


def judge(folder: Path, seeds: Iterable[int], *, with_settings: bool = True) -> list[Verdict]:
    """Diagnose the runs of the healthy cases and of the visible faults.

    Args:
        folder: Where the runs are.
        seeds: The seeds.
        with_settings: Whether the doctor may read `training_args.bin`.
    """
    verdicts = []
    for case in CASES:
        for seed in seeds:
            run = folder / f"{case.trainer}-{case.name}-{seed}"
            if (case.is_healthy or case.is_visible) and run.is_dir():
                verdicts.append(Verdict(case, seed, _diagnosed(run, with_settings=with_settings)))
    return verdicts


def _diagnosed(run: Path, *, with_settings: bool) -> list[Finding]:
    hidden = run / f"hidden-{ARGS}"
    if not with_settings and (run / ARGS).is_file():
        (run / ARGS).rename(hidden)
    try:
        origin = Origin() if with_settings else Origin(library=f"trl-{run.name.partition('-')[0]}")
        return diagnose(read_any_run(run, origin=origin))
    finally:
        if hidden.is_file():
            hidden.rename(run / ARGS)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The rates in a sentence."""
    faulty = [verdict for verdict in verdicts if verdict.case.is_visible]
    healthy = [verdict for verdict in verdicts if verdict.case.is_healthy]
    first = sum(verdict.place == 1 for verdict in faulty)
    top = sum(0 < verdict.place <= 3 for verdict in faulty)
    alarmed = sum(bool(verdict.alarms) for verdict in healthy)
    return (
        f"the fault is named first in {_share(first, len(faulty))} and among the first three in "
        f"{_share(top, len(faulty))} of the runs with a visible fault; {_share(alarmed, len(healthy))} of the healthy "
        "runs have a warning or a serious finding"
    )


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({count / max(total, 1):.0%})"


def table(verdicts: Sequence[Verdict], keep: Callable[[Case], bool], columns: Sequence[str]) -> str:
    """A row per case with the findings of each seed, in their order; the rules that name the fault are bold."""
    rows = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for case in filter(keep, CASES):
        found = [verdict for verdict in verdicts if verdict.case == case]
        if found:
            cells = [_findings(verdict) for verdict in found]
            rows.append(f"| {case.trainer} | {case.name} | {case.why or NONE} | {' ◦ '.join(cells)} |")
    return "\n".join(rows)


def _findings(verdict: Verdict) -> str:
    shown = verdict.findings if verdict.case.is_visible else verdict.alarms
    names = [f"**{each.rule}**" if each.rule in verdict.case.rules else each.rule for each in shown[:4]]
    return ", ".join(names) or "nothing"


def main() -> None:
    """Judge the runs and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--write", action="store_true", help="Write RESULTS.md instead of printing.")
    given = parser.parse_args()
    known = judge(given.runs, given.seeds)
    bare = judge(given.runs, given.seeds, with_settings=False)
    invisible = [case for case in CASES if not case.is_healthy and not case.is_visible]
    parts = [
        f"With `training_args.bin`: {summary(known)}.",
        f"Without it: {summary(bare)}.",
        "### Visible faults\n\nFindings of each seed, separated by ◦; at most four.",
        table(known, lambda case: case.is_visible, ("trainer", "fault", "visible in the log", "findings")),
        "### Healthy runs\n\nOnly warnings and serious findings.",
        table(known, lambda case: case.is_healthy, ("trainer", "run", "what differs", "findings")),
        "### Faults that the log does not show",
        "\n".join(
            ["| trainer | fault | visible in the log |", "|---|---|---|"]
            + [f"| {case.trainer} | {case.name} | {case.why} |" for case in invisible]
        ),
    ]
    text = "\n\n".join(parts)
    if not given.write:
        print(text)
        return
    head, mark, _ = RESULTS.read_text(encoding="utf-8").partition("<!-- runs -->")
    RESULTS.write_text(f"{head}{mark}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
