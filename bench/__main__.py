"""`python -m bench`: measures, prints the tables, writes `docs/benchmarks.md`."""

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
from bench.systems import Machine, Runner
from bench.tables import gpu_table

HERE = Path(__file__).parent
WORK, PAGE = HERE / ".work", HERE.parent / "docs" / "benchmarks.md"
CPU_RECORD, GPU_RECORD = HERE / "results" / "cpu.json", HERE / "results" / "gpu.json"
QUICK_UPDATES = 3


def main() -> int:
    """Run the command line; returns 2 after an error."""
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
    """Measure the cases, print their tables and save the record; a partial run does not replace the record."""
    check_peer(options.peer)
    runner = Runner(WORK, options.peer, Machine("cuda" if options.gpu else "cpu", options.threads))
    WORK.mkdir(exist_ok=True)
    card = card_facts(runner) if options.gpu else {}
    cases = (gpu_cases if options.gpu else cpu_cases)(num_rounds=options.rounds)
    results: Results = {}
    for case in chosen(cases, options.only):
        results[case.name] = measure_case(quick(case) if options.quick else case, runner, report)
    record = Record(describe_machine(options.threads), describe_versions(options.peer), options.rounds, results, card)
    for table in [gpu_table(results["gpu"], card)] if options.gpu else cpu_tables(record):
        print(f"\n{table.title}\n{table.markdown()}")
    partial = options.only or options.quick
    record.save(WORK / "partial.json" if partial else GPU_RECORD if options.gpu else CPU_RECORD)


def publish() -> None:
    """Write the page from the records of the last complete runs.

    Raises:
        BenchError: There is no record of a CPU run.
    """
    if not CPU_RECORD.is_file():
        raise BenchError("no results to write the page from; run `make bench` first")
    gpu = Record.load(GPU_RECORD) if GPU_RECORD.is_file() else None
    PAGE.write_text(write_page(Record.load(CPU_RECORD), gpu), encoding="utf-8")


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases with these names; all cases if no names are given.

    Raises:
        BenchError: A name is unknown.
    """
    names = [case.name for case in cases]
    for name in only:
        if name not in names:
            raise BenchError(f"--only: unknown case {name!r}; expected one of {', '.join(names)}")
    return [case for case in cases if not only or case.name in only]


def quick(case: Case) -> Case:
    """The case with one round of few updates, to check that it runs."""
    jobs = {name: replace(job, num_updates=min(QUICK_UPDATES, job.num_updates)) for name, job in case.jobs.items()}
    return replace(case, jobs=jobs, num_rounds=1)


def check_peer(peer: Path) -> None:
    """Check that TRL is available.

    Raises:
        BenchError: The peer's Python does not start, or has no TRL with PPO.
    """
    found = shutil.which(peer) and subprocess.run([peer, "-c", "import trl.experimental.ppo"], capture_output=True)
    if not found or found.returncode:
        raise BenchError(f"--peer: {str(peer)!r} is not a Python with TRL's PPO; `make bench` creates one")


def card_facts(runner: Runner) -> dict[str, object]:
    """The GPU's name and FLOP/s, and the policy's size.

    Raises:
        BenchError: There is no GPU.
    """
    if shutil.which("nvidia-smi") is None:
        raise BenchError("no CUDA GPU found (no nvidia-smi); `make bench` measures on the CPU")
    file = WORK / "card.json"
    command = [sys.executable, "-m", "bench.matmul_rate", str(file)]
    run_alone(command, log=WORK / "card.log", num_threads=runner.machine.num_threads)
    [case] = gpu_cases(num_rounds=1)
    recipe = next(iter(case.jobs.values())).workload
    return {**json.loads(file.read_text(encoding="utf-8")), "parameters": runner.facts(recipe)["parameters"]}


def report(text: str) -> None:
    """Print a line of progress, flushed even when redirected to a file."""
    print(text, flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmark kedge against TRL's PPO.")
    parser.add_argument("--peer", type=Path, default=HERE / ".peer/bin/python", help="Python with TRL installed")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="run only these cases; writes no page")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the cases that have a target")
    parser.add_argument("--threads", type=int, default=available_cores(), help="CPU threads of each process")
    parser.add_argument("--quick", action="store_true", help="one round of three updates; writes no page")
    parser.add_argument("--gpu", action="store_true", help="half a billion parameters on a CUDA GPU")
    parser.add_argument("--page", action="store_true", help="only write the page, from the last results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
