"""Reward functions in their own process: whatever they do ends in scores or in one line, in time; nothing is left."""

from __future__ import annotations

import _thread
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path

import pytest

from kedge.errors import DataError, NonfiniteScoreError, RewardError
from kedge.rewards import CallRules, Responses
from kedge.rewards.retries import CallTimeout
from kedge.rewards.worker.client import RemoteFunction
from tests.processes import members, processes

STRANGERS = Path(__file__).with_name("strangers.py")
PATIENT = CallRules(timeout=20.0, startup_timeout=20.0)
QUICK = CallRules(timeout=0.5, startup_timeout=20.0)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no process groups")


def batch(*completions: str, seed: int = 7, **columns: list) -> Responses:
    texts = list(completions or ("a", "bb", "ccc"))
    count = len(texts)
    ids = [[1]] * count
    return Responses(["p"] * count, texts, ids, ids, [True] * count, columns, 8, seed)


@pytest.fixture
def stranger(tmp_path):
    """Start a stranger; it is closed in the end, and nothing that it started may be left then."""
    started: list[RemoteFunction] = []
    groups: set[int] = set()

    def start(name: str, *, rules: CallRules = PATIENT, **settings: object) -> RemoteFunction:
        function = RemoteFunction(f"{STRANGERS}:{name}", settings=settings, rules=rules, log=tmp_path / "reward.log")
        started.append(function)
        groups.add(function._worker._process.pid)
        return function

    yield start
    for function in started:
        groups.add(function._worker._process.pid)
        function.close()
    assert eventually(lambda: not any(members(group) for group in groups))


def is_there(process: float) -> bool:
    return any(seen.pid == process for seen in processes())


def eventually(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("name", ["lengths", "waits", "hands_back_a_coroutine"])
def test_plain_and_async_functions_score(stranger, name):
    function = stranger(name)
    function.check_columns(["answer"])
    assert (function.name, function.scores(batch())) == (name, [1.0, 2.0, 3.0])


def test_a_module_is_found_as_in_this_process():
    function = RemoteFunction("kedge.rewards.penalties:blank", name="quiet")
    assert (function.name, function.scores(batch("a", " "))) == ("quiet", [0.0, -1.0])
    function.close()


def test_settings_reach_it_and_wrong_ones_are_named(stranger):
    assert stranger("scaled", scale=2).scores(batch()) == [2, 4, 6]
    with pytest.raises(RewardError, match="scaled has no setting 'scael'; it takes completions, scale"):
        stranger("scaled", scael=2)
    with pytest.raises(RewardError, match="setting 'scale' cannot be sent"):
        stranger("scaled", scale=object())


def test_columns_keep_their_types(stranger):
    columns = {
        "when": [datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)],
        "price": [Decimal("0.10")],
        "raw": [b"\x00\xff"],
    }
    assert stranger("knows_its_types").scores(batch("a", **columns)) == [1.0]


def test_a_column_that_cannot_be_sent_is_named_where_it_is_taken(stranger):
    odd = batch("a", image=[object()], id=[1])
    assert stranger("lengths").scores(odd) == [1.0]
    with pytest.raises(DataError, match=r"column 'image' holds what cannot be sent.*everything \(a object\)"):
        stranger("everything").scores(odd)


def test_an_absent_column_is_found_before_the_run(stranger):
    with pytest.raises(RewardError, match=r"takes 'when', but no column.*\(columns: id\)"):
        stranger("knows_its_types").check_columns(["id"])


def test_texts_of_every_kind_arrive(stranger):
    assert stranger("lengths").scores(batch("", "½\n\x00", "\ud800", "x" * 3_000_000)) == [0, 3, 1, 3_000_000]


def test_random_numbers_repeat_with_the_seed(stranger):
    function = stranger("draws")
    first, second, again = (function.scores(batch(seed=seed)) for seed in (1, 2, 1))
    assert first == again != second
    assert stranger("draws_by_seed").scores(batch("a", seed=2**63 - 1)) == [807.0]


def test_it_imports_no_more_than_the_function_needs(stranger):
    assert stranger("heavy_modules").scores(batch("a")) == [0.0]


def test_it_has_a_process_group_of_its_own_and_keeps_it(stranger):
    function = stranger("process")
    [worker] = function.scores(batch("a"))
    assert worker != os.getpid()
    assert os.getpgid(int(worker)) == worker
    assert function.scores(batch("a")) == [worker]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"raises raised ZeroDivisionError: division by zero \(strangers.py:\d+\)"),
        ("raises_the_unspeakable", r"raised Unspeakable: \(its message cannot be read\) \(strangers.py:\d+\)"),
        ("raises_no_exception", "raises_no_exception raised BaseException: base"),
        ("leaves", r"leaves raised SystemExit: 3 \(strangers.py:\d+\)"),
        ("leaves_at_once", "leaves_at_once: its process exited with status 0"),
        ("is_killed", r"is_killed: its process was killed by SIGKILL \(out of memory\?\)"),
        ("crashes", "crashes: its process was killed by SIGSEGV"),
        ("forks_and_goes", "forks_and_goes: its process exited with status 0"),
        ("writes_everywhere", "writes_everywhere: its process sent something else than scores"),
        ("closes_everything", "closes_everything: its process (exited|was killed|closed)"),
        ("returns_one", "returned 1 scores for 3 responses"),
        ("returns_nan", "gave response 1 nan; expected a finite number"),
        ("returns_texts", r"gave response 0 '1.0' \(a str\)"),
        ("returns_nothing", r"returned None \(a NoneType\)"),
    ],
)
def test_what_goes_wrong_is_one_line_and_the_next_call_is_made_all_the_same(stranger, name, words):
    function = stranger(name)
    for _ in range(2):
        with pytest.raises(RewardError, match=words) as caught:
            function.scores(batch())
        assert "\n" not in str(caught.value)


def test_the_response_whose_score_is_not_finite_is_known_on_this_side(stranger):
    with pytest.raises(NonfiniteScoreError) as caught:
        stranger("returns_nan").scores(batch())
    assert caught.value.row == 1


@pytest.mark.parametrize("name", ["hangs", "hangs_in_c", "is_stopped", "prints_without_end"])
def test_a_call_ends_at_its_deadline(stranger, name):
    function = stranger(name, rules=QUICK)
    begun = time.monotonic()
    with pytest.raises(CallTimeout, match=rf"{name}: a call took over 0.5 s; it was killed"):
        function.scores(batch())
    assert time.monotonic() - begun < 5.0


def test_a_late_function_takes_its_children_with_it_and_is_replaced(stranger, tmp_path):
    note = tmp_path / "note"
    function = stranger("hangs_with_a_child", rules=CallRules(timeout=1.5))
    with pytest.raises(CallTimeout):
        function.scores(batch("a", note=[str(note)]))
    worker, child = map(int, note.read_text().split())
    assert eventually(lambda: members(worker) == [])
    assert not is_there(worker)
    assert not is_there(child)
    function = stranger("hangs_where_it_is_awkward", rules=QUICK)
    with pytest.raises(CallTimeout):
        function.scores(batch("hang"))
    assert function.scores(batch("fine")) == [1.0]


def test_a_request_that_is_never_read_ends_at_its_deadline(stranger):
    function = stranger("lengths", rules=QUICK)
    os.kill(function._worker._process.pid, signal.SIGSTOP)
    with pytest.raises(CallTimeout):
        function.scores(batch("x" * 5_000_000))
    assert function.scores(batch("xx")) == [2.0]


def test_what_is_printed_goes_to_the_log(stranger, tmp_path, capfd):
    assert stranger("prints").scores(batch("a")) == [1.0]
    lines = (tmp_path / "reward.log").read_bytes().splitlines()
    assert lines[:2] == ["prints: printed: ½and an error".encode(), b'prints: \xff{"id": 2, "answer": null}']
    assert lines[2] == b"prints: from a child"
    assert capfd.readouterr() == ("", "")


def test_output_without_end_does_not_fill_the_disk(stranger, tmp_path):
    with pytest.raises(CallTimeout):
        stranger("prints_without_end", rules=QUICK).scores(batch("a"))
    text = (tmp_path / "reward.log").read_bytes()
    assert len(text) < 1_100_000
    assert re.search(rb"\[[\d,]+ more bytes were printed\]\n", text)


def test_a_traceback_is_in_the_log(stranger, tmp_path):
    with pytest.raises(RewardError):
        stranger("raises").scores(batch("a"))
    log = (tmp_path / "reward.log").read_text()
    assert "raises:     return [1 / 0 for _ in completions]" in log
    assert "raises: ZeroDivisionError: division by zero" in log


def test_it_needs_neither_output_nor_input(stranger):
    assert stranger("closes_its_output").scores(batch("a")) == [1.0]
    assert stranger("reads_its_input").scores(batch("a")) == [0.0]


def test_a_fork_that_comes_back_answers_once(stranger):
    function = stranger("forks")
    assert function.scores(batch("a", "bb")) == [1.0, 2.0]
    assert function.scores(batch("ccc")) == [3.0]


def test_children_end_with_the_worker(stranger):
    function = stranger("leaves_a_child")
    [child] = function.scores(batch("a"))
    assert is_there(child)
    function.close()
    assert eventually(lambda: not is_there(child))


def test_a_worker_that_leaks_is_replaced(stranger):
    function = stranger("leaks", rules=CallRules(timeout=20.0, memory_growth=100 * 2**20))
    seen = [function.scores(batch("a"))[0] for _ in range(4)]
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_a_thread_that_never_ends_holds_nothing_up(stranger):
    function = stranger("never_lets_go")
    [worker] = function.scores(batch("a"))
    function.close()
    assert eventually(lambda: members(int(worker)) == [])


def test_a_collected_function_ends_its_worker():
    function = RemoteFunction(f"{STRANGERS}:process")
    [worker] = function.scores(batch("a"))
    del function
    assert eventually(lambda: members(int(worker)) == [])


def test_descriptors_are_given_back(stranger):
    function = stranger("leaves_at_once")

    def fail() -> int:
        with pytest.raises(RewardError):
            function.scores(batch("a"))
        return len(os.listdir("/dev/fd"))

    assert fail() == fail() == fail()


def test_ctrl_c_ends_the_call_and_the_next_one_is_not_given_its_answer(stranger):
    function = stranger("hangs_where_it_is_awkward", rules=CallRules(timeout=6.0))
    timer = threading.Timer(0.3, _thread.interrupt_main)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    timer.start()
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            function.scores(batch("hang"))
    finally:
        timer.join()
        signal.signal(signal.SIGINT, inherited)
    assert time.monotonic() - begun < 5.0
    assert function.scores(batch("a", "b")) == [1.0, 1.0]


def test_an_answer_that_nobody_waited_for_is_not_the_next_ones(stranger):
    function = stranger("lengths")
    function.ask(batch("abandoned"))
    assert function.scores(batch("a")) == [1.0]


def test_it_outlives_the_thread_that_started_it(stranger):
    found: list[RemoteFunction] = []
    thread = threading.Thread(target=lambda: found.append(stranger("process")))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert found[0].scores(batch("a")) == [float(found[0]._worker._process.pid)]


@pytest.mark.parametrize("name", ["lengths", "hangs", "leaves_a_child"])
def test_it_ends_when_kedge_is_killed(name, tmp_path):
    program = (
        "import sys; from kedge.rewards.worker.client import RemoteFunction; from kedge.rewards import Responses\n"
        "f = RemoteFunction(sys.argv[1]); print(f._worker._process.pid, flush=True)\n"
        "f.scores(Responses(['p'], ['c'], [[1]], [[1]], [True])); print('scored', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, f"{STRANGERS}:{name}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as kedge:
        worker = int(kedge.stdout.readline())
        if name != "hangs":
            kedge.stdout.readline()
        assert members(worker) != []
        kedge.kill()
    assert eventually(lambda: members(worker) == [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ValueError('no key')", r"r.py' raised ValueError, line 1: no key"),
        ("import sys; sys.exit(4)", r"r.py' raised SystemExit, line 1: 4"),
        ("import os; os._exit(4)", "f: its process exited with status 4"),
        ("import time; time.sleep(100)", "f: importing its module took over 0.6 s; it was killed"),
        ("def g(completions): return []", r"no 'f' in it; it has g"),
        ("def f(text): return []", "does not take `completions`"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(tmp_path, text, words):
    (tmp_path / "r.py").write_text(text + "\n")
    rules = CallRules(startup_timeout=0.6 if "sleep" in text else 20.0)
    with pytest.raises(RewardError, match=words) as caught:
        RemoteFunction(f"{tmp_path}/r.py:f", rules=rules)
    assert "\n" not in str(caught.value)


def test_what_is_printed_before_the_folder_exists_waits_for_it(tmp_path):
    (tmp_path / "r.py").write_text("print('hello')\ndef f(completions): return [1.0]\n")
    log = tmp_path / "run" / "reward.log"
    function = RemoteFunction(f"{tmp_path}/r.py:f", log=log)
    assert not log.parent.exists()
    log.parent.mkdir()
    function.scores(batch("a"))
    function.close()
    assert log.read_text() == "f: hello\n"


def test_a_file_that_is_edited_during_the_run_does_not_change_its_scores(tmp_path):
    path = tmp_path / "r.py"
    path.write_text("import os\ndef f(completions): return [1.0] if completions[0] else os._exit(1)\n")
    function = RemoteFunction(f"{path}:f")
    path.write_text("def f(completions): return [2.0]\n")
    assert function.scores(batch("a")) == [1.0]
    with pytest.raises(RewardError, match="exited with status 1"):
        function.scores(batch(""))
    with pytest.raises(RewardError, match="f: its file was edited during the run"):
        function.scores(batch("a"))
