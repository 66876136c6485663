"""The format of a run's record: its files and how their rows are read. Needs neither torch nor numpy.

The logs write these files, and everything that inspects a run reads them. `output` has the names of the files that are
not logs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kedge_base.errors import DataError
from kedge_base.run_folder.output import CONFIG_FILE

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
CRITIC_CHECKS_FILE = "critic_checks.jsonl"
SAMPLES_FILE = "samples.jsonl"
DETAILS_FILE = "details.jsonl"
"""The distributions of each update, a row per update."""

MEASURED = ("time/", "tokens_per_second", "memory/")
"""Prefixes of the metrics that differ between two runs with the same seed."""
OF_SCORES = ("reward/score_", "reward/length_correlation", "group/")
"""Prefixes of the metrics that a run without a reward does not have: every score would be 0."""

JUDGING = "judge"
"""The phase in `progress.jsonl` in which a judge reads all responses of a side at once."""

NUM_BINS = 41
WIDEST = 1.0
"""The ratios in `details.jsonl` are counted in NUM_BINS equal bins of log ρ from −WIDEST to WIDEST; values outside
count in the outermost bins.
"""

MAX_RATIO = {"fp32": 1.01, "bf16": 2.0}
"""Largest ratio of two probabilities of the same token that rounding can explain, by number format.

In fp32 they differ by at most 1e-4. In bf16, with 8 significant bits, it grows with the model: over some thousands of
tokens at temperature 0.7 the largest was 1.3 in small models and 1.54 in SmolLM2-135M. There, a temperature of 0.75
gives 2.9, a temperature of 0.8 gives 7, and positions off by one give 99.
"""


DEEPEST = 100
# libyaml's loader is seven times faster than the one in pure Python, but some builds of PyYAML lack it.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

UNLIKE_ANY_RUN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""The errors that occur when reading a file whose content no run writes."""


def parsed_row(line: bytes, *, numbered: bool) -> dict[str, Any] | None:
    """Parse a line as a row; None if it is damaged, or lacks the update that `numbered` rows have."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also raised for too many digits or levels
        return None
    if isinstance(row, dict):
        update = row.get("update")
        if not numbered or (type(update) is int and 0 <= update < 1 << 53):
            return row
    return None


def read_rows(path: Path, *, numbered: bool, on_skipped: Callable[[str], None]) -> list[dict[str, Any]]:
    """Read the rows of a run's file, which may still be written to; empty without a file.

    Args:
        path: The file.
        numbered: Whether rows have an update.
        on_skipped: Called with a message about damaged lines; the last one may be incomplete.
    """
    if not path.is_file():  # reading a pipe would block
        return []
    rows, skipped = _rows_in(path, numbered=numbered)
    if skipped:
        first = f"line {skipped[0]}" if len(skipped) == 1 else f"{len(skipped):,} lines, first line {skipped[0]}"
        on_skipped(f"{path}: {first}: damaged, left out")
    return rows


def _rows_in(path: Path, *, numbered: bool) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of a file, and the numbers of damaged lines; the last may be incomplete, as a run is writing it."""
    lines = path.read_bytes().split(b"\n")
    found = [(number, parsed_row(line, numbered=numbered)) for number, line in enumerate(lines, 1) if line]
    damaged = [number for number, row in found if row is None and number < len(lines)]
    return [row for _, row in found if row is not None], damaged


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a file, which may still be written to.

    Raises:
        DataError: The file does not exist, or a line before the last is not a JSON object.
    """
    if not path.is_file():
        raise DataError(f"{str(path)!r} does not exist; expected a run's folder")
    rows, damaged = _rows_in(path, numbered=False)
    if damaged:
        raise DataError(f"{str(path)!r}, line {damaged[0]}: not a JSON object")
    return rows


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, which may still be in progress.

    Raises:
        DataError: As `read_json_lines`.
    """
    return read_json_lines(folder / METRICS_FILE)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `samples.jsonl`; raises `DataError` as `read_json_lines`."""
    return read_json_lines(folder / SAMPLES_FILE)


def read_config(folder: Path) -> tuple[dict[str, str], Mapping[str, Any]]:
    """A run's facts and its configuration.

    Raises:
        DataError: The folder is not a run's, or its configuration is damaged.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise DataError(f"{str(folder)!r} is not the folder of a run: it has no {CONFIG_FILE}")
    text = path.read_text(encoding="utf-8", errors="replace")
    header = [line[2:].partition(": ") for line in text.splitlines() if line.startswith("# ") and ": " in line]
    try:
        _check_yaml(text)
        settings = YAML_LOADER(text).get_single_data() or {}
    except (yaml.YAMLError, *UNLIKE_ANY_RUN) as error:
        raise DataError(f"{str(path)!r} is damaged: {' '.join(str(error).split())}") from error
    return {name: value for name, _, value in header}, settings if isinstance(settings, Mapping) else {}


def _check_yaml(text: str) -> None:
    """Reject a file that no run writes and that could crash the reader.

    Deep nesting crashes libyaml's loader and takes Python's minutes; a few aliases expand to billions of values.

    Raises:
        ValueError: It has too many levels, or aliases.
    """
    depth = 0
    for event in yaml.parse(text, YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} levels")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases")


def text_hash(text: str) -> str:
    """A short hash by which texts are compared without being kept."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Read the object in a JSON file; empty without a file.

    Raises:
        DataError: The file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is damaged: {error}") from error
    return found if isinstance(found, Mapping) else {}
