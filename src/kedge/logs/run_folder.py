"""The folder of one run: never a second run's, and always with the configuration that made it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kedge.output import CONFIG_FILE, LEFT_BEHIND, ROLES_FILE, check_output, writing

__all__ = ["create_run_folder", "take_back_folder", "write_config"]


def create_run_folder(path: str | Path) -> Path:
    """Make a run's folder; one that exists already may hold rejected rows and nothing else.

    Raises:
        OutputError: Something is in it, it is a file, or it cannot be made. Nothing is ever overwritten.
    """
    folder = check_output(path)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def take_back_folder(folder: Path) -> None:
    """Make the folder of a run that came to nothing free again; rejected rows stay.

    Only the configuration, the roles and logs without a row are removed. Where anything else is there, nothing is.
    """
    paths = [path for path in folder.iterdir() if path.name not in LEFT_BEHIND]
    if not all(path.name in (CONFIG_FILE, ROLES_FILE) or _is_empty_log(path) for path in paths):
        return
    for path in paths:
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def write_config(folder: Path, yaml_text: str, facts: Mapping[str, object]) -> Path:
    """Write `config.yaml`: facts about the run as comments above, then the configuration itself.

    The file is a configuration again: comments are all that is added.

    Raises:
        OutputError: It cannot be written.
    """
    header = "".join(f"# {name}: {value}\n" for name, value in facts.items())
    path = folder / CONFIG_FILE
    with writing(path):
        path.write_text(f"{header}\n{yaml_text.rstrip()}\n", encoding="utf-8")
    return path


def _is_empty_log(path: Path) -> bool:
    return path.suffix == ".jsonl" and path.is_file() and path.stat().st_size == 0
