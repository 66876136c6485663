"""Reads a run from its folder, for reports, live views and the doctor."""

from __future__ import annotations

import itertools
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

from kedge_base.errors import DataError, KedgeError
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import (
    BEST_FILE,
    CHECKPOINTS,
    CONFIG_FILE,
    DATA_FILE,
    FINISHED_FILE,
    INCIDENTS_FILE,
    JUDGMENTS_FILE,
    PROGRESS_FILE,
    RESPONSES_FILE,
    ROLES_FILE,
    SUMMARY_FILE,
    Result,
    best_checkpoint,
    folder_of,
    is_run,
)
from kedge_base.run_folder.record_format import (
    CRITIC_CHECKS_FILE,
    DETAILS_FILE,
    EVALUATIONS_FILE,
    JUDGING,
    METRICS_FILE,
    SAMPLES_FILE,
    UNLIKE_ANY_RUN,
    read_config,
    read_json_object,
    read_rows,
)
from kedge_base.term_names import distinct_names, source_name
from kedge_inspect.abroad.trainers import Trainer

QUIET_SECONDS = 60.0
"""Seconds without a write, and at least three updates' time, after which a run counts as stopped."""

LONG_SECONDS = 600.0
"""The same before the first update, which may take long, and while a judge reads all responses at once."""

LARGEST = 1e300
FIRST_LINES = 20
"""Lines of a configuration within which its header is."""

FIRST_ENTRY = b'{"update": '
"""Start of a row of metrics."""

PARAMETERS: Mapping[str, tuple[str, float | None]] = {
    "ppo.kl_controller.target": ("ppo.kl_target", 6.0),
    "ppo.value_warmup_updates.at_most": ("ppo.value_warmup_updates", 0),
    "ppo.value_warmup_updates.until": ("ppo.value_warmup_until", None),
}
"""Parameters of settings: where runs have them that have none there, and their default."""

RESULTS = {"evaluate": JUDGMENTS_FILE, "generate": RESPONSES_FILE}
"""The stages without updates, and the file with their results."""

PROGRESS_FILES = (METRICS_FILE, PROGRESS_FILE, *RESULTS.values())
"""The files that a stage writes as it proceeds; a chain of stages does not write any."""


@dataclass(frozen=True)
class RunRecord:
    """Everything a run has written so far.

    Attributes:
        folder: The run's folder.
        facts: The comments above its configuration: stage, device, precision, versions.
        config: The resolved configuration, section by section.
        metrics: Rows of `metrics.jsonl`.
        details: Rows of `details.jsonl`: distributions per update.
        samples: Rows of `samples.jsonl`.
        incidents: Rows of `incidents.jsonl`.
        evaluations: Rows of `evaluations.jsonl`: the evaluations on held-out prompts during PPO.
        critic_checks: Rows of `critic_checks.jsonl`: values of prefixes against the returns of continuations.
        best: `update`, `metric` and `value` of the best update; empty if the run marks none.
        is_best_kept: Whether the best update's checkpoint exists.
        roles: `roles.json`: the size of each model, by role.
        data: `data.json`: by role (`demonstrations`, `comparisons`, `prompts`, `pretraining`) an object with `sources`,
            `rows`, `used`, `held_out`, `cut`, `dropped` (counts by reason), `notes` and `line`, the same in words.
        progress: Rows of `progress.jsonl`, of a stage without updates.
        results: Rows of `judgments.jsonl` or `responses.jsonl`.
        summary: `finished.json` and `summary.json` merged; empty before the end.
        state: Whether the run finished, is running judging by its files, or stopped early.
        stops_at: When a running run counts as stopped unless it writes something, in seconds since the epoch; otherwise
            None.
        trainer: The trainer of another library that wrote the run; None for kedge's own.
        arguments: The run's known settings under that library's names.
    """

    folder: Path
    facts: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[dict[str, Any]] = ()
    details: Sequence[dict[str, Any]] = ()
    samples: Sequence[dict[str, Any]] = ()
    incidents: Sequence[dict[str, Any]] = ()
    evaluations: Sequence[dict[str, Any]] = ()
    critic_checks: Sequence[dict[str, Any]] = ()
    best: Mapping[str, Any] = field(default_factory=dict)
    is_best_kept: bool = False
    roles: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    progress: Sequence[dict[str, Any]] = ()
    results: Sequence[dict[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    state: Literal["finished", "running", "stopped"] = "finished"
    stops_at: float | None = None
    trainer: Trainer | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """`sft`, `reward`, `ppo`, …"""
        return self.facts.get("stage", "")

    @property
    def ended_early(self) -> str:
        """The reason why the run ended before its last update (patience, a bound on the KL, a callback); else empty."""
        return str(self.summary.get("ended") or "")

    def number(self, name: str) -> float:
        """Return a setting as `setting` does; 0 if it is not a number."""
        value = self.setting(name)
        return value if is_number(value) else 0.0

    def choice(self, name: str) -> str:
        """Return the name of a setting's choice, without a parameter: `gigpo` for `gigpo` and `{gigpo: 1.0}`.

        Compare this rather than `setting` with a name. It is empty for a setting that is missing or null.
        """
        value = self.setting(name)
        return "".join(map(str, cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else [value or ""]))

    def setting(self, name: str) -> Any:
        """Return a setting by its dotted name, or its latest value if it is scheduled; None if the configuration lacks
        it.
        """
        if self.metrics and (scheduled := self.metrics[-1].get(f"schedule/{name}")) is not None:
            return scheduled
        value: Any = self.config
        for part in name.split("."):
            if isinstance(value, Mapping) and part not in value and len(value) == 1:
                (value,) = value.values()  # as in `{ziegler: {target: 3}}`
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None and name in PARAMETERS:
            former, default = PARAMETERS[name]
            value = self.setting(former)
            return default if value is None else value
        return value

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """The updates that have a finite value of a metric, and these values."""
        rows = [
            (row["update"], float(value))
            for row in self.metrics
            if is_number(value := row.get(name)) and math.isfinite(value)
        ]
        return [update for update, _ in rows], [value for _, value in rows]

    @property
    def judges(self) -> list[str]:
        """The metrics of reward terms with weight 0, which are measured but not trained on."""
        found = self.config.get("reward")
        terms = found if isinstance(found, list) else []
        names = distinct_names([term.get("name") or source_name(str(term.get("source") or "")) for term in terms])
        judges = {f"score/{name}" for name, term in zip(names, terms, strict=True) if term.get("weight") == 0}
        return sorted(name for name in judges if any(name in row for row in self.metrics))


def read_run(folder: str | os.PathLike[str] | Result, *, on_skipped: Callable[[str], None] = say) -> RunRecord:
    """Read a run's folder, also of a running run. Files that its stage does not write are empty.

    Args:
        folder: The folder, or the run's result.
        on_skipped: Called with a message for each file with damaged lines; they are left out.

    Raises:
        DataError: The folder is not a run's, or a JSON or YAML file in it is damaged.
    """
    folder = folder_of(folder)
    facts, config = read_config(folder)

    def rows(name: str, *, numbered: bool = True) -> list[dict[str, Any]]:
        return read_rows(folder / name, numbered=numbered, on_skipped=on_skipped)

    metrics = [_measured(row) for row in rows(METRICS_FILE)]
    progress = rows(PROGRESS_FILE)
    results = RESULTS.get(facts.get("stage", ""))
    finished = read_json_object(folder / FINISHED_FILE)
    # A stage without updates writes its progress and its results instead of metrics.
    written = [path for name in PROGRESS_FILES if (path := folder / name).is_file()] or [folder / CONFIG_FILE]
    newest = max(path.stat().st_mtime for path in written)
    stops_at = None if finished else newest + _patience(metrics, progress)
    is_running = stops_at is not None and time.time() < stops_at
    return RunRecord(
        folder,
        facts=facts,
        config=config,
        metrics=metrics,
        details=rows(DETAILS_FILE),
        samples=rows(SAMPLES_FILE),
        incidents=rows(INCIDENTS_FILE),
        evaluations=rows(EVALUATIONS_FILE),
        critic_checks=rows(CRITIC_CHECKS_FILE),
        best=read_json_object(folder / CHECKPOINTS / BEST_FILE) or finished.get("best") or {},
        is_best_kept=best_checkpoint(folder) is not None,
        roles=read_json_object(folder / ROLES_FILE),
        data=read_json_object(folder / DATA_FILE),
        progress=progress,
        results=rows(results, numbered=False) if results else [],
        summary={**finished, **read_json_object(folder / SUMMARY_FILE)},
        state="finished" if finished else "running" if is_running else "stopped",
        stops_at=stops_at if is_running else None,
    )


def is_own(folder: Path) -> bool:
    """True if kedge wrote a folder's metrics, or its `config.yaml`, whose first line names the stage."""
    if not is_run(folder):
        return False
    with (folder / CONFIG_FILE).open(encoding="utf-8", errors="replace") as file:
        if any(line.startswith("# stage: ") for line in itertools.islice(file, FIRST_LINES)):
            return True
    metrics = folder / METRICS_FILE
    return metrics.is_file() and metrics.read_bytes().startswith(FIRST_ENTRY)


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the finite numbers and nulls of a row of `metrics.jsonl`."""
    return {
        name: value for name, value in row.items() if value is None or (is_number(value) and -LARGEST < value < LARGEST)
    }


def is_number(value: object) -> TypeGuard[int | float]:
    """True for an integer or a float, also NaN and infinity; false for a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextmanager
def readable(*folders: Path) -> Iterator[None]:
    """Context for reading runs and using their records.

    Raises:
        DataError: A file cannot be read, or contains something that no run writes, such as text instead of a number.
    """
    try:
        yield
    except KedgeError:
        raise
    except OSError as error:
        name = error.filename or ", ".join(map(str, folders))  # reading an open file fails without its name
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error
    except UNLIKE_ANY_RUN as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{', '.join(map(str, folders))} cannot be shown, since one of its files has an entry that no run writes "
            f"({type(error).__name__}: {error}; {Path(place.filename).name}, line {place.lineno})"
        ) from error


def _patience(metrics: Sequence[Mapping[str, Any]], progress: Sequence[Mapping[str, Any]]) -> float:
    """Seconds without a write after which an unfinished run counts as stopped, judged by the length of its updates."""
    slowest = max((row["time/update"] for row in metrics[-10:] if row.get("time/update")), default=0.0)
    times = [row.get("seconds", 0.0) for row in progress[-10:]]
    slowest = max([slowest, *(after - before for before, after in itertools.pairwise(times))])
    is_long = progress[-1].get("phase") == JUDGING if progress else not metrics
    return max(LONG_SECONDS if is_long else QUIET_SECONDS, 3 * slowest)
