"""The terminal view of evaluations and generate runs, in progress and finished."""

from __future__ import annotations

import io
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kedge.inspect.record import read_run
from kedge.inspect.watch.watching import watch_run
from kedge.logs.phases import JUDGING, PhaseLog
from tests.inspect.page.judged import evaluation_record, generation_record, write_judged


def shown(folder: Path, width: int = 90) -> str:
    text = io.StringIO()
    watch_run(folder, Console(file=text, width=width, highlight=False), once=True)
    return text.getvalue()


def progress(*rows: tuple[str, int, int, float]) -> list[dict[str, object]]:
    keys = ("phase", "done", "total", "seconds")
    return [{"update": number, **dict(zip(keys, row, strict=True))} for number, row in enumerate(rows, start=1)]


def test_a_running_evaluation_shows_its_phase(tmp_path):
    rows = progress(("sample runs/ppo/model", 0, 60, 0.0), ("sample runs/ppo/model", 24, 60, 12.0))
    record = replace(evaluation_record(), progress=rows, results=())
    text = shown(write_judged(tmp_path / "run", record, finished=False))
    assert "● running" in text
    assert "sample runs/ppo/model 24/60" in text
    assert "0:12 so far" in text
    assert "no result yet" in text


def test_a_judge_may_take_its_time(tmp_path):
    rows = progress(("sample m", 60, 60, 12.0), (JUDGING, 0, 60, 12.1))
    folder = write_judged(tmp_path / "run", replace(evaluation_record(), progress=rows, results=()), finished=False)
    for age, state in ((300, "running"), (3600, "stopped")):
        then = time.time() - age
        os.utime(folder / "progress.jsonl", (then, then))
        assert read_run(folder).state == state
    text = shown(folder)
    assert "judging 60 responses" in text
    assert "stopped without a result" in text


@pytest.mark.parametrize("marked", [True, False])
def test_a_finished_evaluation_shows_its_result(tmp_path, marked):
    rows = progress(("sample m", 5, 5, 12.0))
    text = shown(write_judged(tmp_path / "run", replace(evaluation_record(), progress=rows), marked=marked))
    for expected in (
        "■ finished", "took 0:12", "won 2, tied 1, lost 1 of 4", "0.625 (0.250 to 1.00), judged by letters",
        "2.00 (1.00 to 3.00), against 1.00 (0.500 to 1.50)", "ours 4",
    ):  # fmt: skip
        assert expected in text
    assert "no metrics yet" not in text


def test_generated_responses_are_shown_as_they_come(tmp_path):
    rows = progress(("generate", 3, 9, 4.0))
    folder = write_judged(tmp_path / "run", replace(generation_record(), progress=rows), finished=False)
    text = shown(folder)
    assert "generate 3/9" in text
    assert "newest response: score 3.00" in text
    assert "ayay" in text
    assert "2.00 (1.00 to 3.00)" in shown(write_judged(tmp_path / "done", generation_record()))


def test_phases_are_numbered_and_timed(tmp_path):
    times = iter([10.0, 10.0, 12.5])
    log = PhaseLog(tmp_path, clock=lambda: next(times))
    log.write("generate", 0, 4)
    log.write("generate", 2, 4)
    log.close()
    (tmp_path / "config.yaml").write_text("# stage: generate\n")
    record = read_run(tmp_path)
    assert [(row["update"], row["done"], row["seconds"]) for row in record.progress] == [(1, 0, 0.0), (2, 2, 2.5)]
    assert record.state == "running"
