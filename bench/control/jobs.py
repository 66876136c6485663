"""Runs of the benchmark: each in a child process with one thread, recorded as it ends."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.control.recipes import Recipe
from bench.processes import BenchError, environment
from kedge_base.run_folder.output import replace_file

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
NUM_MARKS: Final = 64
"""Rows of a run that are kept, evenly spaced, and the last."""


@dataclass(frozen=True)
class Peers:
    """Folders of the other systems; None leaves one out.

    Attributes:
        python: The interpreter of an environment with Stable-Baselines3, and with what CleanRL needs.
        cleanrl: Folder of CleanRL's scripts.
    """

    python: Path | None = None
    cleanrl: Path | None = None


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        kind: Its purpose: `speed`, `learn` or `table`.
        system: `kedge`, `sb3`, `cleanrl` or `alone`.
        recipe: The common settings.
        seed: The run's seed.
        total_steps: Environment steps.
        stop_at: Mean return at which it ends.
        settings: Settings of kedge alone.
        metrics: Metrics of kedge that are kept for every update.
        repeat: Number among equal runs.
    """

    kind: str
    system: str
    recipe: Recipe
    seed: int
    total_steps: int
    stop_at: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    repeat: int = 0

    @property
    def key(self) -> str:
        """The same for the same run."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Outcome:
    """The record of a run.

    Attributes:
        key: The job's.
        kind: The job's.
        system: The job's.
        env: The environment.
        seed: The job's.
        name: Distinguishes runs of one system, such as a variant; may be empty.
        total_steps: Steps that were asked for.
        marks: Rows of environment steps, CPU seconds, wall seconds and mean return; every update, or some of them.
        metrics: Named metrics of every update.
        load: The machine's load average before the run and after it.
        versions: Of the packages that it used.
        failed: Why training ended before its last step, if it diverged; empty otherwise.
    """

    key: str
    kind: str
    system: str
    env: str
    seed: int
    name: str
    total_steps: int
    marks: list[list[float | None]]
    metrics: dict[str, list[float | None]]
    load: tuple[float, float]
    versions: dict[str, str]
    failed: str = ""

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the whole run, without imports."""
        return float(self.marks[-1][1] or 0.0)

    @property
    def final_return(self) -> float | None:
        """Mean return of the last 100 episodes."""
        return self.marks[-1][3]

    def speed(self, *, first_steps: float = 0.0) -> float:
        """Environment steps per CPU second, without the rows up to `first_steps`: a compilation is not counted."""
        rows = [(float(row[0] or 0), float(row[1] or 0)) for row in self.marks]
        steps, cpu = max((row for row in rows if row[0] <= first_steps), default=rows[0])
        return (rows[-1][0] - steps) / (rows[-1][1] - cpu)

    def reached(self, level: float) -> tuple[float, float] | None:
        """Steps and CPU seconds at the first row with a return of at least a level; None if it is never reached."""
        for steps, cpu, _, mean in self.marks:
            if mean is not None and mean >= level:
                return float(steps or 0), float(cpu or 0)
        return None


def run_job(job: Job, *, name: str, work: Path, peers: Peers) -> Outcome:
    """Run a job.

    Raises:
        BenchError: It failed, or the system is not there.
    """
    work.mkdir(parents=True, exist_ok=True)
    order, out, log = (work / f"{job.key}.{end}" for end in ("order.json", "out.json", "log"))
    order.write_text(json.dumps({**asdict(job), "folder": str(peers.cleanrl)}), encoding="utf-8")
    load = os.getloadavg()[0]
    with log.open("wb") as printed:
        code = subprocess.run(
            [*_command(job.system, peers), str(order), str(out)],
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment(1),
            cwd=ROOT,
            check=False,
        ).returncode
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"{job.system} on {job.recipe.env}, {log}: exit code {code}, {' '.join(last) or 'no output'}")
    found = json.loads(out.read_text(encoding="utf-8"))
    return Outcome(
        key=job.key,
        kind=job.kind,
        system=job.system,
        env=job.recipe.env,
        seed=job.seed,
        name=name,
        total_steps=job.total_steps,
        marks=_thinned(found["marks"], job),
        metrics=found.get("metrics", {}),
        load=(load, os.getloadavg()[0]),
        versions=found["versions"],
        failed=found.get("failed", ""),
    )


def run_jobs(jobs: Iterable[tuple[str, Job]], *, record: Path, work: Path, peers: Peers, processes: int = 1) -> None:
    """Run named jobs that are not recorded yet, in order, and record each as it ends; a failure does not stop the rest.

    Raises:
        BenchError: At least one failed; all others are recorded.
    """
    known = read_outcomes(record)
    missing = [(name, job) for name, job in jobs if job.key not in known]
    failures: list[str] = []
    with ThreadPoolExecutor(processes) as threads:
        waiting = {threads.submit(run_job, job, name=name, work=work, peers=peers): job for name, job in missing}
        try:
            for number, done in enumerate(as_completed(waiting), 1):
                try:
                    outcome = done.result()
                except BenchError as error:
                    failures.append(str(error))
                    print(f"bench: {error}", file=sys.stderr, flush=True)
                    continue
                _append(outcome, record)
                print(f"{number}/{len(missing)} {_line(outcome)}", flush=True)
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    if failures:
        raise BenchError(f"{len(failures)} of {len(missing)} runs failed; the last: {failures[-1]}")


def read_outcomes(record: Path) -> dict[str, Outcome]:
    """The recorded runs by key; none if there is no file."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    fields = [json.loads(line) for line in lines]
    return {each["key"]: Outcome(**{**each, "load": tuple(each["load"])}) for each in fields}


def _command(system: str, peers: Peers) -> list[str]:
    if system in ("kedge", "alone"):
        return [sys.executable, "-m", f"bench.control.{'own' if system == 'kedge' else 'alone'}"]
    if peers.python is None:
        raise BenchError(f"{system} needs --peer PYTHON, the interpreter of an environment with stable-baselines3")
    if system == "cleanrl" and peers.cleanrl is None:
        raise BenchError("cleanrl needs --cleanrl FOLDER, the folder of its scripts")
    return [str(peers.python), str(HERE / f"{system}.py")]


def _thinned(marks: list[list[float | None]], job: Job) -> list[list[float | None]]:
    """Some of the rows; all that a return's first time is read from."""
    if job.stop_at is not None:
        return [[_rounded(each) for each in row] for row in marks]
    step = max(1, len(marks) // NUM_MARKS)
    kept = marks[::step] if (len(marks) - 1) % step == 0 else [*marks[::step], marks[-1]]
    return [[_rounded(each) for each in row] for row in kept]


def _rounded(number: float | None) -> float | None:
    return number if number is None else float(f"{number:.7g}")


def _append(outcome: Outcome, record: Path) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    before = record.read_bytes() if record.is_file() else b""
    replace_file(record, [before, (json.dumps(asdict(outcome)) + "\n").encode()])


def _line(outcome: Outcome) -> str:
    mean = "–" if outcome.final_return is None else f"{outcome.final_return:.1f}"
    return (
        f"{outcome.kind} {outcome.system} {outcome.name} {outcome.env} seed {outcome.seed}: "
        f"{outcome.marks[-1][0]:.0f} steps, {outcome.cpu_seconds:.1f} CPU s, return {mean}, load {outcome.load[1]:.1f}"
    )
