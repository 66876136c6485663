"""`python -m bench.study`: run what is not recorded yet, and write `bench/study/RESULTS.md`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from bench.processes import BenchError
from bench.study.page import draw_page, write_page
from bench.study.plan import read_plan
from bench.study.pool import Pool
from bench.study.study import PARTS, Study
from bench.study.unit import Outcome, append_outcome

BENCH = Path(__file__).parents[1]
WORK = BENCH / ".work" / "study"
RECORD = BENCH / "results" / "study.jsonl"
DOCS = BENCH.parent / "docs"
FILES = ("model", "stories", "held_out", "lexicon")


def main() -> int:
    """Run the study. Returns 2 on an error."""
    options = arguments()
    record = options.record or (WORK / "small.jsonl" if options.small else RECORD)
    try:
        study = study_of(options, record)
        if options.count:
            print_count(study, options.processes)
        elif not options.page:
            run_missing(study, record, options)
        finish(study, options)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


def study_of(options: argparse.Namespace, record: Path) -> Study:
    """The study that the command line asks for.

    Raises:
        BenchError: A task is unknown, or the record is of another one.
    """
    plan = read_plan(small=options.small)
    for name in options.tasks or ():
        if name not in plan.tasks:
            raise BenchError(f"--tasks: there is no task {name!r}; there are {', '.join(map(repr, plan.tasks))}")
    tasks = tuple(options.tasks or plan.tasks)
    if options.stories is None and not options.page and "stories" in tasks:
        print("The task `stories` is left out: it needs --stories MODEL STORIES HELD_OUT LEXICON")
        tasks = tuple(name for name in tasks if name != "stories")
    return Study.of(plan, tasks, record)


def run_missing(study: Study, record: Path, options: argparse.Namespace) -> None:
    """Train the starts and run the parts in order.

    Raises:
        BenchError: A run failed; the others of its part are recorded.
    """
    files: dict[str, str] | None = None
    if options.stories is not None:
        files = {name: str(path.resolve()) for name, path in zip(FILES, options.stories, strict=True)}
    pool = Pool(WORK, options.processes, files)
    pool.build(study.tasks)
    for part in PARTS[: PARTS.index(options.until) + 1]:
        missing = study.missing(part)
        print(f"{part}: {len(missing)} of {len(study.units(part))} runs to do", flush=True)
        texts = {unit.key: text for text, unit in missing.items()}
        count = 0

        def finished(outcome: Outcome, texts: dict[str, str] = texts) -> None:
            nonlocal count
            count += 1
            study.outcomes[outcome.key] = outcome
            append_outcome(outcome, record)
            print(
                f"{count}/{len(texts)} {texts[outcome.key]}: {outcome.scores[0]:.3f} to {outcome.scores[-1]:.3f}, "
                f"{outcome.seconds:.0f} s ({outcome.cpu_seconds:.0f} s of CPU)",
                flush=True,
            )

        pool.run(missing.values(), finished)


def print_count(study: Study, processes: int) -> None:
    """Print how many runs are missing, and about how long they take by the recorded ones."""
    for part in PARTS:
        missing = study.missing(part)
        print(f"{part}: {len(study.units(part)) - len(missing)} runs recorded, {len(missing)} to do", end="")
        seconds = [_seconds(study, unit.task) for unit in missing.values()]
        print(f", about {sum(seconds) / processes / 3600:.1f} hours" if all(seconds) and seconds else "")


def _seconds(study: Study, task: str) -> float:
    """The mean duration of the task's recorded runs; 0 without any."""
    known = [each.seconds for each in study.outcomes.values() if each.task == task]
    return fmean(known) if known else 0.0


def finish(study: Study, options: argparse.Namespace) -> None:
    """Write the page; print it for a small study and for one with its own record."""
    if options.count:
        return
    study = replace(study, tasks=tuple(study.plan.tasks))  # recorded ones are shown, whether or not they were run now
    if options.small or options.record:
        print(write_page(study))
        return
    Path(__file__).with_name("RESULTS.md").write_text(write_page(study), encoding="utf-8")
    draw_page(study, Path(__file__).parent)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.study", description=__doc__)
    parser.add_argument("--small", action="store_true", help="one task with smaller budgets, in minutes; prints tables")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="run these tasks only")
    parser.add_argument(
        "--stories",
        nargs=4,
        type=Path,
        metavar=("MODEL", "STORIES", "HELD_OUT", "LEXICON"),
        help="the files of the task `stories`: a story model's folder, two JSONL files with `text`, a word list",
    )
    parser.add_argument("--until", choices=PARTS, default=PARTS[-1], help="the last part that is run")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--count", action="store_true", help="print how many runs are missing, and run nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the record, and run nothing")
    parser.add_argument("--record", type=Path, help="file of the outcomes; runs in it are not repeated")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
