"""The receipt of a run, `receipt.jsonl`: what it read and wrote, as a chain of hashes.

Every line is a JSON object whose last entry hashes it together with the hash of the line before. A line for each
start of a process, for each update, for each saved checkpoint, and for the end:

    {"start": 0, "config": …, "machine": …, "inputs": {FILE: SHA-256}, "files": …, "kept": …, "rows": …, "hash": …}
    {"update": 1, "rows": {"metrics.jsonl": [SHA-256]}, "trained": SHA-256, "hash": …}
    {"update": 1, "rows": {}, "checkpoints": {"update-000001": SHA-256 of its manifest}, "hash": …}
    {"rows": {}, "files": {"model/model.safetensors": SHA-256, …}, "hash": …}

`start` is the update after which a process continues, and `kept` the number of rows of each log that it kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge_base.machine.durable import is_part
from kedge_base.run_folder.output import (
    CHECKPOINTS,
    INCIDENTS_FILE,
    KEPT_FILES,
    MODEL_FOLDER,
    RECEIPT_FILE,
    REPORT_FILE,
)
from kedge_base.run_folder.record_format import UNLIKE_ANY_RUN

HASH = "hash"

IN_CHECKPOINTS = f"{CHECKPOINTS}/update-"
"""Start of the paths of files that the manifest of a checkpoint lists."""

UNCOVERED = KEPT_FILES - {INCIDENTS_FILE}
UNCOVERED |= {RECEIPT_FILE, REPORT_FILE, "README.md", "loggers.json", "tensorboard", "wandb"}
"""Files and folders that may change after a run, and its inputs: models in memory, answers of judges."""


@dataclass
class Recorded:
    """The content of a run's folder according to the lines of its receipt.

    Attributes:
        rows: By log, the hash of each row, and the update after which it was recorded.
        checkpoints: By name of a checkpoint, the hash of its manifest.
        files: By path, the hash of each other file.
        trained: By update, the hash of the responses and rewards that it was trained on.
        starts: The lines of the starts whose updates still exist, in order.
        has_ended: The last line is that of the end; a run without one is running, or was killed.
    """

    rows: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    checkpoints: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    trained: dict[int, str] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    has_ended: bool = False

    @classmethod
    def of(cls, lines: Iterable[tuple[dict[str, Any] | None, str]]) -> Recorded:
        """Read the lines of a receipt, without damaged ones."""
        found = cls()
        update = 0
        for line in (line for line, _ in lines if line is not None):
            update = line.get("update", line.get("start", update))
            if "start" in line:
                found._start(line, update)
            for name, hashes in line["rows"].items():
                found.rows.setdefault(name, []).extend((each, update) for each in hashes)
            if "trained" in line:
                found.trained[update] = line["trained"]
            found.checkpoints = line.get("checkpoints", found.checkpoints)
            found.files = line.get("files", found.files)
            found.has_ended = "files" in line and "start" not in line
        return found

    def _start(self, line: dict[str, Any], update: int) -> None:
        self.starts = [each for each in self.starts if each["start"] < update] + [line]
        self.rows = {name: self.rows.get(name, [])[:count] for name, count in line["kept"].items()}
        line["files"] |= {name: each for name, each in self.files.items() if name.startswith(MODEL_FOLDER)}


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Yield the content of each line of a receipt, or None if it is damaged, and the hash that the line has.

    Raises:
        OSError: The file cannot be read.
    """
    previous = ""
    for line in path.read_bytes().splitlines(keepends=True):
        content = None
        with suppress(*UNLIKE_ANY_RUN):
            found = json.loads(line)
            stated = found.pop(HASH)
            is_whole = line == encoded({**found, HASH: line_hash(previous, found)}) + b"\n"
            content, previous = found if is_whole else None, str(stated)
        yield content, previous


def line_hash(previous: str, content: Mapping[str, Any]) -> str:
    """The hash of a line with this content, given that of the line before."""
    return hashlib.sha256(previous.encode() + encoded(content)).hexdigest()


def encoded(content: Mapping[str, Any]) -> bytes:
    """The JSON of a line."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace")


def row_hashes(path: Path, start: int = 0) -> list[str]:
    """The hashes of the rows of a log from a byte on; empty without a file."""
    if not path.is_file():
        return []
    with path.open("rb") as log:
        log.seek(start)
        return [hashlib.sha256(row).hexdigest() for row in log]


def file_hash(path: Path) -> str:
    """The hash of a file, read in pieces.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def covered_files(folder: Path, logs: Iterable[str]) -> list[str]:
    """The files in a run's folder, besides its logs, that do not change after the run."""
    skipped = UNCOVERED.union(logs)
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path.as_posix() for path in paths if not any(part in skipped or is_part(Path(part)) for part in path.parts)]
