"""A finished run: `finished.json` says what came out, and is written only once the model is on the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kedge.config import Config
from kedge.errors import DataError
from kedge.logs.progress import say
from kedge.runs.extension import lengthening
from kedge.stages.stage import find_stage
from kedge.system.output import CHECKPOINTS, FINISHED_FILE, MODEL_FOLDER, replace_file
from kedge.training.checkpoint.hashed_files import FileRecord, record_file
from kedge.training.checkpoint.store import newest_valid

__all__ = ["damage", "finished_run", "mark_finished", "read_ending"]

FILES = "model_files"
CARD = "README.md"


def mark_finished(folder: Path, stage: str, summary: Mapping[str, Any]) -> None:
    """Write `finished.json`: the summary, and records of the model's files, which are on the disk by then.

    Raises:
        OutputError: It cannot be written.
    """
    model = folder / MODEL_FOLDER
    paths = sorted(path for path in model.rglob("*") if path.is_file()) if find_stage(stage).makes_model else []
    files = {path.relative_to(model).as_posix(): asdict(record_file(path)) for path in paths}
    content = {"stage": stage, **summary, **({FILES: files} if files else {})}
    replace_file(folder / FINISHED_FILE, [json.dumps(content, indent=2).encode()])


def finished_run(config: Config) -> Path | None:
    """The output folder if its run has finished and the configuration does not lengthen it, else None.

    A run whose model is damaged has not finished: its end is to be repeated from a checkpoint.

    Raises:
        DataError: The model is damaged, and there is no checkpoint.
    """
    folder = None if config.out is None else Path(os.path.expanduser(config.out))
    if folder is None or not (folder / FINISHED_FILE).is_file():
        return None
    try:
        stage = str(json.loads((folder / FINISHED_FILE).read_bytes())["stage"])
    except (ValueError, LookupError, TypeError):  # damaged, which `read_ending` reports
        return folder
    if lengthening(folder, config, stage):
        return None
    if not find_stage(stage).makes_model or (problem := damage(folder)) is None:
        return folder
    if find_stage(stage).length and newest_valid(folder / CHECKPOINTS, on_rejected=say) is None:
        raise DataError(f"{problem}, and {folder} has no checkpoint to repeat it from; train anew, in another --out")
    say(f"{problem}: the end of the run is repeated")
    return None


def damage(folder: Path) -> str | None:
    """What is wrong with the model of a finished run, or with that of a stage of a chain; None if it is whole.

    Of the weights every byte counts. Other files may have been edited; they must not be missing, empty, or no JSON.
    """
    for ending in (folder / FINISHED_FILE, *sorted(folder.glob(f"*/{FINISHED_FILE}"))):
        model = ending.parent / MODEL_FOLDER
        if not model.is_dir():
            return f"{model} is missing"
        found = sorted(path for path in model.rglob("*") if path.is_file())
        recorded = {model / name: FileRecord(**record) for name, record in _recorded(ending).items()}
        for path in dict.fromkeys([*recorded, *found]):
            if path.name != CARD and (problem := _problem(path, recorded.get(path))):
                return f"{path} is {problem}"
    return None


def _problem(path: Path, recorded: FileRecord | None) -> str | None:
    """What is wrong with a file of a model; in runs of earlier versions, there is no record of it."""
    try:
        if path.suffix == ".safetensors":
            if recorded is not None:
                return None if record_file(path) == recorded else "damaged"
            with safe_open(path, framework="pt"):
                return None
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        return "empty" if recorded and recorded.size and not path.stat().st_size else None
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, RecursionError, SafetensorError):
        return "damaged"


def _recorded(ending: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads(ending.read_bytes()).get(FILES) or {})
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def read_ending(folder: Path, *names: str) -> list[Any]:
    """Values from the summary written by `mark_finished`.

    Args:
        folder: The run's folder.
        names: Keys of the summary.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / FINISHED_FILE
    try:
        ending = json.loads(path.read_bytes())
        return [ending[name] for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged; delete it, and --resume repeats the run's last steps") from error
