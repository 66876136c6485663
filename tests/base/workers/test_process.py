"""Requests to a worker process: each gets its own reply or one line, whatever the process sends in between."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge_base.errors import NonfiniteScoreError, RewardError
from kedge_base.workers.log import CallLog
from kedge_base.workers.process import Request, WorkerEnded, WorkerError, WorkerProcess, WorkerTimeout
from kedge_base.workers.serving import serve

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no process groups")


def main(descriptor: int, tie: int) -> None:
    """The process of the tests below."""

    def write(text: str) -> str:
        os.write(descriptor, text.encode() + b"\n")
        return "written"

    def fail(row: int | None) -> None:
        if row is None:
            raise KeyError("no such mark")
        raise NonfiniteScoreError("the score is nan", row)

    functions = {
        "add": lambda a, b: a + b,
        "sleep": lambda seconds: time.sleep(seconds),
        "exit": lambda status: os._exit(status),
        "write": write,
        "fail": fail,
    }
    serve(descriptor, tie, functions, error=RewardError)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    process = WorkerProcess(__name__, CallLog(tmp_path / "log", "clerk"))
    yield process
    process.kill()


def ask(worker: WorkerProcess, do: str, limit: float = 60.0, **arguments: object) -> object:
    request = Request.of("clerk", do, **arguments)
    worker.send(request, seconds=limit)
    return worker.reply(request, limit)


def test_replies_are_told_apart_by_their_numbers(worker: WorkerProcess) -> None:
    requests = [Request.of("clerk", "add", a=number, b=1) for number in range(3)]
    worker.send(*requests, seconds=60.0)
    assert worker.reply(requests[2], 60.0) == 3, "those to the first two, which were abandoned, are skipped"
    assert ask(worker, "write", text='{"id": 7, "result": 5}') == "written"


def test_an_error_is_one_line_and_the_process_stays(worker: WorkerProcess, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^the score is nan$") as caught:
        ask(worker, "fail", row=4)
    assert caught.value.row == 4
    with pytest.raises(WorkerError, match=r"^clerk raised KeyError: 'no such mark'$") as caught:
        ask(worker, "fail", row=None)
    assert caught.value.row is None
    assert "clerk: Traceback" in (tmp_path / "log").read_text()
    assert ask(worker, "add", a=1, b=2) == 3


def test_a_process_that_is_late_or_ends_is_one_line(worker: WorkerProcess, tmp_path: Path) -> None:
    with pytest.raises(WorkerEnded, match=r"^clerk: its process exited with status 3$"):
        ask(worker, "exit", status=3)
    late = WorkerProcess(__name__, CallLog(tmp_path / "log", "clerk"))
    assert ask(late, "add", a=1, b=2) == 3
    with pytest.raises(WorkerTimeout, match=r"^clerk: a call took over 0.5 s; it was killed$"):
        ask(late, "sleep", 0.5, seconds=60)
    assert not late.is_running


@pytest.mark.parametrize("limit", [0.5, 2.5])
def test_the_limit_includes_the_time_of_sending(worker: WorkerProcess, limit: float) -> None:
    assert ask(worker, "add", a=1, b=2) == 3
    os.kill(worker._process.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=f"^clerk: a call took over {limit} s; it was killed$"):
        ask(worker, "add", limit, a="a" * 1_000_000, b="b")
    assert time.monotonic() - start < limit + 1.0


@pytest.mark.parametrize("text", ["no JSON", "[1]", "7"])
def test_what_is_no_reply_ends_the_process(worker: WorkerProcess, text: str) -> None:
    with pytest.raises(WorkerError, match=r"^clerk: its process sent something other than an answer$"):
        ask(worker, "write", text=text)
    assert not worker.is_running


def test_a_result_of_another_form_ends_the_process(worker: WorkerProcess) -> None:
    request = Request.of("clerk", "add", a=1, b=2)
    worker.send(request, seconds=60.0)
    with pytest.raises(WorkerError, match=r"^clerk: its process sent something other than an answer$"):
        worker.reply(request, 60.0, is_valid=lambda result: isinstance(result, str))
    assert not worker.is_running
