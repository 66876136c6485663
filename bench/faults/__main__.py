"""`python -m bench.faults`: run and diagnose the cases, and write the table in its `RESULTS.md`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.faults.case import Case
from bench.faults.catalogue import CASES
from bench.faults.demo import demo_outcomes
from bench.faults.matrix import write_matrix
from bench.faults.running import Outcome, examine_case, follow_advice, run_case_apart, save_outcomes
from bench.processes import BenchError
from bench.tables import renewed

BENCH = Path(__file__).parents[1]
WORK = BENCH / ".work" / "faults"
RECORD = BENCH / "results" / "doctor.json"
PAGE = BENCH / "faults" / "RESULTS.md"


def main() -> int:
    """Run the selected cases. Returns 1 if a diagnosis was wrong, 2 on an error."""
    options = arguments()
    try:
        rerun = not options.diagnose
        cases = select(options.only)
        outcomes = [
            outcome_of(case, seed, rerun=rerun, follow=seed == options.seeds[0])
            for seed in options.seeds
            for case in cases
        ]
        if options.only:
            print(f"\n{write_matrix(outcomes)}")
        else:
            outcomes += map(printed, demo_outcomes(WORK, rerun=rerun))
            save_outcomes(outcomes, RECORD)
            block = f"\n{write_matrix(outcomes)}\n"
            PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), "faults", block), encoding="utf-8")
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0 if all(outcome.good for outcome in outcomes) else 1


def outcome_of(case: Case, seed: int, *, rerun: bool, follow: bool) -> Outcome:
    """Diagnose a case and print the result.

    Args:
        case: The case.
        seed: Seed of base and run.
        rerun: Run it first; otherwise the existing run is diagnosed.
        follow: Repeat a faulty run with what the doctor advises.
    """
    if rerun:
        run_case_apart(case, seed, WORK)
    outcome = examine_case(case, seed, WORK)
    return printed(follow_advice(case, outcome, WORK, rerun=rerun) if follow and case.rule else outcome)


def printed(outcome: Outcome) -> Outcome:
    """Print an outcome on one line, and return it."""
    found = ", ".join(f"{found.rule} ({found.severity})" for found in outcome.findings) or "nothing"
    print(
        f"{'✓' if outcome.good else '✗'} {outcome.case} [{outcome.seed}], {outcome.seconds:.0f} s: {found}"
        f"{f'; {outcome.followed}' if outcome.followed else ''}",
        flush=True,
    )
    return outcome


def select(names: list[str]) -> list[Case]:
    """The cases with these names; all cases if there are no names.

    Raises:
        BenchError: A name is unknown.
    """
    for name in names:
        if name not in CASES:
            raise BenchError(f"--only: there is no case {name!r}; there are {', '.join(map(repr, CASES))}")
    return [case for case in CASES.values() if not names or case.name in names]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description="Evaluate kedge doctor on faulty and healthy runs."
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="run these cases only, and do not write the page"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="seeds of bases and runs")
    parser.add_argument("--diagnose", action="store_true", help="diagnose existing runs without running anything")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
