"""A run as its folder tells it: finished, still running, or dead; read by reports, views and the doctor alike."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from kedge.errors import DataError
from kedge.logs.details import DETAILS_FILE
from kedge.logs.json_lines import read_json_lines
from kedge.logs.metrics import METRICS_FILE
from kedge.logs.samples import SAMPLES_FILE
from kedge.output import CONFIG_FILE, FINISHED_FILE, INCIDENTS_FILE, ROLES_FILE

__all__ = ["RunRecord", "guess_state", "read_heading", "read_mapping", "read_run"]

SUMMARY_FILE = "summary.json"
QUIET_SECONDS = 60.0
"""A run that has written nothing for so long, and for three of its own steps, is taken for dead."""


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run has written so far.

    Attributes:
        folder: Where it lies.
        facts: What stands above its configuration: stage, device, precision, versions.
        config: The resolved configuration, section by section.
        metrics: The rows of `metrics.jsonl`.
        details: Those of `details.jsonl`: figures of an update that are more than one number.
        samples: Those of `samples.jsonl`.
        incidents: Those of `incidents.jsonl`.
        roles: `roles.json`: the size of each model that takes part, by its role.
        summary: `summary.json` or `finished.json`: what it came to, where it came to an end.
        state: Whether it came to its end, is at work as far as its files tell, or stopped before its end.
    """

    folder: Path
    facts: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[dict[str, Any]] = ()
    details: Sequence[dict[str, Any]] = ()
    samples: Sequence[dict[str, Any]] = ()
    incidents: Sequence[dict[str, Any]] = ()
    roles: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    state: Literal["finished", "running", "stopped"] = "finished"

    @property
    def stage(self) -> str:
        """`sft`, `reward`, `ppo`, …"""
        return self.facts.get("stage", "")

    def setting(self, name: str) -> Any:
        """A setting by its dotted name; None where the run's configuration does not know it."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """A metric's course: the updates that have it, and its figures; null is left out."""
        rows = [(row["update"], row[name]) for row in self.metrics if isinstance(row.get(name), (int, float))]
        return [update for update, _ in rows], [float(figure) for _, figure in rows]

    @property
    def judges(self) -> list[str]:
        """The metrics of the reward terms that have no weight: they are measured, and never trained on."""
        terms = self.config.get("reward")
        silent = [term for term in terms if term.get("weight") == 0] if isinstance(terms, list) else []
        names = {name for row in self.metrics[:1] for name in row if name.startswith("score/")}
        return sorted(name for name in names if any(_is_called(name.removeprefix("score/"), term) for term in silent))


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder, also while the run is at work. Files that its stage does not write are empty.

    Raises:
        DataError: It is no run's folder, or a file is damaged.
    """
    facts, config = read_heading(folder)
    metrics = _rows(folder / METRICS_FILE)
    ending = read_mapping(folder / FINISHED_FILE)
    return RunRecord(
        folder,
        facts=facts,
        config=config,
        metrics=metrics,
        details=_rows(folder / DETAILS_FILE),
        samples=_rows(folder / SAMPLES_FILE),
        incidents=_rows(folder / INCIDENTS_FILE),
        roles=read_mapping(folder / ROLES_FILE),
        summary={**ending, **read_mapping(folder / SUMMARY_FILE)},
        state="finished" if ending else guess_state(folder, metrics),
    )


def read_heading(folder: Path) -> tuple[dict[str, str], Mapping[str, Any]]:
    """A run's facts and its configuration.

    Raises:
        DataError: It is no run's folder, or its configuration is damaged.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise DataError(f"{str(folder)!r} is not the folder of a run: it has no {CONFIG_FILE}")
    text = path.read_text(encoding="utf-8", errors="replace")
    header = [line[2:].partition(": ") for line in text.splitlines() if line.startswith("# ") and ": " in line]
    try:
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise DataError(f"{str(path)!r} is damaged: {error}") from error
    return {name: value for name, _, value in header}, settings if isinstance(settings, Mapping) else {}


def guess_state(folder: Path, metrics: Sequence[Mapping[str, Any]]) -> Literal["running", "stopped"]:
    """Whether a run that has not come to its end is at work, by when it wrote last and how long its steps take."""
    path = folder / METRICS_FILE
    written = (path if path.is_file() else folder / CONFIG_FILE).stat().st_mtime
    slowest = max((row["time/update"] for row in metrics[-10:] if row.get("time/update")), default=0.0)
    return "running" if time.time() - written < max(QUIET_SECONDS, 3 * slowest) else "stopped"


def _is_called(name: str, term: Mapping[str, Any]) -> bool:
    """Whether a reward term's metric has this name: its own, or the last part of its source."""
    source = str(term.get("source") or "")
    return name == term.get("name") or (term.get("name") is None and name in source.replace(":", "/").split("/"))


def _rows(path: Path) -> list[dict[str, Any]]:
    return read_json_lines(path) if path.is_file() else []


def read_mapping(path: Path) -> Mapping[str, Any]:
    """What a JSON file holds; empty where there is none.

    Raises:
        DataError: It is damaged.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{str(path)!r} is damaged: {error}") from error
    return found if isinstance(found, Mapping) else {}
