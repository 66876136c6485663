"""The folder of one run: never a second run's, and always with the configuration that made it."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from kedge.errors import OutputError

__all__ = ["create_run_folder", "installed_versions", "next_free_folder", "write_config"]

CONFIG_FILE = "config.yaml"


def create_run_folder(path: str | Path) -> Path:
    """Make a run's folder; an empty one may exist already.

    Raises:
        OutputError: Something is in it, it is a file, or it cannot be made. Nothing is ever overwritten.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"folder {str(folder)!r} is not empty; try {str(next_free_folder(folder))!r}")
    except FileExistsError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"{str(folder)!r} is a file; expected a folder to write the run to") from error
    except (NotADirectoryError, PermissionError) as error:
        raise OutputError(f"folder {str(folder)!r} cannot be made: {error.strerror}; choose another") from error
    return folder


def next_free_folder(path: str | Path) -> Path:
    """The path itself if nothing is there or only an empty folder, else the first free one of `path-2`, `path-3`, …"""
    folder = Path(path).expanduser()
    names = itertools.chain([folder.name], (f"{folder.name}-{number}" for number in itertools.count(2)))
    return next(free for name in names if _is_free(free := folder.with_name(name)))


def installed_versions() -> dict[str, str]:
    """What a run's figures depend on beside its configuration."""
    versions = {package: version(package) for package in ("kedge", "torch", "transformers")}
    return {**versions, "python": platform.python_version()}


def write_config(folder: Path, yaml_text: str, versions: Mapping[str, object]) -> Path:
    """Write `config.yaml`: the versions (and the seed) as comments above, then the configuration itself.

    The file is a configuration again: comments are all that is added.
    """
    header = "".join(f"# {name}: {value}\n" for name, value in versions.items())
    path = folder / CONFIG_FILE
    path.write_text(f"{header}\n{yaml_text.rstrip()}\n", encoding="utf-8")
    return path


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
