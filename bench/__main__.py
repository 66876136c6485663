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

from bench.cases import Case, Results, cpu_cases, family_cases, gpu_cases, measure_case
from bench.machine import available_cores, describe_machine, describe_versions
from bench.page import FAMILY, cpu_tables, write_page
from bench.peers import RECORD as PEERS_RECORD
from bench.processes import BenchError, run_alone
from bench.record import Record
from bench.sampling import RECORD as SAMPLING_RECORD
from bench.score import RECORD as SCORE_RECORD
from bench.score import read_record
from bench.systems import Machine, Runner
from bench.tables import Table, family_table, gpu_table

HERE = Path(__file__).parent
WORK = HERE / ".work"
PAGE = HERE.parent / "docs" / "benchmarks.md"
CPU_RECORD, GPU_RECORD, FAMILY_RECORD = (HERE / "results" / f"{name}.json" for name in ("cpu", "gpu", "family"))
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
    if not options.family:
        check_peer(options.peer)
    runner = Runner(WORK, options.peer, Machine("cuda" if options.gpu else "cpu", options.threads))
    WORK.mkdir(exist_ok=True)
    card = card_facts(runner) if options.gpu else {}
    cases = (family_cases if options.family else gpu_cases if options.gpu else cpu_cases)(num_rounds=options.rounds)
    results: Results = {}
    for case in chosen(cases, options.only):
        results[case.name] = measure_case(quick(case) if options.quick else case, runner, report)
    versions = describe_versions(None if options.family else options.peer)
    record = Record(describe_machine(options.threads), versions, options.rounds, results, card)
    for table in tables_of(record, options):
        print(f"\n{table.title}\n{table.markdown()}")
    partial = options.only or options.quick
    whole = FAMILY_RECORD if options.family else GPU_RECORD if options.gpu else CPU_RECORD
    record.save(WORK / "partial.json" if partial else whole)


def tables_of(record: Record, options: argparse.Namespace) -> list[Table]:
    """The tables of what was measured."""
    if options.family:
        return [family_table(FAMILY, record.results["family"])]
    return [gpu_table(record.results["gpu"], record.card)] if options.gpu else cpu_tables(record)


def publish() -> None:
    """Write the page from the records of the last complete runs.

    Raises:
        BenchError: There is no record of a CPU run.
    """
    if not CPU_RECORD.is_file():
        raise BenchError("no results to write the page from; run `make bench` first")
    gpu, family = (Record.load(file) if file.is_file() else None for file in (GPU_RECORD, FAMILY_RECORD))
    peers = json.loads(PEERS_RECORD.read_text(encoding="utf-8")) if PEERS_RECORD.is_file() else None
    sampling = json.loads(SAMPLING_RECORD.read_text(encoding="utf-8")) if SAMPLING_RECORD.is_file() else None
    score = read_record(SCORE_RECORD)
    PAGE.write_text(write_page(Record.load(CPU_RECORD), gpu, family, peers, sampling, score), encoding="utf-8")


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
    parser.add_argument("--family", action="store_true", help="PPO and its relatives, without TRL")
    parser.add_argument("--gpu", action="store_true", help="half a billion parameters on a CUDA GPU")
    parser.add_argument("--page", action="store_true", help="only write the page, from the last results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
