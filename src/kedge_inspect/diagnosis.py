"""Diagnoses a run's folder, a folder of several stages, and a run in progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge_base.run_folder.output import INCIDENTS_FILE, ROLES_FILE
from kedge_base.run_folder.record_format import (
    CRITIC_CHECKS_FILE,
    METRICS_FILE,
    read_json_object,
    read_metrics,
    read_rows,
)
from kedge_base.texts import typed_error_text
from kedge_inspect.abroad.runs import HERE, Origin, read_any_run
from kedge_inspect.doctor import (
    Advice,
    Examination,
    Finding,
    diagnose,
    examine,
    merge,
    no_advice,
    one_line,
)
from kedge_inspect.doctor.rewards import groups_of_one, reward_flat
from kedge_inspect.doctor.steps import NUM_FIRST, first_update_too_large
from kedge_inspect.record import RunRecord, readable
from kedge_inspect.report import runs_in

EVERY = 4
"""Updates between two diagnoses of a run in progress, or a tenth of the updates so far if that is more."""

AT_ONCE = (first_update_too_large.name, reward_flat.name, groups_of_one.name)
"""Findings that are printed immediately, while restarting still costs little."""

FIRST = 50
LATEST = 450
"""Updates kept in memory for a run in progress: the first and the latest. A run may have no fixed end."""


def diagnose_run(folder: Path, *, advice: Advice = no_advice, origin: Origin = HERE) -> list[Finding]:
    """Findings on the run in a folder, most severe first; see `kedge_inspect.doctor`.

    In a folder with the runs of several stages, such as `kedge rlhf` and `kedge demo` write, every stage is
    diagnosed, and `seen` starts with the stage's name.

    Args:
        folder: A run in progress, finished or dead, or a folder of runs; or the log of another library.
        advice: Looks up what the configuration documents about a field that is too high or too low.
        origin: What is known about another library's log.

    Raises:
        DataError: The folder is not a run, or a file is damaged.
    """
    return list(merge(examine_run(folder, advice=advice, origin=origin).values()).findings)


def examine_run(folder: Path, *, advice: Advice = no_advice, origin: Origin = HERE) -> dict[str, Examination]:
    """Return the findings of `diagnose_run` and the checks that could not be made, by run: the folder itself, or its
    stages.

    Args:
        folder: As for `diagnose_run`.
        advice: As for `diagnose_run`.
        origin: As for `diagnose_run`.

    Raises:
        DataError: The folder is not a run, or a file is damaged.
    """
    with readable(folder):
        found = {run: examine(read_any_run(run, origin=origin), advice=advice) for run in runs_in(folder)}
        return {str(run): each if run == folder else _of_stage(run.name, each) for run, each in found.items()}


def lines_on_run(folder: Path, *, advice: Advice = no_advice) -> tuple[list[str], str]:
    """Format a line for each warning and serious finding on a run, and the verdict, including the checks that could not
    be made.

    An error becomes the verdict, so that a failing doctor cannot cost the run its end.
    """
    try:
        examination = merge(examine_run(folder, advice=advice).values())
    except Exception as error:  # a bug in a rule, or a damaged file
        return [], f"failed: {typed_error_text(error)}"
    found = [one_line(finding) for finding in examination.findings if finding.severity != "note"]
    return found, examination.verdict


class LiveDoctor:
    """Diagnoses a run in progress, and reports each serious finding once, and others about its first updates.

    An error of the doctor is reported as well, and never ends the run.

        doctor = LiveDoctor(run.folder, run.facts, config, say=progress.say)
        doctor.see(update, metrics)

    Args:
        folder: The run's folder, with its roles; rows written before a resume are included.
        facts: The header of its configuration.
        config: Its configuration, section by section.
        say: Prints a line for the user.
        done: Number of updates so far; the rows of later ones are about to be removed.
        advice: See `diagnose_run`.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, object],
        config: Mapping[str, Any],
        *,
        say: Callable[[str], None],
        done: float = math.inf,
        advice: Advice = no_advice,
    ) -> None:
        rows = read_metrics(folder) if (folder / METRICS_FILE).is_file() else []
        self._rows: list[dict[str, Any]] = [row for row in rows if row["update"] <= done]
        texts = {name: str(fact) for name, fact in facts.items()}
        self._run = RunRecord(folder, texts, config, self._rows, state="running")
        self._say = say
        self._reported = set[str]()
        self._advice = advice
        self._last_first = NUM_FIRST + self._run.setting("ppo.value_warmup_updates.at_most")
        self._next = (self._rows[-1]["update"] if self._rows else 0) + EVERY

    def see(self, update: int, metrics: Mapping[str, float]) -> None:
        """Add an update's metrics, and diagnose the run if the next diagnosis is due."""
        self._rows.append({"update": update, **metrics})
        del self._rows[FIRST:-LATEST]
        is_among_first = update <= self._last_first
        if update < self._next and not is_among_first:
            return
        if update >= self._next:
            self._next = update + max(EVERY, update // 10)
        for name, line in self._lines(is_among_first):
            if name not in self._reported:
                self._reported.add(name)
                self._say(line)

    def _lines(self, is_among_first: bool) -> Iterator[tuple[str, str]]:
        """Yield a line for each finding to report, after its rule, and for an error."""
        try:
            for finding in diagnose(self._current(), advice=self._advice):
                is_early = is_among_first and finding.rule in AT_ONCE and finding.severity != "note"
                if finding.severity == "serious" or is_early:
                    yield finding.rule, f"{one_line(finding)}. Try: {finding.try_}"
        except Exception as error:  # a bug in a rule, or a file that cannot be read
            line = f"the doctor failed: {typed_error_text(error)}"
            yield line, line

    def _current(self) -> RunRecord:
        """The run so far, with the incidents and critic checks of the updates in memory."""
        updates = {row["update"] for row in self._rows}

        def about(name: str) -> list[dict[str, Any]]:
            rows = read_rows(self._run.folder / name, numbered=True, on_skipped=lambda line: None)
            return [row for row in rows if row["update"] in updates]

        return replace(
            self._run,
            roles=read_json_object(self._run.folder / ROLES_FILE),
            incidents=about(INCIDENTS_FILE),
            critic_checks=about(CRITIC_CHECKS_FILE),
        )


def _of_stage(name: str, examination: Examination) -> Examination:
    """Prefix each finding with the name of its stage."""
    named = (replace(finding, seen=f"{name}: {finding.seen}") for finding in examination.findings)
    return replace(examination, findings=tuple(named))
