"""Power cuts and full disks: `python -m bench.disks FOLDER [--cuts 60] [--full 40]` (Linux, as root).

Each run writes to a separate ext4 file system, in an image that is mounted through a loop device, with the options
that forgive least: contents may reach the disk long after the names of their files.

power cut   at a random moment the process is stopped, the device copied, and the process killed. The copy is mounted,
            as after the power has come back, and the run started again with `--resume auto`. Half of the runs suffer a
            second cut then.
full disk   a file leaves a random amount of room. The run must end with a one-line error; it is
            resumed once the file is gone.

In the end the model and all metrics but times must be bit-identical to an undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.processes import BenchError
from bench.tables import Table
from kedge_base.run_folder.record_format import MEASURED
from tests.tiny import save_tiny_policy

MEGABYTES = 24
OPTIONS = "loop,noauto_da_alloc,data=writeback,commit=1"
LONGEST = 300.0

REWARD = "def length(completions, **_):\n    return [len(text) / 10 for text in completions]\n"
SHORT = ["runtime.device=cpu", "checkpoint.every=1", "checkpoint.keep=2"]
SUPERVISED = ["sft.batch_size=4", "sft.num_epochs=2", "reward_model.batch_size=4", "reward_model.num_epochs=2"]
SAMPLED = ["rollout.num_prompts=4", "rollout.max_new_tokens=8", "ppo.num_updates=4", "ppo.num_epochs=1"]
STAGES = {
    "sft": ["--model", "policy", "--data", "demonstrations.jsonl", *SUPERVISED[:2]],
    "reward": ["--model", "policy", "--data", "comparisons.jsonl", *SUPERVISED[2:]],
    "ppo": ["--model", "policy", "--prompts", "demonstrations.jsonl", "--reward", "reward.py:length", *SAMPLED],
    "rlhf": ["--model", "policy", "--demonstrations", "demonstrations.jsonl", "--comparisons", "comparisons.jsonl",
             "--prompts", "demonstrations.jsonl", *SUPERVISED, *SAMPLED],
}  # fmt: skip


@dataclass
class Tally:
    """The outcome of a stage's runs.

    Attributes:
        tried: Runs.
        second: Of them, how many suffered a second cut.
        anew: Runs that had no checkpoint yet and started over.
        finished: Runs that had ended before the fault.
        wrong: Failures, one line per run.
    """

    tried: int = 0
    second: int = 0
    anew: int = 0
    finished: int = 0
    wrong: list[str] = field(default_factory=list)


class Laboratory:
    """A folder with inputs, an image and its mount point.

    Args:
        folder: The folder; created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image = folder / "disk.img"
        self.disk = folder / "disk"
        self.run = self.disk / "run"
        self.log = folder / "output.txt"
        self.disk.mkdir(parents=True, exist_ok=True)
        save_tiny_policy(folder / "policy")
        rows = [{"prompt": f"Deck {number}:", "completion": f" Aye, {number}."} for number in range(12)]
        pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " rope"} for row in rows]
        for name, content in (("demonstrations", rows), ("comparisons", pairs)):
            text = "".join(json.dumps(row) + "\n" for row in content)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")

    def format(self) -> None:
        """Make a new, empty file system."""
        self.image.unlink(missing_ok=True)
        with self.image.open("wb") as file:
            file.truncate(MEGABYTES * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-J", "size=4", str(self.image)], check=True)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Context in which the image is mounted."""
        subprocess.run(["mount", "-o", OPTIONS, str(self.image), str(self.disk)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", str(self.disk)], check=True)

    def start(self, stage: str) -> int:
        """Start a stage in a process that shares what this one has imported; its id."""
        command = ["kedge", stage, "--out", str(self.run), "--resume", "auto", *STAGES[stage], *SHORT]
        process = os.fork()
        if process == 0:
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            sys.argv = command
            code = 1
            try:
                from kedge.cli import main as kedge

                kedge()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return process

    def finish(self, stage: str) -> int:
        """Run a stage to its end; the exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(stage), 0)[1])

    def cut_power(self, stage: str, seconds: float) -> bool:
        """Start a stage, and lose power after some time; whether it had not ended before."""
        with self.mounted():
            process = self.start(stage)
            copy = self.folder / "copy.img"
            ended = time.monotonic() + seconds
            while time.monotonic() < ended:
                if os.waitpid(process, os.WNOHANG)[0]:
                    break
                time.sleep(0.002)
            else:
                os.kill(process, signal.SIGSTOP)
                shutil.copyfile(self.image, copy)
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                seconds = -1.0
            if seconds >= 0:
                shutil.copyfile(self.image, copy)
        copy.replace(self.image)
        return seconds < 0

    def outcome(self) -> dict[str, object]:
        """The compared contents of a finished run: its weights, and all its metrics but times."""
        saved = [path for path in self.run.glob("**/model/*.safetensors") if "checkpoints" not in path.parts]
        weights = {str(path.relative_to(self.run)): path.read_bytes() for path in saved}
        rows = {}
        for path in self.run.glob("**/metrics.jsonl"):
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            kept = [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]
            rows[str(path.relative_to(self.run))] = kept
        return {"weights": weights, "metrics": rows}


def try_cuts(laboratory: Laboratory, stage: str, count: int, rng: random.Random) -> Tally:
    """Lose power at random moments of a stage."""
    tally, (whole, seconds) = Tally(), undisturbed(laboratory, stage)
    for _ in range(count):
        laboratory.format()
        moments = [rng.uniform(0.0, 1.1 * seconds)]
        if rng.random() < 0.5:
            moments.append(rng.uniform(0.0, seconds))
        tally.tried = tally.tried + 1
        tally.second = tally.second + len(moments) - 1
        cut = [laboratory.cut_power(stage, moment) for moment in moments]
        with laboratory.mounted():
            tally.finished += not any(cut)
            tally.anew += not list(laboratory.run.glob("**/checkpoints/update-*"))
            at = " and ".join(f"{moment:.2f} s" for moment in moments)
            check(laboratory, stage, whole, tally, f"cut at {at}")
    return tally


def try_full_disks(laboratory: Laboratory, stage: str, count: int, rng: random.Random) -> Tally:
    """Run a stage with too little room."""
    tally, (whole, _) = Tally(), undisturbed(laboratory, stage)
    with laboratory.mounted():
        needed = sum(path.stat().st_blocks * 512 for path in laboratory.run.rglob("*"))
    for _ in range(count):
        laboratory.format()
        with laboratory.mounted():
            room = int(4096 * (needed / 4096) ** rng.random())  # small ones as often as large ones
            filler = laboratory.disk / "filler"
            free = shutil.disk_usage(laboratory.disk).free
            with filler.open("wb") as file:
                file.write(bytes(free - room))
            tally.tried += 1
            code = laboratory.finish(stage)
            said = laboratory.log.read_text(encoding="utf-8")
            errors = [line for line in said.splitlines() if line.startswith("error: ")]
            left = [path.name for path in laboratory.disk.rglob("*.part*")]
            tally.finished += code == 0
            tally.anew += not list(laboratory.run.glob("**/checkpoints/update-*"))
            if (code, len(errors)) not in ((2, 1), (0, 0)) or "Traceback" in said or left:
                tally.wrong.append(f"{room:,} bytes free: exit code {code}, {left}, {said[-800:]}")
            filler.unlink()
            check(laboratory, stage, whole, tally, f"{room:,} bytes free")
    return tally


def check(laboratory: Laboratory, stage: str, whole: dict[str, object], tally: Tally, what: str) -> None:
    """Resume a run, and compare it with an undisturbed one."""
    code = laboratory.finish(stage)
    if code:
        tally.wrong.append(f"{what}: exit code {code}: {laboratory.log.read_text(encoding='utf-8')[-800:]}")
    elif (found := laboratory.outcome()) != whole:
        differing = [name for name in whole if found[name] != whole[name]]
        tally.wrong.append(f"{what}: other {' and '.join(differing)}")


def undisturbed(laboratory: Laboratory, stage: str) -> tuple[dict[str, object], float]:
    """The outcome of a run without faults, and its seconds."""
    outcome = dict[str, object]()
    seconds = 0.0
    for _ in range(2):  # the first one takes longer
        laboratory.format()
        with laboratory.mounted():
            started = time.monotonic()
            if laboratory.finish(stage):
                raise BenchError(f"{stage}: {laboratory.log.read_text(encoding='utf-8')}")
            outcome = laboratory.outcome()
            seconds = time.monotonic() - started
    return outcome, seconds


def main() -> int:
    """Try all stages and print a table. Returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.disks", description="Power cuts and full disks.")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--cuts", type=int, default=60, help="power cuts, over all stages")
    parser.add_argument("--full", type=int, default=40, help="full disks, over all stages")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, help="these stages only")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and sizes")
    options = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0:
        print("bench: mounting an image needs Linux and root", file=sys.stderr)
        return 2
    import kedge.cli
    import kedge.stages.ppo
    import kedge.stages.rlhf  # noqa: F401  before the forks

    laboratory = Laboratory(options.folder.resolve())
    rng = random.Random(options.seed)
    header = ("fault", "stage", "runs", "second cut", "no checkpoint yet", "had ended", "wrong")
    rows: list[tuple[str, ...]] = []
    for fault, attempt, total in (("power cut", try_cuts, options.cuts), ("full disk", try_full_disks, options.full)):
        for number, stage in enumerate(options.stages):
            count = total // len(options.stages) + (number < total % len(options.stages))
            tally = attempt(laboratory, stage, count, rng)
            figures = (tally.tried, tally.second, tally.anew, tally.finished, len(tally.wrong))
            rows.append((fault, stage, *map(str, figures)))
            print("  ".join(rows[-1]), *tally.wrong, sep="\n    ", flush=True)
    print(Table("", header, rows).markdown())
    return 1 if any(row[-1] != "0" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
