"""All loggers as one: fed the names of metrics.jsonl, never twice, and never the end of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.errors import ConfigError
from kedge.logs.loggers import LoggedRun, Loggers, check_loggers, feed
from kedge.logs.loggers.logbook import LOGBOOK_FILE, Logbook
from tests.logs.loggers.told import SAMPLE


class Listening:
    """A logger that keeps what it is told, until it is to fail."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def write(self, update: int, metrics: Any) -> None:
        if update == self.fails_at:
            raise OSError("the line is dead")
        self.told.append((update, dict(metrics)))

    def write_samples(self, update: int, samples: Any) -> None:
        self.told.append((update, [sample.response for sample in samples]))

    def close(self) -> None:
        self.told.append(("closed",))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Listening]:
    """What is opened, by name; `broken` fails at update 2, `missing` cannot be opened."""
    listening: dict[str, Listening] = {}

    def open_logger(name: str, run: LoggedRun) -> Listening:
        if name == "missing":
            raise ImportError("no such thing")
        listening[name] = Listening(2 if name == "broken" else None)
        return listening[name]

    monkeypatch.setattr(feed, "open_logger", open_logger)
    return listening


def loggers_of(folder: Path, *names: str, warn: Callable[[str], None] = print) -> Loggers:
    logbook = Logbook(folder)
    return Loggers(names, logbook, LoggedRun(folder, "ppo", "tides", logbook.id, {}), warn=warn)


def test_numbers_are_told_by_their_names_and_the_rest_is_left_out(tmp_path, opened):
    figures = {"policy/loss": torch.tensor(0.25), "score/a": 3, "kl": math.nan, "none": None, "word": "x"}
    with loggers_of(tmp_path, "one", "two", "one") as loggers:
        assert opened == {}  # a run that comes to nothing begins no log
        loggers.write_samples(0, [SAMPLE])
        loggers.write(1, figures)
    expected = [(0, [SAMPLE.response]), (1, {"policy/loss": 0.25, "score/a": 3}), ("closed",)]
    assert {name: each.told for name, each in opened.items()} == {"one": expected, "two": expected}


def test_who_is_told_nothing_writes_nothing(tmp_path, opened):
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
        "missing failed and logs no more; the run goes on: ImportError: no such thing",
        "broken failed and logs no more; the run goes on: OSError: the line is dead",
    ]
    assert [row[0] for row in opened["broken"].told] == [1, 1]
    assert [row[0] for row in opened["well"].told] == [1, 1, 2, 2, 3, 3, "closed"]
    assert json.loads((tmp_path / LOGBOOK_FILE).read_text())["told"] == {"broken": 1, "well": 3}


def test_ctrl_c_is_no_failure_of_a_logger(tmp_path, opened, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Listening, "write", interrupted)
    with pytest.raises(KeyboardInterrupt), loggers_of(tmp_path, "one") as loggers:
        loggers.write(1, {"a": 1.0})


def test_a_resumed_run_goes_on_where_each_logger_stands(tmp_path, opened):
    with loggers_of(tmp_path, "one", "broken") as loggers:
        for update in (1, 2, 3):
            loggers.write(update, {"a": update})
    before = Logbook(tmp_path).id
    with loggers_of(tmp_path, "one", "broken", "new") as loggers:
        for update in (2, 3, 4):  # the run was killed after update 3, and its checkpoint is of update 1
            loggers.write(update, {"a": update})
            loggers.write_samples(update, [SAMPLE])
    assert Logbook(tmp_path).id == before
    assert [row[0] for row in opened["one"].told] == [4, 4, "closed"]
    assert [row[0] for row in opened["new"].told] == [2, 2, 3, 3, 4, 4, "closed"]


@pytest.mark.parametrize("content", ["", "[]", '{"id": "a"}', '{"id": "a", "told": 3}'])
def test_a_damaged_logbook_is_as_none(tmp_path, content):
    (tmp_path / LOGBOOK_FILE).write_text(content)
    logbook = Logbook(tmp_path)
    assert len(logbook.id) == 8
    assert logbook.told("wandb") == -1


def test_two_runs_have_two_ids(tmp_path):
    assert Logbook(tmp_path).id != Logbook(tmp_path).id


def test_a_missing_package_is_told_with_what_installs_it():
    check_loggers(["pytest"])
    with pytest.raises(ConfigError, match=r"runtime.loggers: no_such_logger is not installed; pip install "
                                          r"'kedge\[no_such_logger\]'"):  # fmt: skip
        check_loggers(["pytest", "no_such_logger"])
