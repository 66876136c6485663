"""The doctor's visits: to a run's folder, to a chain of runs, and to a run at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.config import Config
from kedge.config.knob import knob_of
from kedge.config.words import find_field
from kedge.output import is_run
from kedge.report.doctor import Direction, Finding, diagnose, graver, one_line
from kedge.report.metrics import METRICS_FILE, read_metrics
from kedge.report.progress import say
from kedge.report.record import RunRecord, read_run

__all__ = ["LiveDoctor", "diagnose_record", "diagnose_run", "tell_findings"]

ORDER = ("sft", "reward", "ppo")
"""Stages of a chain, as they follow from each other."""

EVERY = 4
"""Updates between two looks at a run at work; a tenth of those that there have been, once that is more."""

FIRST, LATEST = 50, 450
"""Updates that are remembered of a run at work: how it began, and how it goes. A run may have no end."""


def diagnose_run(folder: Path) -> list[Finding]:
    """What is the matter with the run in a folder, gravest first; see `kedge.report.doctor`.

    Of a folder that holds the runs of several stages, such as those of `kedge rlhf` and `kedge demo`, each stage's is
    examined, and what was seen begins with its name.

    Args:
        folder: A run that is at work, finished or dead, or a folder of runs.

    Raises:
        DataError: It is no run's folder, or a file is damaged.
    """
    stages = [path for path in sorted(folder.glob("*")) if is_run(path)]
    if not stages:
        return diagnose_record(read_run(folder))
    records = sorted((read_run(path) for path in stages), key=_place)
    found = [
        replace(finding, seen=f"{record.folder.name}: {finding.seen}")
        for record in records
        for finding in diagnose_record(record)
    ]
    return sorted(found, key=graver)


def diagnose_record(record: RunRecord) -> list[Finding]:
    """The same for one run that was read already."""
    return diagnose(record, advice=what_the_configuration_says)


def what_the_configuration_says(name: str, direction: Direction) -> str:
    """A field's own text on a value that is too high or too low; empty for a choice."""
    field = find_field(name)
    if field is None or direction == "switch":
        return ""
    told = knob_of(field)
    return (told.too_high if direction == "too_high" else told.too_low) or ""


def tell_findings(folder: Path) -> None:
    """Say in a line each, at a run's end, what is serious and what may be; nothing of a run that is well."""
    found = [finding for finding in diagnose_run(folder) if finding.severity != "note"]
    for finding in found:
        say(one_line(finding))
    if found:
        say(f"`kedge doctor {folder}` says what that means and what to try")


class LiveDoctor:
    """Looks at a run while it is at work, and says each serious finding once.

        doctor = LiveDoctor(run.folder, run.facts, config, say=progress.say)
        doctor.see(update, metrics)

    Args:
        folder: The run's folder; rows that an earlier process has written are counted in.
        facts: What stands above its configuration.
        config: Its configuration.
        say: Tells a user.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, object], config: Config, *, say: Callable[[str], None]
    ) -> None:
        self._rows: list[dict[str, Any]] = read_metrics(folder) if (folder / METRICS_FILE).is_file() else []
        told = {name: str(fact) for name, fact in facts.items()}
        self._run = RunRecord(folder, told, config.model_dump(mode="json"), self._rows, state="running")
        self._say, self._said = say, set[str]()
        self._next = (self._rows[-1]["update"] if self._rows else 0) + EVERY

    def see(self, update: int, metrics: Mapping[str, float]) -> None:
        """Take in an update's figures, and look where there are enough new ones."""
        self._rows.append({"update": update, **metrics})
        del self._rows[FIRST:-LATEST]
        if update < self._next:
            return
        self._next = update + max(EVERY, update // 10)
        for finding in diagnose_record(self._run):
            if finding.severity == "serious" and finding.rule not in self._said:
                self._said.add(finding.rule)
                self._say(f"{one_line(finding)}. Try: {finding.try_}")


def _place(record: RunRecord) -> tuple[int, str]:
    return (ORDER.index(record.stage) if record.stage in ORDER else len(ORDER), record.folder.name)
