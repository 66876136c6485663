"""The doctor's visit to a run's folder."""

from __future__ import annotations

from pathlib import Path

from kedge.config.knob import knob_of
from kedge.config.words import find_field
from kedge.report.doctor import Direction, Finding, diagnose
from kedge.report.record import RunRecord, read_run

__all__ = ["diagnose_record", "diagnose_run"]


def diagnose_run(folder: Path) -> list[Finding]:
    """What is the matter with the run in a folder, gravest first; see `kedge.report.doctor`.

    Args:
        folder: A run that is at work, finished or dead.

    Raises:
        DataError: It is no run's folder, or a file is damaged.
    """
    return diagnose_record(read_run(folder))


def diagnose_record(record: RunRecord) -> list[Finding]:
    """The same for a run that was read already."""
    return diagnose(record, advice=what_the_configuration_says)


def what_the_configuration_says(name: str, direction: Direction) -> str:
    """A field's own text on a value that is too high or too low; empty for a choice."""
    field = find_field(name)
    if field is None or direction == "switch":
        return ""
    told = knob_of(field)
    return (told.too_high if direction == "too_high" else told.too_low) or ""
