"""Checks that a run's folder is as the run left it, with the chain of hashes in its receipt."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

from kedge_base.errors import DataError
from kedge_base.run_folder.output import CHECKPOINTS, CONFIG_FILE, FINISHED_FILE, RECEIPT_FILE
from kedge_base.run_folder.receipt import IN_CHECKPOINTS, Recorded, covered_files, file_hash, read_lines, row_hashes
from kedge_base.run_folder.record_format import METRICS_FILE, UNLIKE_ANY_RUN
from kedge_base.texts import counted
from kedge_inspect.record import readable

MANIFEST = "manifest.json"

LIMITS = (
    "This shows that the folder is as its receipt says; --update makes an update again. It does not show that data and "
    "rewards are what they are said to be, nor, unless the hash of the receipt was published before, that folder and "
    "receipt were not made up together."
)


class Verification(NamedTuple):
    """A comparison of a run with its receipt.

    Attributes:
        differences: A line for each; empty if the run is as its receipt says.
        summary: What was compared.
    """

    differences: list[str]
    summary: str


def verify_run(folder: Path) -> Verification:
    """Compare a run's folder with its receipt. Nothing is written.

    Raises:
        DataError: It is not the folder of a run, its run has no receipt, or a file cannot be read.
    """
    if not (folder / RECEIPT_FILE).is_file():
        raise DataError(
            f"{folder} has no {RECEIPT_FILE}: no run of this version of kedge trained there, or it was removed"
        )
    with readable(folder):
        return _verified(folder)


def _verified(folder: Path) -> Verification:
    lines = list(read_lines(folder / RECEIPT_FILE))
    recorded = Recorded.of(lines)
    damaged = [number for number, (line, _) in enumerate(lines, 1) if line is None]
    faults = [f"{RECEIPT_FILE}: line {number} was changed, or a line before it" for number in damaged]
    if not recorded.starts:
        faults += [f"{RECEIPT_FILE} does not say how the run started"]
        return Verification(faults, "nothing else can be compared")
    start = recorded.starts[-1]
    for log in {METRICS_FILE: None, **recorded.rows}:
        rows = [(row, f" (update {update})") for row, update in recorded.rows.get(log, ())]
        faults += _row_faults(log, rows, row_hashes(folder / log))
    files = recorded.files | {f"{CHECKPOINTS}/{name}/{MANIFEST}": each for name, each in recorded.checkpoints.items()}
    for name in recorded.checkpoints:
        with suppress(OSError, *UNLIKE_ANY_RUN):
            listed = json.loads((folder / CHECKPOINTS / name / MANIFEST).read_bytes())["files"]
            files |= {f"{CHECKPOINTS}/{name}/{file}": each["sha256"] for file, each in listed.items()}
    found = covered_files(folder, recorded.rows)
    if not recorded.has_ended:
        found = [name for name in found if name.startswith((IN_CHECKPOINTS, FINISHED_FILE))]
    faults += _file_faults(folder, files, found)
    if f"{CONFIG_FILE} was changed" in faults:
        settings = [(line, f" ({line.strip()})") for line in start["config"].splitlines()]
        faults += _row_faults(CONFIG_FILE, settings, (folder / CONFIG_FILE).read_text("utf-8", "replace").splitlines())
    inputs = {os.path.normpath(folder / name): found for name, found in start["inputs"].items()}
    inputs = {name: found for name, found in inputs.items() if os.path.isfile(name)}
    faults += [f"{each} since the run read it" for each in _file_faults(Path(), inputs, ())]
    begins = recorded.starts[0]["start"]
    summary = (
        f"compared {counted(len(recorded.rows.get(METRICS_FILE, ())), 'update')}, "
        f"{counted(len(recorded.checkpoints), 'checkpoint')}, {counted(len(recorded.files), 'other file')}, and "
        f"{len(inputs)} of {counted(len(start['inputs']), 'file')} that the run read"
        f"{f'; updates up to {begins} as a later start found them' if begins else ''}"
        f"{'' if recorded.has_ended else '; the run is not over, or was killed: what it wrote last may be missing'}"
        f"; receipt {lines[-1][1]}"
    )
    return Verification(faults, summary)


def _row_faults(name: str, recorded: Sequence[tuple[str, str]], found: Sequence[str]) -> Iterator[str]:
    """Compare the rows of a file; recorded ones are followed by their description."""
    matched = SequenceMatcher(None, [row for row, _ in recorded], found, autojunk=False)
    for kind, first, last, start, end in matched.get_opcodes():
        for number in range(0 if kind == "equal" else max(last - first, end - start)):
            if first + number >= last:
                yield f"{name}: row {start + number + 1} is not in the receipt"
            else:
                verb = "is missing" if start + number >= end else "was changed"
                yield f"{name}: row {first + number + 1}{recorded[first + number][1]} {verb}"


def _file_faults(folder: Path, recorded: Mapping[str, str], found: Iterable[str]) -> Iterator[str]:
    """Compare files with their recorded hashes."""
    for name in sorted({*recorded, *found}):
        if name not in recorded:
            yield f"{name} is not in the receipt"
        elif not (folder / name).is_file():
            yield f"{name} is missing"
        elif file_hash(folder / name) != recorded[name]:
            yield f"{name} was changed"
