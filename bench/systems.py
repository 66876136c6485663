"""The measured systems: their commands, and the measurements taken from their output."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.processes import BenchError, Finished, run_alone
from bench.recipe import DEMONSTRATIONS_FILE, FACTS_FILE, PROMPTS_FILE, Workload

LEARNING_RATE = 1e-9
"""Every step is computed but has almost no effect: a learning policy changes its lengths, differently per system."""
PHASES = ("rollout", "reward", "experience", "train")


@dataclass(frozen=True)
class Job:
    """One system on one workload.

    Attributes:
        system: `trl`, kedge's PPO (`ppo`), or kedge's fine-tuning (`sft`), with one optimizer step per update.
        workload: Models, prompts and lengths.
        settings: Further settings of kedge, `name=value`.
        batch: Responses per update; sequences per step.
        num_responses: Responses to each prompt.
        num_epochs: Passes over an update's responses.
        num_updates: Updates to run; fine-tuning makes one pass over the demonstrations instead.
        num_dropped: Initial updates that are not counted.
        bf16: Run TRL in bf16; kedge has a setting for that.
        rank: Train LoRA adapters of this rank in TRL; kedge has a setting for that. None trains all weights.
        reward: Folder of the reward model, in the workload's.
    """

    system: Literal["trl", "ppo", "sft"]
    workload: Workload = field(default_factory=Workload)
    settings: tuple[str, ...] = ()
    batch: int = 32
    num_responses: int = 1
    num_epochs: int = 4
    num_updates: int = 5
    num_dropped: int = 2
    bf16: bool = False
    rank: int | None = None
    reward: str = "reward"


@dataclass(frozen=True)
class Measurement:
    """One run of a job.

    Attributes:
        seconds: Seconds per update, from row to row, seen from outside the process; median.
        phases: Seconds by phase, as reported by the system; medians.
        num_tokens: Real tokens of prompts and responses per update; mean.
        peak_memory: GiB.
        first_update: Seconds from the process's start until its first row was on disk.
        flop_limit: The arithmetic of an update in SFT steps, as counted by kedge (`cost/sft_steps`); 0 for TRL and SFT.
    """

    seconds: float
    phases: dict[str, float]
    num_tokens: float
    peak_memory: float
    first_update: float
    flop_limit: float = 0.0

    @classmethod
    def of(cls, finished: Finished, rows: list[dict[str, Any]], *, num_dropped: int) -> Measurement:
        """Aggregate the updates after the first `num_dropped`.

        Raises:
            BenchError: No update remains.
        """
        ends = finished.arrivals
        counted = rows[num_dropped:]
        if num_dropped < 1 or not counted or len(ends) != len(rows):
            raise BenchError(f"{len(rows)} updates were logged; expected more than the {num_dropped} dropped ones")
        gaps = [end - start for start, end in pairwise(ends)][num_dropped - 1 :]
        phases = {name: median(row.get(f"time/{name}", 0.0) for row in counted) for name in PHASES}
        tokens = [row["tokens_per_second"] * row["time/update"] for row in counted]
        limit = median(row.get("cost/sft_steps", 0.0) for row in counted)
        return cls(median(gaps), phases, sum(tokens) / len(tokens), finished.peak_memory, ends[0], limit)


@dataclass(frozen=True)
class Machine:
    """The device, `cpu` or `cuda`, and the number of CPU threads."""

    device: str
    num_threads: int


@dataclass(frozen=True)
class Runner:
    """Runs jobs.

    Attributes:
        folder: Workloads are created here once and kept; a run's output is deleted once read.
        peer: Python of the environment with TRL.
        machine: Device and threads.
    """

    folder: Path
    peer: Path
    machine: Machine

    def workload(self, recipe: Workload) -> Path:
        """The folder of a workload, created if missing."""
        folder = self.folder / recipe.name
        if not (folder / FACTS_FILE).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "bench.workload", str(folder), json.dumps(asdict(recipe))]
            run_alone(command, log=self.folder / "workload.log", num_threads=self.machine.num_threads)
        return folder

    def facts(self, recipe: Workload) -> dict[str, Any]:
        """Parameters, vocabulary and longest prompt of a workload."""
        return json.loads((self.workload(recipe) / FACTS_FILE).read_text(encoding="utf-8"))

    def measure(self, job: Job, *, seed: int) -> Measurement:
        """Run a job once, alone.

        Args:
            job: The job.
            seed: Seed of the prompts' order and the sampling, so that lengths differ between rounds.
        """
        workload = self.workload(job.workload)
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        command = (self._trl if job.system == "trl" else self._kedge)(job, workload, out)
        command += ["--seed", str(seed)]
        rows = out / "metrics.jsonl"
        finished = run_alone(
            command,
            log=self.folder / f"{job.system}.log",
            rows=rows,
            num_threads=self.machine.num_threads,
            gpu=self.machine.device != "cpu",
        )
        logged = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
        shutil.rmtree(out)
        return Measurement.of(finished, logged, num_dropped=job.num_dropped)

    def _trl(self, job: Job, workload: Path, out: Path) -> list[str]:
        program = str(Path(__file__).with_name("peer.py"))
        sizes = {
            "--updates": job.num_updates,
            "--batch": job.batch,
            "--max-response": job.workload.max_response,
            "--epochs": job.num_epochs,
            "--learning-rate": LEARNING_RATE,
        }
        flags = [str(part) for pair in sizes.items() for part in pair]
        return [str(self.peer), program, str(workload), str(out), *flags, *_trl_flags(job)]

    def _kedge(self, job: Job, workload: Path, out: Path) -> list[str]:
        command = [sys.executable, "-m", "kedge", job.system, "--model", str(workload / "policy"), "--out", str(out)]
        return [*command, *_data(job, workload), *settings(job), f"runtime.device={self.machine.device}"]


def _trl_flags(job: Job) -> list[str]:
    return [*(["--bf16"] if job.bf16 else []), *(["--rank", str(job.rank)] if job.rank else [])]


def _data(job: Job, workload: Path) -> list[str]:
    if job.system == "sft":
        return ["--data", str(workload / DEMONSTRATIONS_FILE)]
    return ["--prompts", str(workload / PROMPTS_FILE), "--reward", str(workload / job.reward)]


def settings(job: Job) -> list[str]:
    """Kedge's settings: those given by the workload, then the job's own."""
    if job.system == "sft":
        fixed = [f"sft.batch_size={job.batch}", "data.eval_fraction=0"]
    else:
        fixed = [
            f"ppo.num_updates={job.num_updates}",
            f"ppo.num_epochs={job.num_epochs}",
            "ppo.num_minibatches=1",
            f"ppo.learning_rate={LEARNING_RATE}",
            f"rollout.num_prompts={job.batch // job.num_responses}",
            f"rollout.num_responses={job.num_responses}",
            f"rollout.max_new_tokens={job.workload.max_response}",
            "rollout.missing_eos_score=null",
        ]
    return [*fixed, *job.settings]
