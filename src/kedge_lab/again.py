"""Makes updates of a run again from a checkpoint, and compares them with what the run recorded."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from kedge.cli.ranks import run_as_rank
from kedge.config import Config, load_config, resolved_yaml, with_values
from kedge.runs.ending import chained
from kedge.runs.run import Resume
from kedge_base.errors import DataError
from kedge_base.machine.invocation import num_ranks
from kedge_base.run_folder.output import (
    CONFIG_FILE,
    RECEIPT_FILE,
    SAMPLED_FOLDER,
    checkpoint_folder,
    kept_checkpoints,
)
from kedge_base.run_folder.receipt import Recorded, file_hash, read_lines
from kedge_base.run_folder.record_format import MEASURED, METRICS_FILE, read_config, read_metrics
from kedge_base.stage import find_stage, imported
from kedge_inspect.verify import Verification

TOLERANCE = 1e-3
"""Largest relative difference of a metric or tensor that other software or another machine may cause."""

SMALLEST = 1e-3
"""Smaller numbers are compared as if they had this size, since many are differences of rounded numbers."""

WEIGHTS = "weights: "
TRAINED = "responses and rewards"

MOST = 10
"""Maximum number of differences that are listed."""

QUIET = {"runtime.report": False, "runtime.loggers": [], "push.repo": None}


class _Made(BaseException):
    """Raised to end a run after an update."""


def _make(config: Config, stage: str, first: int, last: int, **objects: Any) -> None:
    """Run a stage from a checkpoint up to an update; 0 is the start of the run."""

    def stop(made: Any) -> None:
        if made.number == last and num_ranks() > 1:  # an exception would leave the other ranks waiting
            made.stop()
        elif made.number == last:
            raise _Made

    with suppress(_Made), chained():
        imported(find_stage(stage).run)(config, resume=Resume() if first else None, callback=stop, **objects)


def _in_ranks(machine: Mapping[str, str], settings: Path, *named: str) -> None:
    """Run a stage as several ranks, with the arguments of `_make`.

    Raises:
        DataError: They failed.
    """
    own = {
        "OMP_NUM_THREADS": machine["threads"],
        **({"CUDA_VISIBLE_DEVICES": ""} if machine["device"] == "cpu" else {}),
    }
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", machine["ranks"], "-m", __name__]
    command = [sys.executable, "-m", *ranks, str(settings), *named]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("error: ")]
        why = lines[0].removeprefix("error: ") if lines else f"exit status {done.returncode}"
        raise DataError(f"the update cannot be made again by {machine['ranks']} ranks: {why}")


def _obstacle(machine: Mapping[str, str], objects: Mapping[str, Any]) -> str:
    """Say why the ranks that made an update cannot make it again here; empty if they can."""
    if objects:
        return "Python objects stay in this process"
    found = torch.cuda.device_count()
    if machine["device"] != "cpu" and found < int(machine["ranks"]):
        return f"{found} GPUs here"
    return "" if torch.distributed.is_available() else "a torch without ranks"


def make_again(folder: Path, update: int, **objects: Any) -> Verification:
    """Make an update of a run again, from the checkpoint or start before it up to the next checkpoint, if there is one.

    Args:
        folder: The run's folder, which is not changed.
        update: The update's number.
        objects: Python objects that the run was given, as for the stage's function.

    Raises:
        KedgeError: The run has no such update, neither a start nor a checkpoint before it, or other inputs.
    """
    recorded = Recorded.of(read_lines(folder / RECEIPT_FILE))
    start, first, last = _span(folder, recorded, update)
    machine = start["machine"]
    with TemporaryDirectory() as place:
        run = Path(place, "run")
        settings = Path(place, CONFIG_FILE)
        settings.write_text(start["config"], "utf-8")
        config = with_values(load_config(settings), {"out": str(run), **QUIET})
        stage = read_config(settings.parent)[0]["stage"]
        if first:
            shutil.copytree(checkpoint_folder(folder, first), checkpoint_folder(run, first))
            for path in (*folder.glob("*.jsonl"), *folder.glob(f"{SAMPLED_FOLDER}/*")):
                if path.name != RECEIPT_FILE:
                    copy = run / path.relative_to(folder)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, copy)
            settings.rename(run / CONFIG_FILE)
        has_ranks = int(machine.get("ranks", 1)) > 1
        obstacle = _obstacle(machine, objects) if has_ranks else ""
        if has_ranks and not obstacle:
            resolved = Path(place, "again.yaml")
            resolved.write_text(resolved_yaml(config), "utf-8")
            _in_ranks(machine, resolved, stage, str(first), str(last))
        else:
            _make(config, stage, first, last, **objects)
        again = Recorded.of(read_lines(run / RECEIPT_FILE))
        was, now = (dict(_results(*each, first, last)) for each in ((folder, recorded), (run, again)))
        if has_weights := all(checkpoint_folder(each, last).is_dir() for each in (folder, run)):
            was, now = was | _weights(folder, last), now | _weights(run, last)
        apart = {name: _relative_difference(was.get(name), now.get(name)) for name in {**was, **now}}
    here = again.starts[-1]["machine"]
    kind = [f"{name} {here.get(name)}, not {each}" for name, each in machine.items() if here.get(name) != each]
    kind += [obstacle] if obstacle else []
    if here["device"] != "cpu" and not config.runtime.deterministic:
        kind.append("runtime.deterministic=false on a GPU")
    if kind:  # rewards are rounded differently then, and different responses show in the metrics
        apart = {name: each for name, each in apart.items() if not name.endswith(TRAINED)}
    made = f"updates {first + 1} to {last}" if last > first + 1 else f"update {last}"
    what = f"{made} made again from the {f'checkpoint of update {first}' if first else 'start'}: metrics"
    differing = sorted(filter(apart.get, apart), key=lambda name: -apart[name])
    if not differing:
        return Verification([], f"{what}{' and weights' if has_weights else ''} are the same to the bit")
    largest = [max((apart[name] for name in apart if name.startswith(WEIGHTS) == part), default=0) for part in (0, 1)]
    summary = f"{what} differ by at most {largest[0]:.2g} of their size, weights by {largest[1]:.2g}"
    if kind and max(largest) <= TOLERANCE:
        return Verification([], f"{summary}: no more than {'; '.join(kind)} explains")
    faults = [f"{name} differs by {apart[name]:.2g} of its size" for name in differing[:MOST]]
    return Verification(faults, f"{summary}{'; made with ' if kind else ''}{'; '.join(kind)}")


def _span(folder: Path, recorded: Recorded, update: int) -> tuple[dict[str, Any], int, int]:
    """The start of the process that made an update, and the checkpoints around the update that it read or wrote.

    The first is 0 for the start of the run.

    Raises:
        DataError: The run has no such update, or neither a start nor a checkpoint before it.
    """
    kept = [0, *kept_checkpoints(folder)]
    possible: list[str] = []
    ends = [
        *(each["start"] for each in recorded.starts[1:]),
        max((each for _, each in recorded.rows.get(METRICS_FILE, ())), default=0),
    ]
    for start, end in zip(recorded.starts, ends, strict=True):
        before = [each for each in kept if start["start"] <= each < end]
        if before and before[0] < update <= end:
            last = next((each for each in kept if update <= each <= end), update)
            return start, max(each for each in before if each < update), last
        possible += [f"{before[0] + 1} to {end}"] if before else []
    can = f"updates {' and '.join(possible)} can" if possible else "none can"
    raise DataError(f"{folder} has no checkpoint from which update {update} can be made again; {can}")


def _results(folder: Path, recorded: Recorded, first: int, last: int) -> Iterator[tuple[str, object]]:
    """Yield the metrics of updates, and the hashes of what they trained on, by name."""
    for row in read_metrics(folder):
        for name in row if first < row["update"] <= last else ():
            if not name.startswith(MEASURED):
                yield f"update {row['update']}: {name}", row[name]
    for update, rows in recorded.trained.items():
        if first < update <= last:
            yield f"update {update}: {TRAINED}", rows


def _weights(folder: Path, update: int) -> dict[str, object]:
    """The files of weights, optimizer and random generators in a checkpoint, by name."""
    place = checkpoint_folder(folder, update)
    return {f"{WEIGHTS}{path.relative_to(place)} after update {update}": path for path in place.rglob("*.safetensors")}


def _relative_difference(one: object, other: object) -> float:
    """The difference of two results relative to their size; infinite for texts."""
    if isinstance(one, Path) and isinstance(other, Path):
        if file_hash(one) == file_hash(other):
            return 0.0
        was, now = load_file(one), load_file(other)
        if [(name, each.shape) for name, each in was.items()] == [(name, each.shape) for name, each in now.items()]:
            pairs = [(was[name].double(), now[name].double()) for name in was]
            return max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) / max(abs(one), abs(other), SMALLEST)
    return 0.0 if one == other else math.inf


if __name__ == "__main__":
    path, name, *numbers = sys.argv[1:]
    run_as_rank(lambda: _make(load_config(Path(path)), name, *map(int, numbers)))
