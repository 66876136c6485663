"""The logger group: names of metrics.jsonl, no duplicates, and failures that do not end the run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.logs.json_lines import MetricsLog, SamplesLog
from kedge.logs.loggers import LoggedRun, LoggerGroup, LoggerState, check_loggers, group
from kedge.logs.loggers.logger import LOGGERS_FILE
from kedge_base.errors import ConfigError, install_line
from tests.logs.loggers.logging_run import SAMPLE


class RecordingLogger:
    """A logger that keeps its rows, and may fail at an update."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.last_update: int | None = None
        self.rows: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def write(self, update: int, metrics: Any) -> None:
        if update == self.fails_at:
            raise OSError("the line is dead")
        self.rows.append((update, dict(metrics)))

    def write_samples(self, update: int, samples: Any) -> None:
        self.rows.append((update, [sample.response for sample in samples]))

    def close(self) -> None:
        self.rows.append(("closed",))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, RecordingLogger]:
    """What is opened, by name; `broken` fails at update 2, `missing` cannot be opened."""
    recording: dict[str, RecordingLogger] = {}

    def open_logger(name: str, run: LoggedRun) -> RecordingLogger:
        if name == "missing":
            raise ImportError("no such thing")
        recording[name] = RecordingLogger(2 if name == "broken" else None)
        return recording[name]

    monkeypatch.setattr(group, "open_logger", open_logger)
    return recording


def loggers_of(folder: Path, *names: str, warn: Callable[[str], None] = print) -> LoggerGroup:
    state = LoggerState(folder)
    return LoggerGroup(names, state, LoggedRun(folder, "ppo", "tides", state.id, {}), warn=warn)


def test_numbers_are_logged_by_name_and_the_rest_is_left_out(tmp_path, opened):
    figures = {"policy/loss": torch.tensor(0.25), "score/a": 3, "kl": math.nan, "none": None, "word": "x"}
    with loggers_of(tmp_path, "one", "two", "one") as loggers:
        assert opened == {}  # a run without results starts no log
        loggers.write_samples(0, [SAMPLE])
        loggers.write(1, figures)
    expected = [(0, [SAMPLE.response]), (1, {"policy/loss": 0.25, "score/a": 3}), ("closed",)]
    assert {name: each.rows for name, each in opened.items()} == {"one": expected, "two": expected}


def test_no_loggers_write_no_file(tmp_path, opened):
    with loggers_of(tmp_path) as loggers:
        loggers.write(1, {"a": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_fails_is_dropped_with_one_line(tmp_path, opened):
    lines: list[str] = []
    with loggers_of(tmp_path, "broken", "well", "missing", warn=lines.append) as loggers:
        for update in (1, 2, 3):
            loggers.write(update, {"a": update})
            loggers.write_samples(update, [SAMPLE])
    assert lines == [
        "missing failed and is disabled; the run continues: ImportError: no such thing",
        "broken failed and is disabled; the run continues: OSError: the line is dead",
    ]
    assert [row[0] for row in opened["broken"].rows] == [1, 1]
    assert [row[0] for row in opened["well"].rows] == [1, 1, 2, 2, 3, 3, "closed"]
    assert json.loads((tmp_path / LOGGERS_FILE).read_text())["told"] == {"broken": 1, "well": 3}


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("refused\n\x1b[31mby the proxy"), r"OSError: refused \x1b[31mby the proxy"),
        (UnspeakableError(), "UnspeakableError: (its message cannot be read)"),
    ],
)
def test_no_error_of_a_logger_ends_a_run_or_takes_more_than_a_line(tmp_path, opened, monkeypatch, error, said):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(RecordingLogger, "write", fail)
    lines: list[str] = []
    with loggers_of(tmp_path, "one", warn=lines.append) as loggers:
        loggers.write(1, {"a": 1.0})
    assert lines == [f"one failed and is disabled; the run continues: {said}"]


def test_ctrl_c_is_not_a_logger_failure(tmp_path, opened, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordingLogger, "write", interrupted)
    with pytest.raises(KeyboardInterrupt), loggers_of(tmp_path, "one") as loggers:
        loggers.write(1, {"a": 1.0})


def test_a_resumed_run_continues_after_the_last_update_of_each_logger(tmp_path, opened):
    with loggers_of(tmp_path, "one", "broken") as loggers:
        for update in (1, 2, 3):
            loggers.write(update, {"a": update})
    before = LoggerState(tmp_path).id
    with loggers_of(tmp_path, "one", "broken", "new") as loggers:
        for update in (2, 3, 4):  # the run was killed after update 3, and its checkpoint is of update 1
            loggers.write(update, {"a": update})
            loggers.write_samples(update, [SAMPLE])
    assert LoggerState(tmp_path).id == before
    assert [row[0] for row in opened["one"].rows] == [4, 4, "closed"]
    assert [row[0] for row in opened["new"].rows] == [2, 2, 3, 3, 4, 4, "closed"]


class BufferingLogger(RecordingLogger):
    """A logger that stores three rows at a time, or all when it is closed, as W&B stores blocks."""

    def __init__(self, stored: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.stored, self.last_update = stored, max((row[0] for row in stored), default=-1 if stored else None)

    def write(self, update: int, metrics: Any) -> None:
        super().write(update, metrics)
        if len(self.rows) >= 3:
            self.flush()

    def flush(self) -> None:
        self.stored += self.rows
        self.rows.clear()

    def close(self) -> None:
        self.flush()


@pytest.mark.parametrize("checkpoint", [4, 7])
def test_updates_that_a_killed_logger_had_not_stored_are_repeated_once(tmp_path, monkeypatch, checkpoint):
    stored: list[tuple[Any, ...]] = []
    monkeypatch.setattr(group, "open_logger", lambda name, run: BufferingLogger(stored))
    metrics = MetricsLog(tmp_path, also=loggers_of(tmp_path, "one").write)
    for update in range(1, 8):
        metrics.write(update, {"a": update / 8, "none": None, "word": "x"})
    metrics.close()  # and a kill, by which updates 7 and the samples of all others are lost
    assert [row[0] for row in stored] == [1, 2, 3, 4, 5, 6]
    del stored[4:]
    (tmp_path / "samples.jsonl").write_bytes(b"\x00\n")  # a power cut
    with loggers_of(tmp_path, "one") as loggers, SamplesLog(tmp_path) as samples:
        for update in (5, 6):
            samples.write(update, [SAMPLE, dataclasses.replace(SAMPLE, fixed=0, response="again")])
        for update in range(checkpoint + 1, 10):
            loggers.write(update, {"a": update / 8})
    rows = [row for row in stored if isinstance(row[1], dict)]
    assert rows == [(update, {"a": update / 8}) for update in range(1, 10)]
    said = [] if checkpoint == 4 else [(update, [text]) for update in (5, 6) for text in (SAMPLE.response, "again")]
    assert [row for row in stored if isinstance(row[1], list)] == said


@pytest.mark.parametrize("content", ["", "[]", '{"id": "a"}', '{"id": "a", "told": 3}'])
def test_a_damaged_state_counts_as_missing(tmp_path, content):
    (tmp_path / LOGGERS_FILE).write_text(content)
    state = LoggerState(tmp_path)
    assert len(state.id) == 8
    assert state.last_update("wandb") == -1


def test_two_runs_have_two_ids(tmp_path):
    assert LoggerState(tmp_path).id != LoggerState(tmp_path).id


def test_a_missing_package_is_named_with_its_install_command():
    check_loggers(["pytest"])
    said = f"runtime.loggers: no_such_logger is not installed; {install_line('no_such_logger')}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_loggers(["pytest", "no_such_logger"])
