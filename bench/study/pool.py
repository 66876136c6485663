"""Runs jobs in processes with one thread each, several at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.processes import BenchError, environment
from bench.study.unit import Outcome, Unit

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Pool:
    """The folder and limits of jobs.

    Attributes:
        work: Folder of the starts, the jobs and the runs in progress.
        processes: Jobs at a time.
        stories: Files of the task `stories`; None leaves it out.
    """

    work: Path
    processes: int
    stories: Mapping[str, str] | None

    def build(self, tasks: Sequence[str]) -> None:
        """Train the starting point of each task unless it exists, one per process at a time.

        Raises:
            BenchError: One failed.
        """
        self._run([(f"start-{task}", {"task": task}) for task in tasks], lambda name: None)

    def run(self, units: Iterable[Unit], finished: Callable[[Outcome], None]) -> None:
        """Run units; a failed one does not stop the others.

        Args:
            units: The runs.
            finished: Called with each outcome as it arrives.

        Raises:
            BenchError: At least one failed; all others are finished.
        """
        jobs = [
            (
                unit.key,
                {
                    "task": unit.task,
                    "unit": asdict(unit),
                    "out": str(self._folder(unit.key) / "run"),
                    "outcome": str(self._folder(unit.key) / "outcome.json"),
                },
            )
            for unit in units
        ]
        self._run(jobs, lambda key: finished(self._outcome(key)))

    def _run(self, jobs: Sequence[tuple[str, dict[str, Any]]], finished: Callable[[str], None]) -> None:
        failures: list[str] = []
        with ThreadPoolExecutor(self.processes) as threads:
            waiting = {threads.submit(self._job, name, job): name for name, job in jobs}
            try:
                for done in as_completed(waiting):
                    if error := done.result():
                        failures.append(error)
                        print(f"bench: {error}", file=sys.stderr, flush=True)
                    else:
                        finished(waiting[done])
            except BaseException:
                threads.shutdown(cancel_futures=True)  # jobs in progress finish, or the same Ctrl-C ends them
                raise
        if failures:
            raise BenchError(f"{len(failures)} of {len(jobs)} jobs failed; the last: {failures[-1]}")

    def _job(self, name: str, job: dict[str, Any]) -> str:
        """Run a job; returns the one-line error, empty on success."""
        folder = self._folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        order = folder / "job.json"
        log = folder / "log.txt"
        whole = {**job, "starts": str(self.work / "starts"), "stories": self.stories}
        order.write_text(json.dumps(whole, indent=1), encoding="utf-8")
        with log.open("wb") as printed:
            command = [sys.executable, "-m", "bench.study.child", str(order)]
            code = subprocess.run(
                command, stdout=printed, stderr=subprocess.STDOUT, env=environment(1), cwd=ROOT, check=False
            ).returncode
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return f"{log}: exit code {code}, {' '.join(last) or 'no output'}" if code else ""

    def _outcome(self, key: str) -> Outcome:
        return Outcome(**json.loads((self._folder(key) / "outcome.json").read_text(encoding="utf-8")))

    def _folder(self, name: str) -> Path:
        return self.work / "jobs" / name
