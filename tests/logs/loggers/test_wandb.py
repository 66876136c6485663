"""Weights & Biases without a network: the records of its file, and that it opens no connection."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.logs.loggers.logging_run import SAMPLE, SETTINGS, log_run

pytest.importorskip("wandb")

BLOCK = 32 * 1024
HEADER = struct.Struct("<IHB")


def records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: LevelDB's log format, seven bytes in front, a protocol buffer in each.

    Source: LevelDB's log_format.md.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        whole, at = whole + data[at : at + length], at + length
        if kind in (1, 4):  # the whole of a record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def end_service() -> None:
    """W&B's service writes its files behind the program's back; they are complete once it has ended."""
    import wandb

    wandb.teardown()


def history(path: Path) -> dict[int, dict[str, Any]]:
    rows = [record.history for record in records(path) if record.WhichOneof("record_type") == "history"]
    steps = [row.step.num for row in rows]
    assert steps == sorted(set(steps))
    return {
        row.step.num: {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in rows
    }


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """A listening socket in place of W&B's server; a connection attempt would wait in it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
        yield server


def test_a_resumed_run_is_one_run_without_repetition_and_offline(tmp_path, calls, capfd):
    folder = tmp_path / "run"
    folder.mkdir()
    run = log_run(folder, "wandb", range(1, 5))
    log_run(folder, "wandb", range(3, 7))
    end_service()
    first, second = sorted((folder / "wandb").glob(f"offline-run-*-{run.id}/run-{run.id}.wandb"), key=str)
    rows = {**history(first), **history(second)}
    assert (list(history(first)), list(history(second))) == ([1, 2, 3, 4], [5, 6])
    assert [row["reward/score_mean"] for row in rows.values()] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert [row["score/brief.py:length"] for row in rows.values()] == [1, 2, 3, 4, 5, 6]
    assert all("objective/kl" not in row for row in rows.values())
    table = json.loads((second.parent / "files" / rows[6]["samples/path"]).read_text())
    assert table["columns"] == ["update", "prompt", "response", "score"]
    assert table["data"] == [[6, SAMPLE.prompt, SAMPLE.response, SAMPLE.score]] * 2
    again = json.loads((second.parent / "files" / rows[6]["fixed_samples/path"]).read_text())
    assert again["data"] == [[6, SAMPLE.prompt, "again", SAMPLE.score]]
    [begun] = [record.run for record in records(first) if record.WhichOneof("record_type") == "run"]
    assert (begun.run_id, begun.project, begun.job_type) == (run.id, "tides", "ppo")
    assert {item.key: json.loads(item.value_json) for item in begun.config.update}.items() >= SETTINGS.items()
    with pytest.raises(BlockingIOError):
        calls.accept()
    assert capfd.readouterr() == ("", "")


def test_updates_lost_by_a_kill_are_in_the_next_file(tmp_path, calls):
    code = """
import os, signal, sys
from pathlib import Path
from kedge.logs.loggers import LoggerGroup, LoggerState, LoggedRun
from kedge.logs.json_lines import MetricsLog
folder = Path(sys.argv[1])
state = LoggerState(folder)
loggers = LoggerGroup(["wandb"], state, LoggedRun(folder, "ppo", "tides", state.id, {}), warn=print)
metrics = MetricsLog(folder, also=loggers.write)
for update in range(1, 61):
    metrics.write(update, {f"reward/{number}": update / 4 for number in range(40)})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False, timeout=60)
    run = log_run(tmp_path, "wandb", range(61, 63))
    end_service()
    first, second = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run.id}/run-{run.id}.wandb"), key=str)
    assert len(history(first)) < 60
    assert [*history(first), *history(second)] == list(range(1, 63))
    assert history(second)[60].keys() > {f"reward/{number}" for number in range(40)}


def test_the_mode_is_the_users(tmp_path, calls, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log_run(tmp_path, "wandb", range(1, 3))
    assert not (tmp_path / "wandb").exists()


def test_a_run_of_the_callers_own_is_left_alone(tmp_path, calls):
    import wandb

    with wandb.init(
        mode="offline", dir=tmp_path, id="callers", settings=wandb.Settings(silent=True, console="off")
    ) as own:
        (tmp_path / "run").mkdir()
        log_run(tmp_path / "run", "wandb", range(1, 3))
        own.log({"mine": 1.0}, step=7)
    end_service()
    [path] = (tmp_path / "wandb").glob("offline-run-*-callers/*.wandb")
    assert {step: row["mine"] for step, row in history(path).items()} == {7: 1.0}
