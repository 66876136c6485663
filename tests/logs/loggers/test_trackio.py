"""Trackio, in its own process, because it fixes its folder when imported; read back from its database."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.logs.loggers.logging_run import SAMPLE, SETTINGS

pytest.importorskip("trackio")

TELL = """
import sys
from pathlib import Path
from tests.logs.loggers.logging_run import log_run
print(log_run(Path(sys.argv[1]), "trackio", range(int(sys.argv[2]), int(sys.argv[3]))).name)
"""


def log_and_name(folder: Path, first: int, end: int, database: Path) -> str:
    environment = {**os.environ, "TRACKIO_DIR": str(database), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TELL, str(folder), str(first), str(end)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_a_resumed_run_is_one_run_without_repetition(tmp_path):
    database = tmp_path / "trackio"
    name = log_and_name(tmp_path, 1, 5, database)
    assert log_and_name(tmp_path, 3, 7, database) == name  # and nothing else on standard output
    with sqlite3.connect(database / "tides.db") as connection:
        rows = connection.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
        [(config,)] = connection.execute("select config from configs").fetchall()
    assert {row[0] for row in rows} == {name.strip()}
    assert len({row[1] for row in rows}) == 1
    assert [row[2] for row in rows] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]
    figures = [json.loads(row[3]) for row in rows]
    assert figures[0::3] == [{"reward/score_mean": n / 4, "score/brief.py:length": n} for n in range(1, 7)]
    table = figures[1]["samples"]["_value"]
    assert table == [{"prompt": SAMPLE.prompt, "response": SAMPLE.response, "score": SAMPLE.score}] * 2
    assert [row["response"] for row in figures[2]["fixed_samples"]["_value"]] == ["again"]
    assert json.loads(config).items() >= SETTINGS.items()
