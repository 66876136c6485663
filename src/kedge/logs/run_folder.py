"""Creates, describes and discards the folder of a run, which is never shared with another run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kedge_base.machine.durable import check_renaming, is_part, make_folder
from kedge_base.run_folder.output import (
    CONFIG_FILE,
    DATA_FILE,
    KEPT_FILES,
    PROGRESS_FILE,
    RECEIPT_FILE,
    ROLES_FILE,
    check_output,
    replace_file,
    writing,
)

BEFORE_RESULTS = frozenset({CONFIG_FILE, DATA_FILE, PROGRESS_FILE, RECEIPT_FILE, ROLES_FILE})
"""Files that a run writes before it has any result."""


def create_run_folder(path: str | Path) -> Path:
    """Create a run's folder; an existing one may contain `KEPT_FILES` only.

    Raises:
        OutputError: It is not empty, is a file, or cannot be created. Nothing is ever overwritten.
    """
    folder = check_output(path)
    with writing(folder):
        make_folder(folder)
        try:
            check_renaming(folder)
        except OSError:
            with suppress(OSError):  # not empty
                folder.rmdir()
            raise
    return folder


def discard_run_folder(folder: Path) -> bool:
    """Remove the folder of a run without results, except `KEPT_FILES`; return whether it had no results.

    Only files that a run writes before its first result are removed. If there is any other file, all are kept.
    """
    if not folder.is_dir():
        return False
    paths = [path for path in folder.iterdir() if path.name not in KEPT_FILES and not is_part(path)]
    for path in paths:
        is_empty_log = path.suffix == ".jsonl" and path.is_file() and not path.stat().st_size
        if path.name not in BEFORE_RESULTS and not is_empty_log:
            return False
    for path in paths:
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return True


def write_config(folder: Path, yaml_text: str, facts: Mapping[str, object]) -> Path:
    """Write `config.yaml`: facts about the run as comments, then the configuration, so that it can be loaded again.

    The file is always complete or absent: without it, no checkpoint of the run can be resumed.

    Raises:
        OutputError: It cannot be written.
    """
    header = "".join(f"# {name}: {value}\n" for name, value in facts.items())
    path = folder / CONFIG_FILE
    replace_file(path, [f"{header}\n{yaml_text.rstrip()}\n".encode()])
    return path
