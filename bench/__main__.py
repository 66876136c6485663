"""`python -m bench`: measure, print the tables, write `docs/benchmarks.md`."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.cases import Case, Results, cpu_cases, gpu_cases, measure_case
from bench.machine import available_cores, describe_machine, describe_versions
from bench.page import cpu_tables, write_page
from bench.processes import BenchError, run_alone
from bench.record import Record
from bench.systems import Machine, Workshop
from bench.tables import gpu_table

HERE = Path(__file__).parent
WORK, PAGE = HERE / ".work", HERE.parent / "docs" / "benchmarks.md"
CPU_RECORD, GPU_RECORD = HERE / "results" / "cpu.json", HERE / "results" / "gpu.json"
QUICK_UPDATES = 3


def main() -> int:
    """Run what the command line asks for; 2 after a mistake."""
    options = arguments()
    try:
        if not options.page:
            measure(options)
        if options.page or not (options.only or options.quick):
            publish()
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def measure(options: argparse.Namespace) -> None:
    """Measure the cases, print their tables and write the record down; part of the cases leave no record."""
    check_peer(options.peer)
    workshop = Workshop(WORK, options.peer, Machine("cuda" if options.gpu else "cpu", options.threads))
    WORK.mkdir(exist_ok=True)
    card = card_facts(workshop) if options.gpu else {}
    cases = (gpu_cases if options.gpu else cpu_cases)(num_rounds=options.rounds)
    results: Results = {}
    for case in chosen(cases, options.only):
        results[case.name] = measure_case(quick(case) if options.quick else case, workshop, say)
    record = Record(describe_machine(options.threads), describe_versions(options.peer), options.rounds, results, card)
    for table in [gpu_table(results["gpu"], card)] if options.gpu else cpu_tables(record):
        print(f"\n{table.title}\n{table.markdown()}")
    partial = options.only or options.quick
    record.save(WORK / "partial.json" if partial else GPU_RECORD if options.gpu else CPU_RECORD)


def publish() -> None:
    """Write the page from the records of the last whole runs.

    Raises:
        BenchError: There is none of the processor.
    """
    if not CPU_RECORD.is_file():
        raise BenchError("there are no results to write a page from; `make bench` makes them")
    gpu = Record.load(GPU_RECORD) if GPU_RECORD.is_file() else None
    PAGE.write_text(write_page(Record.load(CPU_RECORD), gpu), encoding="utf-8")


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases of these names, all without any.

    Raises:
        BenchError: There is no case of a name.
    """
    names = [case.name for case in cases]
    for name in only:
        if name not in names:
            raise BenchError(f"--only: there is no case {name!r}; there are {', '.join(names)}")
    return [case for case in cases if not only or case.name in only]


def quick(case: Case) -> Case:
    """The same in one round of few updates: to see that it runs, not what it measures."""
    jobs = {name: replace(job, num_updates=min(QUICK_UPDATES, job.num_updates)) for name, job in case.jobs.items()}
    return replace(case, jobs=jobs, num_rounds=1)


def check_peer(peer: Path) -> None:
    """Refuse to begin without TRL.

    Raises:
        BenchError: The peer's Python does not start or has no PPO of TRL.
    """
    found = shutil.which(peer) and subprocess.run([peer, "-c", "import trl.experimental.ppo"], capture_output=True)
    if not found or found.returncode:
        raise BenchError(f"--peer: {str(peer)!r} is no Python that has TRL's PPO; `make bench` makes one")


def card_facts(workshop: Workshop) -> dict[str, object]:
    """The card's name and rate, and the size of what will run on it.

    Raises:
        BenchError: There is no card.
    """
    if shutil.which("nvidia-smi") is None:
        raise BenchError("there is no CUDA card here (no nvidia-smi); `make bench` measures on the processor")
    file = WORK / "card.json"
    command = [sys.executable, "-m", "bench.matmul_rate", str(file)]
    run_alone(command, log=WORK / "card.log", num_threads=workshop.machine.num_threads)
    [case] = gpu_cases(num_rounds=1)
    recipe = next(iter(case.jobs.values())).workload
    return {**json.loads(file.read_text(encoding="utf-8")), "parameters": workshop.facts(recipe)["parameters"]}


def say(text: str) -> None:
    """A line of progress, at once also where it goes into a file."""
    print(text, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure kedge beside TRL's PPO.")
    parser.add_argument("--peer", type=Path, default=HERE / ".peer/bin/python", help="Python that has TRL")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="these cases, and no page")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of what has a limit to meet")
    parser.add_argument("--threads", type=int, default=available_cores(), help="CPU threads of each process")
    parser.add_argument("--quick", action="store_true", help="one round of three updates, and no page")
    parser.add_argument("--gpu", action="store_true", help="half a billion parameters on a CUDA card")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the last results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
