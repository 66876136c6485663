"""Limits on judges, as the server counts them: with many requests at once, failures, several processes, and kills."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kedge_base.errors import RewardError
from kedge_tasks.judge import Judge, JudgeLimitError, read_usage
from kedge_tasks.judge.ledger import Ledger, Limits
from tests.tasks.judge.standin import Reply, StandIn, likes_e, said

TEXTS = [f"text {number}" for number in range(400)]
PROMPTS = ["Ahoy?"] * len(TEXTS)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn().running() as stand_in:
        yield stand_in


@pytest.fixture(autouse=True)
def without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def flaky(server: StandIn, *, usage: tuple[int, int] | None) -> Any:
    """Answers, fails and closes connections at random."""
    draw = random.Random(0)
    lock = threading.Lock()

    def answer(body: Mapping[str, Any]) -> Reply:
        with lock:
            number = draw.random()
        time.sleep(0.05 + number / 10)
        if number < 0.1:
            return Reply({}, 503, {"Retry-After": "0.01"})
        if number < 0.2:
            return Reply(closes=True)
        return said({"score": 5}, usage=usage)

    return answer


def test_requests_and_concurrency_are_never_exceeded_by_32_at_once(server, tmp_path):
    server.answer = flaky(server, usage=(10, 5))
    limits = {"concurrency": 32, "max_requests": 100, "retries": 9, "timeout": 10.0}
    for _ in range(2):  # the second is a resumed run
        with pytest.raises(JudgeLimitError, match=r"judge\.max_requests=100 is reached: 100 requests with .* --resume"):
            Judge(server.judge, limits=limits, file=tmp_path / "judges.sqlite").score(PROMPTS, TEXTS)
    assert len(server.requests) == 100
    assert 8 < server.most_at_once <= 32
    more = Judge(server.judge, limits={**limits, "max_requests": None}, file=tmp_path / "judges.sqlite")
    assert more.score(PROMPTS, TEXTS) == [5] * len(TEXTS)


@pytest.mark.parametrize("usage", [(300, 40), None, (0, 0)], ids=["with usage", "without", "of nothing"])
def test_tokens_and_cost_are_never_exceeded(server, tmp_path, usage):
    spent: list[int] = []
    lock = threading.Lock()

    def answer(body: Mapping[str, Any]) -> Reply:
        with lock:
            spent.append(1)
        return said({"score": 5}, usage=usage)

    server.answer = answer
    limits = {"concurrency": 32, "max_total_tokens": 40_000}
    with pytest.raises(JudgeLimitError, match=r"judge\.max_total_tokens=40000 is reached"):
        Judge(server.judge, limits=limits, max_tokens=500, file=tmp_path / "a").score(PROMPTS, TEXTS)
    used = read_usage(tmp_path / "a")
    assert used is not None
    if usage == (300, 40):
        assert used["tokens"] == 340 * len(spent) <= 40_000
        # The next one no longer fits: its bound is that of about 3,500 bytes, overhead, and the answer.
        assert used["tokens"] > 40_000 - 6_000
    else:
        assert 20_000 < used["tokens"] <= 40_000
    before = len(spent)
    price = {"cost": 0.04, "price_in": 1.0, "price_out": 10.0}
    with pytest.raises(JudgeLimitError, match=r"judge\.max_cost\.cost=0\.04 is reached"):
        Judge(server.judge, limits={"max_cost": price}, max_tokens=500, file=tmp_path / "b").score(PROMPTS, TEXTS)
    cost = (300 * 1.0 + 40 * 10.0) / 1e6
    if usage == (300, 40):
        assert 0.02 < cost * (len(spent) - before) <= 0.04
    used = read_usage(tmp_path / "b", price)
    assert used is not None
    assert 0.02 < used["cost"] <= 0.04


def test_the_message_has_the_limit_with_all_its_digits(server):
    with pytest.raises(JudgeLimitError, match=r"judge\.max_total_tokens=1234567 is reached"):
        Judge(server.judge, limits={"max_total_tokens": 1_234_567}, max_tokens=2_000_000).score(["a"], ["e"])


@pytest.mark.parametrize(("total", "counted"), [(150, 150), (7, 15), (None, 15), ("150", 15)])
def test_thoughts_that_only_the_total_has_are_counted(server, total, counted):
    reply = said({"score": 5}, usage=(10, 5))
    reply.body["usage"]["total_tokens"] = total
    server.answer = lambda body: reply
    ours = Judge(server.judge)
    ours.score(["a"], ["e"])
    assert ours._ledger.usage()["tokens"] == counted


@pytest.mark.parametrize("used", [(10**30, 5), (2**62, 2**62), (10, 2**63 - 1)])
def test_a_use_that_is_nonsense_counts_as_unknown(server, tmp_path, used):
    server.answer = lambda body: said({"score": 5}, usage=used)
    for text in "ef":
        assert Judge(server.judge, max_tokens=500, file=tmp_path / "a").score(["a"], [text]) == [5]
    found = read_usage(tmp_path / "a")
    assert found is not None
    assert 2 * 500 < found["tokens"] < 10_000


def test_the_bound_of_a_prompt_is_above_what_any_tokenizer_makes_of_it(server):
    # A tokenizer with NFKC makes 18 characters of this one.
    bounds: list[tuple[int, int]] = []
    ours = Judge(server.judge)
    reserve = ours._ledger.reserve
    ours._ledger.reserve = lambda *each: (bounds.append(each[:2]), reserve(*each))[1]  # pyright: ignore
    ours.score(["a"], ["\ufdfa" * 1000])
    assert bounds[0][0] > 33 * 1000


def test_requests_per_minute_count_from_the_end_of_a_request(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("kedge_tasks.judge.ledger.time.time", lambda: clock[0])
    ledger = Ledger(tmp_path / "judges.sqlite", Limits(requests_per_minute=2, timeout=300))
    stop = threading.Event()
    first = ledger.reserve(1, 1, stop)
    clock[0] += 100  # a slow one: the server may have seen it just now
    ledger.settle(first, None)
    ledger.reserve(1, 1, stop)
    waited: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0)
            clock[0] += 20
            return False

    ledger.reserve(1, 1, Stop())
    assert clock[0] >= 1160  # a minute after the first ended
    assert len(waited) == 3


class Once(threading.Event):
    """Stops a request that would have to wait."""

    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return True


def test_a_clock_that_is_set_back_delays_by_a_minute_at_most(tmp_path, monkeypatch):
    clock = [1e6]
    monkeypatch.setattr("kedge_tasks.judge.ledger.time.time", lambda: clock[0])
    ledger = Ledger(tmp_path / "judges.sqlite", Limits(requests_per_minute=1))
    ledger.settle(ledger.reserve(1, 1, Once()), (1, 1))
    clock[0] -= 3600
    for _ in range(2):
        with pytest.raises(JudgeLimitError, match="the run has ended"):
            ledger.reserve(1, 1, Once())
        clock[0] += 59
    clock[0] += 2
    ledger.reserve(1, 1, Once())


def test_judges_of_one_process_share_the_concurrency(tmp_path):
    one, other = (Ledger(tmp_path / "judges.sqlite", Limits(concurrency=1)) for _ in range(2))
    number = one.reserve(1, 1, Once())
    with pytest.raises(JudgeLimitError, match="the run has ended"):
        other.reserve(1, 1, Once())
    one.settle(number, (1, 1))
    other.reserve(1, 1, Once())


def test_a_resumed_run_counts_the_minute_of_the_killed_one(tmp_path):
    stop = threading.Event()
    Ledger(tmp_path / "a", Limits(requests_per_minute=1)).reserve(1, 1, stop)  # never settled: killed
    stop.set()
    with pytest.raises(JudgeLimitError, match="has ended"):
        Ledger(tmp_path / "a", Limits(requests_per_minute=1)).reserve(1, 1, stop)


PROGRAM = """
import sys
from kedge_tasks.judge import Judge

judge, path, start, limit = sys.argv[1:]
ours = Judge(judge, limits={"concurrency": 4, "max_requests": int(limit), "timeout": 5.0}, file=path)
print(ours.score(["Ahoy?"] * 60, [f"text {number}" for number in range(int(start), int(start) + 60)]))
"""


def started(server: StandIn, path: Path, start: int, limit: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, server.judge, str(path), str(start), str(limit)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_of_a_run_share_its_limits(server, tmp_path):
    def slow(body: Mapping[str, Any]) -> Reply:
        time.sleep(0.02)
        return likes_e(body)

    server.answer = slow
    processes = [started(server, tmp_path / "judges.sqlite", 60 * place, 100) for place in range(3)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert len(server.requests) == 100
    assert server.most_at_once <= 4
    assert any("max_requests=100 is reached" in error for error in errors)


def test_killed_processes_lose_no_answer_and_no_count(server, tmp_path):
    delays = count()

    def slow(body: Mapping[str, Any]) -> Reply:
        time.sleep(0.05 if next(delays) % 7 else 0.0)
        return likes_e(body)

    server.answer = slow
    path = tmp_path / "judges.sqlite"
    for _ in range(5):
        before = len(server.requests)
        process = started(server, path, 0, 1000)
        while len(server.requests) < before + 6 and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.communicate()
    used = read_usage(path)
    assert used is not None
    # One that was reserved may not have been sent; none was sent without.
    assert len(server.requests) <= used["requests"] <= len(server.requests) + 4 * 5
    output, error = started(server, path, 0, 1000).communicate(timeout=60)
    assert "[2, 2," in output, error  # "text" has one e
    asked = [str(body["messages"]) for body in server.requests]
    assert len(set(asked)) == 60
    assert len(asked) <= 60 + 4 * 5  # again: only those that were on their way


def test_a_file_that_is_none_is_one_line(tmp_path):
    (tmp_path / "judges.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(RewardError, match=r"judges\.sqlite: file is not a database"):
        Ledger(tmp_path / "judges.sqlite", Limits())


def test_the_time_before_a_request_does_not_grow_with_the_requests_so_far(tmp_path):
    """A run of PPO asks for a hundred thousand scores."""
    ledger = Ledger(tmp_path / "judges.sqlite", Limits(concurrency=99, requests_per_minute=99, max_requests=10**6))
    rows = [("x", 1, 0.0, float(number), 500, 100) for number in range(100_000)]
    with ledger._held() as base:
        base.executemany("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?)", rows)
    started = time.process_time()
    numbers = [ledger.reserve(10, 20, threading.Event()) for _ in range(50)]
    assert time.process_time() - started < 0.5
    ledger.settle(numbers[0], (3, 4))
    assert ledger.usage()["requests"] == 100_050
    assert ledger.usage()["tokens"] == 100_000 * 600 + 49 * 30 + 7


def test_the_requests_of_a_file_without_sums_are_counted(tmp_path):
    path = tmp_path / "judges.sqlite"
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("CREATE TABLE requests (owner TEXT, process INT, until REAL, ended REAL, prompt INT, answer INT)")
        base.execute("INSERT INTO requests VALUES ('x', 1, 0, 0, 5, 6)")
    Ledger(path, Limits()).reserve(10, 20, threading.Event())
    usage = Ledger(path, Limits()).usage()
    assert (usage["requests"], usage["tokens"]) == (2, 41)
