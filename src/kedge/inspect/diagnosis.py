"""The doctor's visits: to a run's folder, to a chain of runs, and to a run at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.inspect.doctor import Advice, Finding, diagnose, graver, no_advice, one_line
from kedge.inspect.record import RunRecord, read_run
from kedge.logs.metrics import METRICS_FILE, read_metrics
from kedge.output import is_run

__all__ = ["LiveDoctor", "diagnose_run"]

ORDER = ("sft", "reward", "ppo")
"""Stages of a chain, as they follow from each other."""

EVERY = 4
"""Updates between two looks at a run at work; a tenth of those that there have been, once that is more."""

FIRST, LATEST = 50, 450
"""Updates that are remembered of a run at work: how it began, and how it goes. A run may have no end."""


def diagnose_run(folder: Path, *, advice: Advice = no_advice) -> list[Finding]:
    """What is the matter with the run in a folder, gravest first; see `kedge.inspect.doctor`.

    Of a folder that holds the runs of several stages, such as those of `kedge rlhf` and `kedge demo`, each stage's is
    examined, and what was seen begins with its name.

    Args:
        folder: A run that is at work, finished or dead, or a folder of runs.
        advice: What a field's documentation says about a value that is too high or too low.

    Raises:
        DataError: It is no run's folder, or a file is damaged.
    """
    stages = [path for path in sorted(folder.glob("*")) if is_run(path)]
    if not stages:
        return diagnose(read_run(folder), advice=advice)
    records = sorted((read_run(path) for path in stages), key=_place)
    found = [
        replace(finding, seen=f"{record.folder.name}: {finding.seen}")
        for record in records
        for finding in diagnose(record, advice=advice)
    ]
    return sorted(found, key=graver)


class LiveDoctor:
    """Looks at a run while it is at work, and says each serious finding once.

        doctor = LiveDoctor(run.folder, run.facts, config, say=progress.say)
        doctor.see(update, metrics)

    Args:
        folder: The run's folder; rows that an earlier process has written are counted in.
        facts: What stands above its configuration.
        config: Its configuration, section by section.
        say: Tells a user.
        advice: As in `diagnose_run`.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, object],
        config: Mapping[str, Any],
        *,
        say: Callable[[str], None],
        advice: Advice = no_advice,
    ) -> None:
        self._rows: list[dict[str, Any]] = read_metrics(folder) if (folder / METRICS_FILE).is_file() else []
        told = {name: str(fact) for name, fact in facts.items()}
        self._run = RunRecord(folder, told, config, self._rows, state="running")
        self._say, self._said, self._advice = say, set[str](), advice
        self._next = (self._rows[-1]["update"] if self._rows else 0) + EVERY

    def see(self, update: int, metrics: Mapping[str, float]) -> None:
        """Take in an update's figures, and look where there are enough new ones."""
        self._rows.append({"update": update, **metrics})
        del self._rows[FIRST:-LATEST]
        if update < self._next:
            return
        self._next = update + max(EVERY, update // 10)
        for finding in diagnose(self._run, advice=self._advice):
            if finding.severity == "serious" and finding.rule not in self._said:
                self._said.add(finding.rule)
                self._say(f"{one_line(finding)}. Try: {finding.try_}")


def _place(record: RunRecord) -> tuple[int, str]:
    return (ORDER.index(record.stage) if record.stage in ORDER else len(ORDER), record.folder.name)
