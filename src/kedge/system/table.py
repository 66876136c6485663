"""Reads the tables beside the code: lines of columns separated by tabs."""

from pathlib import Path


def read_table(path: Path) -> list[list[str]]:
    """The rows of a file, without empty lines and lines that start with `#`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line and not line.startswith("#")]
