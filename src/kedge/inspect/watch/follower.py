"""Incremental reading of a run's folder, at a fraction of the cost of reading all of it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.inspect.doctor import Examination, Finding
from kedge.inspect.record import RESULTS, RunRecord, build_record, last_written, measured, read_config, readable
from kedge.inspect.watch.tail import Tail
from kedge.logs.details import DETAILS_FILE
from kedge.logs.metrics import METRICS_FILE
from kedge.logs.samples import SAMPLES_FILE
from kedge.system.output import CONFIG_FILE, INCIDENTS_FILE, PROGRESS_FILE

__all__ = ["Follower", "Snapshot"]

NEWEST_SAMPLES = 16
SAMPLE_BYTES = 1 << 20
"""Bytes read from the end of samples.jsonl, the largest file of a run."""

DOCTOR_SHARE = 20
"""The doctor runs for at most one part in this many of the watching time."""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        record: What its files hold; only the newest of its samples.
        examination: The doctor's findings, most severe first, and what it could not judge.
        age: Seconds since its last row, or since its start.
        is_new: Whether it has rows that the snapshot before did not have.
        skipped: Lines of its files that are damaged, and left out.
    """

    record: RunRecord
    examination: Examination
    age: float
    is_new: bool = True
    skipped: int = 0

    @property
    def findings(self) -> Sequence[Finding]:
        """The doctor's findings, most severe first."""
        return self.examination.findings


class Follower:
    """Follows one run: each row is read once, and a file that does not grow is not read again.

    Args:
        folder: The run's folder.
        examine: Finds what is wrong with the run so far.
    """

    def __init__(self, folder: Path, examine: Callable[[RunRecord], Examination]) -> None:
        self.folder, self._examine = folder, examine
        self._metrics = Tail(folder / METRICS_FILE, convert=measured)
        self._details = Tail(folder / DETAILS_FILE)
        self._incidents = Tail(folder / INCIDENTS_FILE)
        self._samples = Tail(folder / SAMPLES_FILE, keep=NEWEST_SAMPLES, last_bytes=SAMPLE_BYTES)
        self._progress = Tail(folder / PROGRESS_FILE)
        self._results = [
            Tail(folder / name, keep=NEWEST_SAMPLES, last_bytes=SAMPLE_BYTES, numbered=False)
            for name in RESULTS.values()
        ]
        logs = (self._metrics, self._details, self._incidents, self._samples, self._progress)
        self._logs = (*logs, *self._results)
        self._config: tuple[float, Mapping[str, str], Mapping[str, Any]] | None = None
        self._examination = Examination((), 0)
        self._next_diagnosis = 0.0
        self._is_first = self._is_undiagnosed = True
        self._last_state = ""

    def look(self) -> Snapshot:
        """The current state of the run.

        Raises:
            DataError: The folder is not a run's, or a file in it is damaged.
        """
        with readable(self.folder):
            return self._look()

    def _look(self) -> Snapshot:
        grown = [log.read() for log in self._logs]
        is_new, self._is_first = self._is_first or any(grown), False
        self._is_undiagnosed |= is_new
        facts, config = self._read_config()
        record = build_record(
            self.folder,
            facts,
            config,
            metrics=self._metrics.rows,
            details=self._details.rows,
            samples=self._samples.rows,
            incidents=self._incidents.rows,
            progress=self._progress.rows,
            results=[row for log in self._results for row in log.rows],
        )
        self._is_undiagnosed |= record.state != self._last_state  # the summary is written after the last row
        self._last_state = record.state
        self._update_examination(record)
        age, skipped = max(0.0, time.time() - last_written(self.folder)), sum(log.skipped for log in self._logs)
        return Snapshot(record, self._examination, age, is_new, skipped)

    def _read_config(self) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """Facts and configuration, parsed again after a resumed run has rewritten them."""
        path = self.folder / CONFIG_FILE
        written = path.stat().st_mtime if path.is_file() else 0.0
        if self._config is None or self._config[0] != written:
            self._config = (written, *read_config(self.folder))
        return self._config[1:]

    def _update_examination(self, record: RunRecord) -> None:
        """Diagnose new rows, less often in a long run, and always at its end."""
        if not self._is_undiagnosed or (record.state != "finished" and time.monotonic() < self._next_diagnosis):
            return
        started = time.monotonic()
        self._examination, self._is_undiagnosed = self._examine(record), False
        self._next_diagnosis = started + DOCTOR_SHARE * (time.monotonic() - started)
