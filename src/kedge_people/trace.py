"""Which models contain a label: the optimizer steps that were trained on it, and the runs that used those models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from os.path import abspath, normpath
from pathlib import Path
from typing import Any

from kedge_base.errors import DataError
from kedge_base.run_folder.output import CHECKPOINTS, CONFIG_FILE, LABELS_FILE, MODEL_FOLDER, RECEIPT_FILE, is_run
from kedge_base.run_folder.receipt import Recorded, read_lines
from kedge_base.run_folder.record_format import read_config, read_json_lines, read_json_object, read_metrics
from kedge_base.stage import stages
from kedge_base.texts import counted
from kedge_people.labels import ANSWERS_FILE


def trace(folder: Path, runs: Path, sought: str) -> list[str]:
    """Say which models contain an answer, or a person's answers, also those that were replaced or withdrawn since.

    Args:
        folder: The folder of labels.
        runs: The folder in which runs are searched for.
        sought: The answer's id, or the person's name.

    Raises:
        DataError: There is no such answer or person, or a file is damaged.
    """
    path = folder / ANSWERS_FILE
    rows = read_json_lines(path) if path.is_file() else []
    wanted = {row["id"] for row in rows if "id" in row and sought in (row["person"], row["id"])}
    if not wanted:
        raise DataError(f"{folder}: no answer is by {sought} or has this id")
    found = [_Run(path.parent) for path in sorted(runs.rglob(CONFIG_FILE))]
    lines = list[str]()
    for run in found:
        labels = [label for label in run.labels if label["answer"] in wanted]
        if not labels:
            continue
        steps = sorted({step for label in labels for step in label["steps"] if step <= run.done})
        by = labels[0]["person"]
        count = len({label["answer"] for label in labels})
        who = (
            f"{sought}, {counted(count, 'answer')}" if by == sought else f"answer {sought} ({by}, {labels[0]['when']})"
        )
        used = f"optimizer steps {_ranges(steps)}" if steps else "in no optimizer step: read, held out, or not reached"
        lines.append(f"{who}: {run}, {used}")
        if steps:
            lines += _uses(run, found, "  ", {run.folder})
    place = f"no run in {runs}" if runs.is_dir() else f"there is no folder {runs} (set --runs), so no known run"
    return lines or [f"{place} has read {'answer' if sought in wanted else 'answers of'} {sought}"]


def labeled_prompts(model: Path) -> dict[str, Path]:
    """The hashes of the prompts whose labels a model's run, or one that made a model for it, was trained on."""
    found: dict[str, Path] = {}
    model = Path(abspath(model))
    waiting = list(filter(is_run, (model, *model.parents)))[:1]  # the run of its `model/` folder, or of a checkpoint
    seen = set[Path]()
    while waiting:
        run = _Run(waiting.pop())
        if run.folder not in seen:
            seen.add(run.folder)
            found |= {label["prompt"]: run.folder for label in run.labels if label["steps"]}
            waiting += run.read
    return found


@dataclass(frozen=True)
class _Run:
    """A run, as its folder says."""

    folder: Path

    def __str__(self) -> str:
        return f"{self.stage} run {self.folder}"

    @cached_property
    def stage(self) -> str:
        """Its stage; empty if the folder is not that of a run."""
        with suppress(DataError):
            return read_config(self.folder)[0].get("stage", "")
        return ""

    @cached_property
    def labels(self) -> list[Mapping[str, Any]]:
        """The labels that it read."""
        return list(chain(*read_json_object(self.folder / LABELS_FILE).values()))

    @cached_property
    def done(self) -> int:
        """Updates or steps so far."""
        rows = read_metrics(self.folder)
        return rows[-1]["update"] if rows else 0

    @cached_property
    def _recorded(self) -> Recorded:
        path = self.folder / RECEIPT_FILE
        return Recorded.of(read_lines(path) if path.is_file() else ())

    @cached_property
    def inputs(self) -> dict[Path, str]:
        """The hashes of the weights that it read, where they would be now."""
        start = self._recorded.starts[-1]["inputs"] if self._recorded.starts else {}
        return {Path(normpath(self.folder / name)): each for name, each in start.items() if _is_weights(name)}

    @property
    def read(self) -> set[Path]:
        """The runs whose models it read, where they would be now; of a chain, those of its stages."""
        stages = {path.parent for path in self.folder.glob(f"*/{CONFIG_FILE}")}
        return stages | {parent for path in self.inputs for parent in path.parents if is_run(parent)}

    @cached_property
    def made(self) -> set[str]:
        """The hashes of its model's weights that it has changed."""
        files = self._recorded.files.items()
        own = {each for name, each in files if name.startswith(MODEL_FOLDER) and _is_weights(name)}
        return own.difference(self.inputs.values())

    def uses(self, other: _Run) -> bool:
        """True if it read the model of another run, or one of its checkpoints."""
        places = (other.folder / MODEL_FOLDER, other.folder / CHECKPOINTS)
        is_there = any(path.is_relative_to(Path(normpath(place))) for path in self.inputs for place in places)
        return is_there or bool(other.made.intersection(self.inputs.values()))


def _uses(run: _Run, runs: Collection[_Run], indent: str, seen: set[Path]) -> Iterator[str]:
    """Say which runs trained on with a run's model."""
    for other in runs:
        described = stages().get(other.stage)
        if described is None or not described.makes_model or other.folder in seen or not other.uses(run):
            continue
        seen.add(other.folder)
        role = "reward" if run.stage == "reward" and described.samples else "start"
        yield f"{indent}its model is the {role} of the {other}, {described.unit}s 1–{other.done}"
        yield from _uses(other, runs, indent + "  ", seen)


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _ranges(numbers: list[int]) -> str:
    """Write sorted numbers: `1–3, 7`."""
    parts = [
        [number for _, number in consecutive]
        for _, consecutive in groupby(enumerate(numbers), lambda each: each[1] - each[0])
    ]
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
