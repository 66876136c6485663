"""`python -m bench.faults`: run the cases, see what the doctor says of them, write the table in `docs/doctor.md`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.faults.case import Case
from bench.faults.catalogue import CASES
from bench.faults.demo import demo_outcomes
from bench.faults.matrix import put_between, write_matrix
from bench.faults.running import Outcome, examine_case, run_case_apart, save_outcomes
from bench.processes import BenchError

BENCH = Path(__file__).parents[1]
WORK, RECORD, PAGE = BENCH / ".work" / "faults", BENCH / "results" / "doctor.json", BENCH.parent / "docs" / "doctor.md"


def main() -> int:
    """Run what the command line asks for; 1 where the doctor was wrong, 2 after a mistake."""
    options = arguments()
    try:
        again, cases = not options.diagnose, chosen(options.only)
        outcomes = [outcome_of(case, seed, again=again) for seed in options.seeds for case in cases]
        if options.only:
            print(f"\n{write_matrix(outcomes)}")
        else:
            outcomes += map(said, demo_outcomes(WORK, again=again))
            save_outcomes(outcomes, RECORD)
            put_between(PAGE, write_matrix(outcomes))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0 if all(outcome.good for outcome in outcomes) else 1


def outcome_of(case: Case, seed: int, *, again: bool) -> Outcome:
    """What the doctor says of a case, told in one line.

    Args:
        case: Which one.
        seed: Of base and run.
        again: Run it anew.
    """
    if again:
        run_case_apart(case, seed, WORK)
    return said(examine_case(case, seed, WORK))


def said(outcome: Outcome) -> Outcome:
    """Tell it in one line, and hand it on."""
    found = ", ".join(f"{found.rule} ({found.severity})" for found in outcome.findings) or "nothing"
    print(
        f"{'✓' if outcome.good else '✗'} {outcome.case} [{outcome.seed}], {outcome.seconds:.0f} s: {found}", flush=True
    )
    return outcome


def chosen(names: list[str]) -> list[Case]:
    """The cases of these names, all without any.

    Raises:
        BenchError: There is no case of a name.
    """
    for name in names:
        if name not in CASES:
            raise BenchError(f"--only: there is no case {name!r}; there are {', '.join(map(repr, CASES))}")
    return [case for case in CASES.values() if not names or case.name in names]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description="Prove kedge doctor on faulty runs.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these cases, and no page")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of bases and runs")
    parser.add_argument("--diagnose", action="store_true", help="run nothing; look at the runs that are there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
