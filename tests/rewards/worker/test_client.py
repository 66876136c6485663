"""Reward functions in worker processes: every call ends in scores or one line, in time, and leaves nothing behind."""

from __future__ import annotations

import _thread
import contextlib
import datetime
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from kedge.rewards import CallLimits, Responses
from kedge.rewards.weighted import CallTimeout
from kedge.rewards.worker.client import RemoteFunction
from kedge_base.errors import DataError, NonfiniteScoreError, RewardError
from kedge_base.workers import codec, process
from tests.forking import started_python
from tests.processes import children_with_a_group, members, processes

FUNCTIONS = Path(__file__).with_name("misbehaving.py")
LONG = CallLimits(timeout=20.0, startup_timeout=20.0)
QUICK = CallLimits(timeout=0.5, startup_timeout=20.0)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no process groups")


def batch(*completions: str, seed: int = 7, **columns: list) -> Responses:
    texts = list(completions or ("a", "bb", "ccc"))
    count = len(texts)
    ids = [[1]] * count
    return Responses(["p"] * count, texts, ids, ids, [True] * count, columns, 8, seed)


@pytest.fixture
def remote(tmp_path):
    """Starts functions in workers; closes them at the end, and checks that no process is left."""
    started: list[RemoteFunction] = []
    groups: set[int] = set()

    def start(name: str, *, limits: CallLimits = LONG, **settings: object) -> RemoteFunction:
        function = RemoteFunction(f"{FUNCTIONS}:{name}", settings=settings, limits=limits, log=tmp_path / "reward.log")
        started.append(function)
        groups.add(function._worker._process.pid)
        return function

    yield start
    for function in started:
        groups.add(function._worker._process.pid)
        function.close()
    assert eventually(lambda: not any(members(group) for group in groups))


@pytest.mark.parametrize("name", ["pools", "gated"])
def test_pools_and_semaphores_work_in_every_call(remote, name):
    function = remote(name)
    assert [function.score(batch()) for _ in range(2)] == [[1.0, 2.0, 3.0]] * 2


def test_prompts_are_sent_only_to_a_function_that_takes_them(tmp_path, monkeypatch):
    """And what is left out is no entry less: the number of responses is checked in the process."""
    (tmp_path / "f.py").write_text(
        "def no(completions): return [float(len(completions))] * len(completions)\n"
        "def one(prompts, completions): return [float(len(text)) for text in prompts]\n"
        "def every(completions, **columns): return [float(len(ids)) for ids in columns['prompt_ids']]\n"
    )
    sent, of = [], process.Request.of
    monkeypatch.setattr(process.Request, "of", lambda *names, **given: sent.append(given) or of(*names, **given))
    for name, score in (("no", 2.0), ("one", 3.0), ("every", 4.0)):
        function = RemoteFunction(f"{tmp_path}/f.py:{name}", limits=LONG)
        try:
            responses = replace(batch("a", "bb"), prompts=["ppp"] * 2, prompt_ids=[[5] * 4] * 2)
            assert function.score(responses) == [score] * 2
        finally:
            function.close()
        given = sent[-1]["responses"]
        assert given["prompts"] == (["ppp"] * 2 if name != "no" else [""] * 2)
        assert given["prompt_ids"] == ([[5] * 4] * 2 if name == "every" else [()] * 2)


def test_a_script_that_trains_with_its_own_function_is_refused_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"import kedge\ndef f(completions): return [1.0]\n"
        f"kedge.ppo(model='m', prompts=['p'], reward={f'{script}:f'!r}, out={str(tmp_path / 'run')!r})\n"
    )
    with pytest.raises(RewardError, match=r"train.py' raised ConfigError: .* under `if __name__ == .* \(train.py:3\)"):
        RemoteFunction(f"{script}:f", limits=LONG)
    assert set(os.listdir(tmp_path)) <= {"train.py", "__pycache__"}


def is_there(process: float) -> bool:
    return any(seen.pid == process for seen in processes())


def end(group: int) -> None:
    """Kill what should have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def eventually(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("name", ["lengths", "waits", "hands_back_a_coroutine"])
def test_plain_and_async_functions_score(remote, name):
    function = remote(name)
    function.check(["answer"])
    assert (function.name, function.score(batch())) == (name, [1.0, 2.0, 3.0])


def test_a_column_with_the_name_of_an_argument_is_passed_under_another(remote):
    columns = {"seed": [7, 8], "completions": [[1], [2, 3]]}
    function = remote("of_columns_like_arguments")
    function.check(columns)
    assert function.score(replace(batch("a", "b"), columns=columns)) == [8.0, 10.0]
    function = remote("of_levels")
    assert function.score(replace(batch("a", "b"), columns=columns)) == [7.0, 8.0]
    function.check(columns)
    with pytest.raises(RewardError, match="level -1 is not usable"):
        function.check({"seed": [1, -1]})


def test_a_module_resolves_as_in_this_process():
    function = RemoteFunction("kedge.rewards.penalties:blank", name="quiet")
    assert (function.name, function.score(batch("a", " "))) == ("quiet", [0.0, -1.0])
    function.close()


def test_settings_are_passed_and_unknown_ones_are_rejected(remote):
    assert remote("scaled", scale=2).score(batch()) == [2, 4, 6]
    with pytest.raises(RewardError, match="scaled has no setting 'scael'; it takes completions, scale"):
        remote("scaled", scael=2)
    with pytest.raises(RewardError, match="setting 'scale' cannot be sent"):
        remote("scaled", scale=object())


def test_token_scores_pass_through_the_worker(remote):
    responses = replace(batch(), response_ids=[[3, 4, 5], [6, 7], []])
    assert remote("token_scores", weight=0.5).score(responses) == [None, [3.0, 3.5], []]
    with pytest.raises(RewardError, match=r"one_token_short gave response 0 a list of 2 numbers; .* a list of 3, one"):
        remote("one_token_short").score(responses)


def test_columns_keep_their_types(remote):
    columns = {
        "when": [datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)],
        "price": [Decimal("0.10")],
        "raw": [b"\x00\xff"],
    }
    assert remote("checks_types").score(batch("a", **columns)) == [1.0]


def test_a_column_that_cannot_be_sent_is_an_error_if_the_function_takes_it(remote):
    odd = batch("a", image=[object()], id=[1])
    assert remote("lengths").score(odd) == [1.0]
    with pytest.raises(
        DataError, match=r"column 'image' contains a value that cannot be sent.*everything \(of type object\)"
    ):
        remote("everything").score(odd)


def test_a_column_that_cannot_be_sent_is_an_error_before_the_run_if_its_rows_are_checked(remote):
    with pytest.raises(DataError, match=r"column 'given_seed' contains a value.*of_levels \(of type set\)"):
        remote("of_levels").check({"seed": [{1, 2}], "image": [object()]})


def test_an_absent_column_is_found_before_the_run(remote):
    with pytest.raises(RewardError, match=r"takes 'when', but no column.*\(columns: id\)"):
        remote("checks_types").check(["id"])


def test_texts_of_every_kind_arrive(remote):
    assert remote("lengths").score(batch("", "½\n\x00", "\ud800", "x" * 3_000_000)) == [0, 3, 1, 3_000_000]


def test_random_numbers_repeat_with_the_seed(remote):
    function = remote("draws")
    first, second, again = (function.score(batch(seed=seed)) for seed in (1, 2, 1))
    assert first == again != second
    assert remote("draws_by_seed").score(batch("a", seed=2**63 - 1)) == [807.0]


def test_the_worker_imports_nothing_beyond_what_the_function_needs(remote):
    assert remote("heavy_modules").score(batch("a")) == [0.0]


def test_it_has_a_process_group_of_its_own_and_keeps_it(remote):
    function = remote("process")
    [worker] = function.score(batch("a"))
    assert worker != os.getpid()
    assert os.getpgid(int(worker)) == worker
    assert function.score(batch("a")) == [worker]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"raises raised ZeroDivisionError: division by zero \(misbehaving.py:\d+\)"),
        ("raises_unprintable", r"raised Unprintable: \(its message cannot be read\) \(misbehaving.py:\d+\)"),
        ("raises_no_exception", "raises_no_exception raised BaseException: base"),
        ("exits", r"exits raised SystemExit: 3 \(misbehaving.py:\d+\)"),
        ("exits_at_once", "exits_at_once: its process exited with status 0"),
        ("is_killed", r"is_killed: its process was killed by SIGKILL \(out of memory\?\)"),
        ("crashes", "crashes: its process was killed by SIGSEGV"),
        ("forks_and_exits", "forks_and_exits: its process exited with status 0"),
        ("writes_everywhere", "writes_everywhere: its process sent something other than an answer"),
        ("closes_everything", "closes_everything: its process (exited|was killed|closed)"),
        ("returns_one", "returned 1 scores for 3 responses"),
        ("returns_nan", "gave response 1 nan; expected a finite number"),
        ("returns_texts", r"gave response 0 '1.0' \(of type str\)"),
        ("returns_nothing", r"returned None \(of type NoneType\)"),
    ],
)
def test_failures_are_one_line_and_the_next_call_still_runs(remote, name, words):
    function = remote(name)
    for _ in range(2):
        with pytest.raises(RewardError, match=words) as caught:
            function.score(batch())
        assert "\n" not in str(caught.value)


def test_a_nonfinite_scores_row_reaches_the_caller(remote):
    with pytest.raises(NonfiniteScoreError) as caught:
        remote("returns_nan").score(batch())
    assert caught.value.row == 1


@pytest.mark.parametrize("name", ["hangs", "hangs_in_c", "is_stopped", "prints_without_end"])
def test_a_call_ends_at_its_deadline(remote, name):
    function = remote(name, limits=QUICK)
    with pytest.raises(CallTimeout, match=rf"{name}: a call took over 0.5 s; it was killed"):
        function.score(batch())


def test_a_timeout_kills_the_worker_with_its_children_and_the_next_call_gets_a_new_one(remote, tmp_path):
    note = tmp_path / "note"
    function = remote("hangs_with_a_child", limits=CallLimits(timeout=1.5))
    with pytest.raises(CallTimeout):
        function.score(batch("a", note=[str(note)]))
    worker, child = map(int, note.read_text().split())
    assert eventually(lambda: members(worker) == [])
    assert not is_there(worker)
    assert not is_there(child)
    function = remote("hangs_on_request", limits=QUICK)
    with pytest.raises(CallTimeout):
        function.score(batch("hang"))
    assert function.score(batch("fine")) == [1.0]


def test_a_request_that_is_never_read_ends_at_its_deadline(remote):
    function = remote("lengths", limits=QUICK)
    os.kill(function._worker._process.pid, signal.SIGSTOP)
    with pytest.raises(CallTimeout):
        function.score(batch("x" * 5_000_000))
    assert function.score(batch("xx")) == [2.0]


def test_output_goes_to_the_log(remote, tmp_path, capfd):
    assert remote("prints").score(batch("a")) == [1.0]
    lines = (tmp_path / "reward.log").read_bytes().splitlines()
    assert lines[:2] == ["prints: printed: ½and an error".encode(), b'prints: \xff{"id": 2, "answer": null}']
    assert lines[2] == b"prints: from a child"
    assert capfd.readouterr() == ("", "")


def test_endless_output_does_not_fill_the_disk(remote, tmp_path):
    with pytest.raises(CallTimeout):
        remote("prints_without_end", limits=QUICK).score(batch("a"))
    text = (tmp_path / "reward.log").read_bytes()
    assert len(text) < 1_100_000
    assert re.search(rb"\[[\d,]+ more bytes were printed\]\n", text)


def test_a_traceback_is_in_the_log(remote, tmp_path):
    with pytest.raises(RewardError):
        remote("raises").score(batch("a"))
    log = (tmp_path / "reward.log").read_text()
    assert "raises:     return [1 / 0 for _ in completions]" in log
    assert "raises: ZeroDivisionError: division by zero" in log


def test_a_function_may_close_its_output_and_read_its_input(remote):
    assert remote("closes_its_output").score(batch("a")) == [1.0]
    assert remote("reads_its_input").score(batch("a")) == [0.0]


def test_replies_that_the_function_writes_itself_do_not_count(remote):
    function = remote("fakes_replies")
    for _ in range(2):
        assert function.score(batch("a", "b")) == [2.0, 2.0]


def test_a_reply_of_another_form_is_one_line(remote, monkeypatch):
    function = remote("lengths")
    for fake in ({"scores": [1.0], "memory": 1}, {"scores": "x", "memory": 1}, {"scores": [1.0, 2.0]}, 7, None):
        with monkeypatch.context() as patch:
            patch.setattr(process, "decode", lambda line, fake=fake: {**codec.decode(line), "result": fake})
            with pytest.raises(RewardError, match=r"lengths: its process sent|lengths returned"):
                function.score(batch("a", "b"))
    assert function.score(batch("a", "b")) == [1.0, 1.0]


def test_a_fork_that_returns_replies_once(remote):
    function = remote("forks")
    assert function.score(batch("a", "bb")) == [1.0, 2.0]
    assert function.score(batch("ccc")) == [3.0]


def test_children_end_with_the_worker(remote):
    function = remote("leaves_a_child")
    [child] = function.score(batch("a"))
    assert is_there(child)
    function.close()
    assert eventually(lambda: not is_there(child))


def test_a_worker_that_leaks_is_replaced(remote):
    function = remote("leaks", limits=CallLimits(timeout=20.0, memory_growth=100 * 2**20))
    seen = [function.score(batch("a"))[0] for _ in range(4)]
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_a_running_thread_does_not_delay_closing(remote):
    function = remote("keeps_a_thread")
    [worker] = function.score(batch("a"))
    function.close()
    assert eventually(lambda: members(int(worker)) == [])


def test_garbage_collection_ends_the_worker():
    function = RemoteFunction(f"{FUNCTIONS}:process")
    [worker] = function.score(batch("a"))
    del function
    assert eventually(lambda: members(int(worker)) == [])


def test_file_descriptors_are_closed(remote):
    function = remote("exits_at_once")

    def fail() -> int:
        with pytest.raises(RewardError):
            function.score(batch("a"))
        return len(os.listdir("/dev/fd"))

    assert fail() == fail() == fail()


def test_ctrl_c_ends_the_call_and_its_reply_is_not_read_by_the_next(remote):
    function = remote("hangs_on_request", limits=CallLimits(timeout=60.0))
    timer = threading.Timer(0.3, _thread.interrupt_main)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            function.score(batch("hang"))
    finally:
        timer.join()
        signal.signal(signal.SIGINT, inherited)
    assert function.score(batch("a", "b")) == [1.0, 1.0]


def test_the_reply_to_an_abandoned_call_is_skipped(remote):
    function = remote("lengths")
    function.start(batch("abandoned"))
    assert function.score(batch("a")) == [1.0]


def test_the_worker_outlives_the_thread_that_started_it(remote):
    found: list[RemoteFunction] = []
    thread = threading.Thread(target=lambda: found.append(remote("process")))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert found[0].score(batch("a")) == [float(found[0]._worker._process.pid)]


@pytest.mark.parametrize(
    "name",
    [
        "lengths",
        "hangs_with_a_child",
        "leaves_a_child",
        pytest.param(
            "hangs_in_c_with_a_child",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel kills it"),
        ),
    ],
)
def test_the_worker_ends_when_kedge_is_killed(name, tmp_path, request):
    note = tmp_path / "note"
    program = f"""
import time
from kedge.rewards import Responses
from kedge.rewards.worker.client import RemoteFunction
f = RemoteFunction({f"{FUNCTIONS}:{name}"!r})
print(f._worker._process.pid, flush=True)
f.score(Responses(["p"], ["c"], [[1]], [[1]], [True], {{"note": [{str(note)!r}]}}))
print("scored", flush=True)
time.sleep(60)
"""
    with started_python(program, output := tmp_path / "output") as kedge:
        assert eventually(lambda: output.exists() and output.read_text().count("\n") >= 1, seconds=60.0)
        worker = int(output.read_text().splitlines()[0])
        request.addfinalizer(lambda: end(worker))
        if name.startswith("hangs"):
            # An idle worker would end by itself: the call must be running when kedge is killed.
            assert eventually(note.exists, seconds=60.0)
        else:
            assert eventually(lambda: "scored" in output.read_text(), seconds=60.0)
        assert members(worker) != []
        kedge.kill()
    assert eventually(lambda: members(worker) == [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ValueError('no key')", r"r.py' raised ValueError: no key \(r.py:1\)"),
        ("import sys; sys.exit(4)", r"r.py' raised SystemExit: 4 \(r.py:1\)"),
        ("import os; os._exit(4)", "f: its process exited with status 4"),
        ("import time; time.sleep(100)", "f: importing its module took over 0.6 s; it was killed"),
        ("def g(completions): return []", r"the module has no 'f'; it has g"),
        ("def f(text): return []", "does not take `completions`"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(tmp_path, text, words):
    (tmp_path / "r.py").write_text(text + "\n")
    limits = CallLimits(startup_timeout=0.6 if "sleep" in text else 20.0)
    before = children_with_a_group()
    with pytest.raises(RewardError, match=words) as caught:
        RemoteFunction(f"{tmp_path}/r.py:f", limits=limits)
    assert children_with_a_group() <= before
    assert "\n" not in str(caught.value)


def test_output_is_buffered_until_the_folder_exists(tmp_path):
    (tmp_path / "r.py").write_text("print('hello')\ndef f(completions): return [1.0]\n")
    log = tmp_path / "run" / "reward.log"
    function = RemoteFunction(f"{tmp_path}/r.py:f", log=log)
    assert not log.parent.exists()
    log.parent.mkdir()
    function.score(batch("a"))
    function.close()
    assert log.read_text() == "f: hello\n"


def test_a_file_that_is_edited_during_the_run_does_not_change_its_scores(tmp_path):
    path = tmp_path / "r.py"
    path.write_text("import os\ndef f(completions): return [1.0] if completions[0] else os._exit(1)\n")
    function = RemoteFunction(f"{path}:f")
    path.write_text("def f(completions): return [2.0]\n")
    assert function.score(batch("a")) == [1.0]
    with pytest.raises(RewardError, match="exited with status 1"):
        function.score(batch(""))
    with pytest.raises(RewardError, match="f: its file was changed during the run"):
        function.score(batch("a"))
