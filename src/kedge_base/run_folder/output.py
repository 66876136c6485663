"""File names of a run's folder, checks before writing, and safe replacement of files."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from kedge_base.errors import ConfigError, KedgeError, OutputError
from kedge_base.machine.durable import is_part, replace_contents
from kedge_base.machine.invocation import as_argument
from kedge_base.stage import Stage, stages

CONFIG_FILE = "config.yaml"
"""The resolved configuration. A folder that contains it is that of a run."""

DATA_FILE = "data.json"
"""File with the number of rows that a run uses, and the reasons for dropping others; written when the run starts."""

FINISHED_FILE = "finished.json"
"""Written when a run finishes."""

LABELS_FILE = "labels.json"
"""The labels among the data that a run reads, with the optimizer steps that are trained on each; see `DataLog`."""

WAITING_FILE = "waiting.json"
"""Written when a run ends because it waits for labels, with the name of their folder; removed when it is resumed."""

RECEIPT_FILE = "receipt.jsonl"
"""Hashes of what a run read and wrote, a line per update; see `receipt`."""

SAMPLED_FOLDER = "sampled"
"""In a critic's run: the responses to which it is fitted, in parts."""

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
"""The results of a run or a chain; a folder that contains it counts as finished."""

SWEEP_FILE = "sweep.json"
"""The settings and results of a sweep. A folder that contains it is that of a sweep."""

ROLES_FILE = "roles.json"
"""The models of a run and their sizes."""

VIDEO_FILE = "episode.webp"
"""An episode of a control run, animated."""

MODEL_FOLDER = "model"
"""The model in the folder of a run or of a checkpoint."""

CHECKPOINTS = "checkpoints"
"""The checkpoints in a run's folder."""

BEST_FILE = "best.json"
"""In the folder of checkpoints: which of them is the best so far, and by which metric."""

REJECTED_FILE = "rejected.jsonl"
"""Rows of the data that cannot be used; written by the readers, before a run starts."""

REWARD_LOG = "reward.log"
VLLM_LOG = "vllm.log"
"""Output and exceptions of reward functions."""

INCIDENTS_FILE = "incidents.jsonl"
"""Non-finite values and loss spikes that a run refused to train on."""

PROGRESS_FILE = "progress.jsonl"
"""Progress of a stage without updates: a row per batch of responses."""

JUDGMENTS_FILE = "judgments.jsonl"
"""The responses of both sides of an evaluation, and which one the judge prefers."""

RESPONSES_FILE = "responses.jsonl"
"""The responses of a generate run."""

IN_MEMORY_FOLDER = "in_memory_models"
"""Models that were given as Python objects; written before a run starts."""

JUDGE_FILE = "judges.sqlite"
"""The requests to judges behind an API, and their answers."""

DEEPEST = 200
"""Maximum depth of an output folder; Python creates and deletes folders by recursion."""

DIAGNOSTIC_FILES = frozenset({REJECTED_FILE, REWARD_LOG, VLLM_LOG, INCIDENTS_FILE})
"""Files that explain why a run failed; the next run in the folder removes them."""

KEPT_FILES = DIAGNOSTIC_FILES | {IN_MEMORY_FOLDER, *(f"{JUDGE_FILE}{end}" for end in ("", "-journal", "-shm", "-wal"))}
"""Files that a failed run leaves. A folder with nothing else counts as free."""


class Result(Protocol):
    """The result of a run."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...


def folder_of(run: str | os.PathLike[str] | Result, name: str = "run") -> Path:
    """Resolve an argument, a path or the result of a run, to a folder.

    Raises:
        ConfigError: It is neither.
    """
    place: object = getattr(run, "folder", run)
    if not isinstance(place, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a path, or the result of a run, not of type {type(run).__name__}")
    return Path(os.path.expanduser(cast("str | os.PathLike[str]", place)))


def check_output(path: str | os.PathLike[str]) -> Path:
    """Check that a folder is free and that it can probably be created, without creating it; returns its path.

    Raises:
        OutputError: It is not empty, or its nearest existing ancestor is not a folder or is write-protected.
    """
    folder = check_creatable(path)
    with writing(folder):
        if is_free(folder):
            return folder
        stage = run_stage(folder)
    name = stage.name if stage is not None and stage.resumes else None
    resume = as_argument(f"kedge {name} --resume {shlex.quote(str(path))}", "resume=True")
    more = f", or resume its run of {name}: {resume}" if name else ""
    raise OutputError(f"{path} is not empty; choose another {as_argument('--out')}, or empty it{more}")


def run_stage(folder: Path) -> Stage | None:
    """The stage of the run in a folder, by the first line of its configuration; None if there is no such run."""
    if not is_run(folder):
        return None
    with (folder / CONFIG_FILE).open(encoding="utf-8", errors="replace") as lines:
        return stages().get(lines.readline().removeprefix("# stage: ").strip())


def check_creatable(path: str | os.PathLike[str]) -> Path:
    """Check that a folder exists or can probably be created, without creating it; returns its path.

    Raises:
        OutputError: Its nearest existing ancestor is not a folder or is write-protected.
    """
    if not str(path):
        raise OutputError(f"{as_argument('--out')} is empty text; give a folder's name, or . for the current folder")
    folder = Path(os.path.expanduser(path))
    _check_name(folder)
    nearest = next((place for place in (folder, *folder.parents) if os.path.exists(place)), folder)
    if not os.path.isdir(nearest):
        raise OutputError(f"{folder} cannot be created: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} cannot be created: {nearest} is write-protected")
    return folder


def _check_name(folder: Path) -> None:
    """Reject invalid names before anything is loaded."""
    if len(folder.parts) > DEEPEST:
        raise OutputError(f"{str(folder)[:40]}… cannot be created: more than {DEEPEST} levels")
    if str(folder).startswith("~"):
        raise OutputError(f"{folder} cannot be created: the user in `~user` does not exist")
    try:
        folder.lstat()
    except (
        FileNotFoundError,
        NotADirectoryError,
        PermissionError,
    ):  # reported by check_creatable, which names the path in the way
        pass
    except OSError as error:
        raise OutputError(f"{folder} cannot be created: {error.strerror or error}") from error
    except ValueError as error:  # the path contains NUL or half of a surrogate pair
        raise OutputError(f"{folder} cannot be created: {error}") from error


def free_folders(path: Path) -> Iterator[Path]:
    """The free folders among `path`, `path-2`, `path-3`, …, in order.

    Raises:
        OutputError: One of them cannot be read.
    """
    for name in itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2))):
        folder = path.with_name(name)
        with writing(folder):
            free = is_free(folder)
        if free:
            yield folder


def checkpoint_folder(run: Path, update: int) -> Path:
    """The folder of the checkpoint after an update; it need not exist."""
    return run / CHECKPOINTS / f"update-{update:06d}"


def kept_checkpoints(run: Path) -> list[int]:
    """The updates of a run's existing checkpoints, in order."""
    return [update for update, _ in checkpoints_in(run / CHECKPOINTS)]


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder as pairs of update and path, in order."""
    found = ((re.fullmatch(r"update-(\d{6,})", path.name), path) for path in folder.glob("update-*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def best_checkpoint(run: Path) -> int | None:
    """The update of a run's best checkpoint; None if no best checkpoint is kept or its file is damaged."""
    update = _entry(run / CHECKPOINTS / BEST_FILE, "update")
    return update if type(update) is int and checkpoint_folder(run, update).is_dir() else None


def _entry(path: Path, name: str) -> Any:
    """An entry of the object in a JSON file; None if it is missing or the file is damaged."""
    try:
        return json.loads(path.read_bytes())[name]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def is_run(folder: Path) -> bool:
    """True if the folder is that of a run."""
    return _has(folder, CONFIG_FILE)


def waiting_for(folder: Path) -> Path | None:
    """The folder of the labels that a run waits for; None unless it has ended because of that."""
    labels = _entry(folder / WAITING_FILE, "labels")
    return folder / labels if isinstance(labels, str) else None


def is_sweep(folder: Path) -> bool:
    """True if the folder is that of a sweep."""
    return _has(folder, SWEEP_FILE)


def _has(folder: Path, name: str) -> bool:
    return os.path.isfile(os.path.join(os.path.expanduser(folder), name))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn system errors (full disk, missing permissions, a file in the way) into one line that names the path.

    Raises:
        OutputError: A system call in the block failed.
    """
    try:
        yield
    except Exception as error:
        reason = None if isinstance(error, KedgeError) else refusal(error)
        if reason is None:
            raise
        raise OutputError(f"{path} cannot be written: {reason}") from error


def refusal(error: BaseException) -> str | None:
    """Return the system's reason for a failed read or write; None for other errors, such as a rank that is gone.

    safetensors and tokenizers, written in Rust, raise their own errors, which contain the text of the system's error.
    """
    if isinstance(error, OutputError) and error.__cause__ is not None:
        return refusal(error.__cause__)
    if isinstance(error, OSError) and not isinstance(error, KedgeError):
        return error.strerror or str(error)
    found = re.search(r"([^:]*) \(os error \d+\)", str(error))
    return found and found[1].strip()


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace a file atomically: after a kill or a power failure, it has either its old or its new content.

    Raises:
        OutputError: Writing fails; the file keeps its old content.
    """
    with writing(path):
        replace_contents(path, pieces)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the results of a run, a chain or a comparison, atomically; errors as in `replace_file`."""
    replace_file(folder / SUMMARY_FILE, [json.dumps(summary, indent=2).encode(), b"\n"])


def is_free(folder: Path) -> bool:
    """True for a folder that does not exist or only contains what a failed run leaves."""
    try:  # a single call, because another process could create the folder between two
        entries = os.listdir(folder)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False
    return all(name in KEPT_FILES or is_part(Path(name)) for name in entries)
