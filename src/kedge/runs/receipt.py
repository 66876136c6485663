"""Writes the receipt of a run: what it read and wrote, as a chain of hashes; see `kedge_base.run_folder.receipt`."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kedge.logs.json_lines import JsonLines
from kedge.runs.fingerprint import hub_revisions
from kedge.training.checkpoint.files import MANIFEST_FILE
from kedge_base.errors import OutputError
from kedge_base.run_folder.output import (
    CHECKPOINTS,
    CONFIG_FILE,
    DATA_FILE,
    FINISHED_FILE,
    RECEIPT_FILE,
    checkpoints_in,
)
from kedge_base.run_folder.receipt import (
    HASH,
    IN_CHECKPOINTS,
    Recorded,
    covered_files,
    file_hash,
    line_hash,
    read_lines,
    row_hashes,
)
from kedge_base.run_folder.record_format import (
    CRITIC_CHECKS_FILE,
    DETAILS_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
)
from kedge_base.version import __version__

if TYPE_CHECKING:
    from kedge.runs.run import Run

LOGS = (METRICS_FILE, DETAILS_FILE, SAMPLES_FILE, EVALUATIONS_FILE, CRITIC_CHECKS_FILE)
"""The logs whose rows a resumed run writes again after its checkpoint."""


NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(eq=False)
class Receipt:
    """The receipt of a run. As a context, it also records the files of an interrupted run, and closes the file.

    Attributes:
        inputs: The hash of each file that the run reads.
        trained: The hash of what the current update is trained on; empty if unknown.
    """

    inputs: Mapping[Path, str] = field(default_factory=dict)
    trained: str = ""
    _folder: Path = Path()
    _lines: JsonLines | None = None
    _ends: dict[str, int] = field(default_factory=dict)
    _hash: str = ""

    def begin(self, run: Run, update: int) -> None:
        """Record a start of a run, on its first rank: settings, inputs, software, machine, and existing logs and
        checkpoints.

        Args:
            run: The run, started.
            update: The update after which it continues; 0 for a new run.

        Raises:
            OutputError: The receipt cannot be written.
        """
        if not run.ranks.is_first:
            return
        self._folder = run.folder
        path = run.folder / RECEIPT_FILE
        self._lines = JsonLines(path)  # cuts off an incomplete last line
        lines = list(read_lines(path))
        self._hash = lines[-1][1] if lines else ""
        before = Recorded.of(lines).rows
        rows = self._new_rows()
        kept = {name: min(len(each), len(before.get(name, ()))) for name, each in rows.items()}
        self._write(
            {
                "start": update,
                "config": (run.folder / CONFIG_FILE).read_text("utf-8"),
                "kedge": __version__,
                "revision": _revision(),
                "machine": machine_of(run),
                "inputs": {_relative_path(run.folder, path): found for path, found in self.inputs.items()},
                "revisions": hub_revisions(run.config),
                "files": self._hashes([CONFIG_FILE, DATA_FILE]),
                "kept": kept,
                "rows": {name: each[kept[name] :] for name, each in rows.items()},
                "checkpoints": self._checkpoints(),
            }
        )

    def add(self, update: int, *, saved: bool = False) -> None:
        """Record what was logged since the last line, and the checkpoints if one was saved.

        Raises:
            OutputError: The receipt cannot be written.
        """
        if not self._hash:
            return
        more = {"checkpoints": self._checkpoints()} if saved else {"trained": self.trained} if self.trained else {}
        self._write({"update": update, "rows": self._new_rows(), **more})
        self.trained = ""
        if saved and self._lines is not None:
            self._lines.sync()

    def end(self, finished: bytes = b"", known: Mapping[str, str] = NONE) -> None:
        """Record every other file of the run, and close the receipt.

        Args:
            finished: The content of `finished.json`, which is written next; empty for an interrupted run.
            known: Hashes of files that have been computed already.

        Raises:
            OutputError: The receipt cannot be written.
        """
        if not self._hash:
            return
        rows = self._new_rows()
        names = (name for name in covered_files(self._folder, self._ends) if not name.startswith(IN_CHECKPOINTS))
        files = self._hashes(names, known)
        if finished:
            files[FINISHED_FILE] = hashlib.sha256(finished).hexdigest()
        self._write({"rows": rows, "files": files})
        self.close()

    def close(self) -> None:
        """Force the receipt to disk, and close it."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def __enter__(self) -> Receipt:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError, OutputError):  # an error here must not mask the block's exception
            if kind is not None and (self._folder / RECEIPT_FILE).is_file():  # else the run was discarded
                self.end()
            self.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._lines = self._lines or JsonLines(self._folder / RECEIPT_FILE)
        found = line_hash(self._hash, line)
        self._lines.write({**line, HASH: found})
        self._hash = found

    def _new_rows(self) -> dict[str, list[str]]:
        """The hashes of the rows added to the logs since the last call."""
        found = {}
        for path in map(self._folder.joinpath, LOGS):
            if rows := row_hashes(path, self._ends.get(path.name, 0)):
                found[path.name] = rows
                self._ends[path.name] = path.stat().st_size
        return found

    def _checkpoints(self) -> dict[str, str]:
        found = checkpoints_in(self._folder / CHECKPOINTS)
        hashes = self._hashes(f"{CHECKPOINTS}/{path.name}/{MANIFEST_FILE}" for _, path in found)
        return {name.split("/")[1]: each for name, each in hashes.items()}

    def _hashes(self, names: Iterable[str], known: Mapping[str, str] = NONE) -> dict[str, str]:
        """The hashes of files, without those that cannot be read, which `kedge verify` then reports."""
        found = {}
        for name in names:
            with suppress(OSError):
                found[name] = known.get(name) or file_hash(self._folder / name)
        return found


def digest_of(*tensors: Tensor) -> str:
    """The hash of tensors."""
    return hashlib.sha256(b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def machine_of(run: Run) -> dict[str, str]:
    """The software and the machine of a run, on which the last digits of its results depend."""
    device = run.device
    return {
        "code": _code(),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": str(torch.get_num_threads()),
        "ranks": str(run.ranks.count),
    }


SOURCE = Path(__file__).parents[2]


@cache
def _code() -> str:
    """A hash of kedge's files."""
    files = b"".join(path.read_bytes() for path in sorted(SOURCE.glob("kedge*/**/*.py")))
    return hashlib.sha256(files).hexdigest()[:16]


@cache
def _revision() -> str:
    """The revision of kedge's files; empty if they are not in a repository of their own."""
    if (SOURCE.parent / ".git").exists():
        with suppress(OSError):
            command = ["git", "-C", str(SOURCE), "rev-parse", "HEAD"]
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


@cache
def _processor() -> str:
    """The system, the processor, and a hash of its instruction set."""
    path = Path("/proc/cpuinfo")
    found = dict(
        re.findall(
            r"^(model name|flags)\s*: (.*)$",
            path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "",
            re.MULTILINE,
        )
    )
    flags = hashlib.sha256(found.get("flags", "").encode()).hexdigest()[:12]
    return f"{found.get('model name', platform.processor())}, flags {flags}, {platform.system()} {platform.machine()}"


def _relative_path(folder: Path, path: Path) -> str:
    """The relative path of a file: it stays valid if folder and file move together, and omits the user's name."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # on Windows, a path on another drive
        return path.as_posix()
