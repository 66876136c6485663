"""What a run's folder says now, read at a fraction of what reading all of it again would cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.inspect.doctor import Finding
from kedge.inspect.record import SUMMARY_FILE, RunRecord, guess_state, read_heading, read_mapping
from kedge.inspect.watch.tail import Tail
from kedge.logs.details import DETAILS_FILE
from kedge.logs.metrics import METRICS_FILE
from kedge.logs.samples import SAMPLES_FILE
from kedge.output import CONFIG_FILE, FINISHED_FILE, INCIDENTS_FILE

__all__ = ["Follower", "Sight"]

NEWEST_SAMPLES = 16
SAMPLE_BYTES = 1 << 20
"""The end of samples.jsonl, which grows to the largest file of a run."""

SHARE_OF_TIME = 20
"""The doctor takes no more than this part of the time that somebody watches."""


@dataclass(frozen=True)
class Sight:
    """A run as it is seen at one moment.

    Attributes:
        record: What its files say; of its samples only the newest.
        findings: The doctor's, gravest first.
        age: Seconds since it wrote a row, or since it began.
        is_new: Whether it has rows that were not there at the last look.
    """

    record: RunRecord
    findings: Sequence[Finding]
    age: float
    is_new: bool = True


class Follower:
    """Follows one run: each row is read once, and a file that does not grow is not read again.

    Args:
        folder: The run's.
        diagnose: Finds what is wrong with the run so far.
    """

    def __init__(self, folder: Path, diagnose: Callable[[RunRecord], Sequence[Finding]]) -> None:
        self.folder, self._diagnose = folder, diagnose
        self._metrics = Tail(folder / METRICS_FILE)
        self._details = Tail(folder / DETAILS_FILE)
        self._incidents = Tail(folder / INCIDENTS_FILE)
        self._samples = Tail(folder / SAMPLES_FILE, keep=NEWEST_SAMPLES, last_bytes=SAMPLE_BYTES)
        self._heading: tuple[float, Mapping[str, str], Mapping[str, Any]] | None = None
        self._findings: Sequence[Finding] = ()
        self._next_visit = 0.0
        self._is_first = self._is_unseen = True

    def look(self) -> Sight:
        """The run as it is now.

        Raises:
            DataError: It is no run's folder, or a file is damaged.
        """
        grown = [log.read() for log in (self._metrics, self._details, self._incidents, self._samples)]
        is_new, self._is_first = self._is_first or any(grown), False
        self._is_unseen |= is_new
        record = self._record()
        self._visit(record)
        newest = self.folder / METRICS_FILE
        written = (newest if newest.is_file() else self.folder / CONFIG_FILE).stat().st_mtime
        return Sight(record, self._findings, max(0.0, time.time() - written), is_new)

    def _record(self) -> RunRecord:
        facts, config = self._read_heading()
        ending, metrics = read_mapping(self.folder / FINISHED_FILE), self._metrics.rows
        return RunRecord(
            self.folder,
            facts=facts,
            config=config,
            metrics=metrics,
            details=self._details.rows,
            samples=self._samples.rows,
            incidents=self._incidents.rows,
            summary={**ending, **read_mapping(self.folder / SUMMARY_FILE)},
            state="finished" if ending else guess_state(self.folder, metrics),
        )

    def _read_heading(self) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """Facts and configuration, parsed anew where a resumed run has written them anew."""
        path = self.folder / CONFIG_FILE
        written = path.stat().st_mtime if path.is_file() else 0.0
        if self._heading is None or self._heading[0] != written:
            self._heading = (written, *read_heading(self.folder))
        return self._heading[1:]

    def _visit(self, record: RunRecord) -> None:
        """Have the doctor look at what is new, in a long run less often, and at its end."""
        if not self._is_unseen or (record.state != "finished" and time.monotonic() < self._next_visit):
            return
        begun = time.monotonic()
        self._findings, self._is_unseen = self._diagnose(record), False
        self._next_visit = begun + SHARE_OF_TIME * (time.monotonic() - begun)
