"""Early stops: the first signal is a request, the second ends it, and the grace period is limited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kedge.ranks import ALONE, Ranks
from kedge.training.runtime import Terminated, stopping
from tests.forking import started_python


@pytest.mark.parametrize(("signum", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_is_a_request_until_the_block_looks_for_it(signum, error):
    before = signal.getsignal(signum)
    with stopping() as asked:
        assert not asked.requested
        asked.raise_if_requested()
        os.kill(os.getpid(), signum)
        assert asked.requested
        with pytest.raises(error) as caught:
            asked.raise_if_requested()
    assert signal.getsignal(signum) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    assert error is KeyboardInterrupt or caught.value.code == 143


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("name", "code"), [("SIGHUP", 129), ("SIGUSR1", 138), ("SIGUSR2", 140)])
@pytest.mark.parametrize("is_taken", [False, True])
def test_what_announces_the_end_is_a_request_too_unless_the_program_takes_it(name, code, is_taken):
    """A lost terminal, and the signals that Slurm and Grid Engine send before they kill a job."""
    signum = getattr(signal, name)
    taken: list[int] = []
    before = signal.signal(signum, (lambda number, _: taken.append(number)) if is_taken else signal.SIG_DFL)
    try:
        with stopping() as asked:
            os.kill(os.getpid(), signum)
            assert (asked.requested, taken) == (not is_taken, [signum] if is_taken else [])
            if not is_taken:
                with pytest.raises(Terminated) as caught:
                    asked.raise_if_requested()
                assert caught.value.code == code
    finally:
        signal.signal(signum, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
def test_a_lost_terminal_does_not_stop_what_was_started_with_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_block_that_never_looks_is_interrupted_when_the_grace_is_over():
    started = time.monotonic()
    ended_by_itself = False

    def stubborn() -> None:
        nonlocal ended_by_itself
        with stopping(grace_seconds=0.2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
            ended_by_itself = True

    with pytest.raises(Terminated):
        stubborn()
    assert not ended_by_itself
    assert time.monotonic() - started > 0.15


class OtherRank(Ranks):
    """The second of two ranks; the first one got SIGTERM."""

    def largest(self, number: int) -> int:
        return signal.SIGTERM


@pytest.mark.parametrize("ranks", [ALONE, OtherRank(1, 2)])
def test_a_stop_that_was_raised_has_as_long_to_save_as_it_takes(ranks):
    """With several ranks, the terminal's signal is followed by the launcher's."""
    is_saved = False

    def stopped() -> None:
        nonlocal is_saved
        with stopping(grace_seconds=0.2, ranks=ranks) as asked:
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                asked.raise_if_requested()
            finally:
                if ranks.are_several:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.6)
                is_saved = True

    with pytest.raises(Terminated):
        stopped()
    assert is_saved


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no timers")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_timer_of_the_program_works_inside_and_continues_after_a_stop(is_stopped):
    rung: list[int] = []
    handler = lambda signum, _: rung.append(signum)  # noqa: E731
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 100.0, 7.0)
        with stopping() as asked:
            assert signal.getsignal(signal.SIGALRM) is handler
            os.kill(os.getpid(), signal.SIGALRM)
            assert rung == [signal.SIGALRM]
            if is_stopped:
                os.kill(os.getpid(), signal.SIGTERM)
                assert signal.getitimer(signal.ITIMER_REAL)[1] == 0.0
                with pytest.raises(Terminated):
                    asked.raise_if_requested()
        assert signal.getsignal(signal.SIGALRM) is handler
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 50 < left <= 100
        assert interval == pytest.approx(7.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no timers")
def test_the_timer_of_a_call_that_ends_after_a_signal_does_not_come_back():
    before = signal.getsignal(signal.SIGALRM)
    with stopping() as asked:
        outer = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 100.0)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, outer)
        with pytest.raises(Terminated):
            asked.raise_if_requested()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_off_the_main_thread_nothing_is_changed():
    handlers = []

    def work() -> None:
        with stopping() as asked:
            handlers.append((signal.getsignal(signal.SIGTERM), asked.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [(signal.getsignal(signal.SIGTERM), False)]


STUBBORN = """
import time
from kedge_base.machine.invocation import mark_command_line
from kedge.training.runtime import stopping
{mark}
with stopping() as asked:
    print("ready", flush=True)
    try:
        while True:
            time.sleep(0.01)
    finally:
        print("saved", flush=True)
"""


@pytest.mark.parametrize(
    ("mark", "signum", "status", "left"),
    [
        ("mark_command_line()", signal.SIGTERM, 143, ""),
        ("mark_command_line()", signal.SIGINT, 130, ""),
        ("", signal.SIGTERM, 143, "saved\n"),
    ],
)
def test_a_second_signal_ends_a_command_at_once_and_a_program_by_an_exception(mark, signum, status, left, tmp_path):
    """A notebook lives on after it, and what was finished is saved."""
    with started_python(STUBBORN.format(mark=mark), output := tmp_path / "output") as process:
        while not output.exists() or output.read_text() != "ready\n":
            assert process.is_alive()
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signum)
        time.sleep(0.3)
        assert process.is_alive()
        os.kill(process.pid, signum)
        process.join(20)
        assert process.exitcode == status
        assert output.read_text() == f"ready\n{left}"


def test_a_second_ctrl_c_ends_a_program_by_an_exception():
    """In a process of its own: the interpreter ends itself by the signal that caused a `KeyboardInterrupt`."""
    command = [sys.executable, "-c", STUBBORN.format(mark="")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT
        assert process.stdout.read() == "saved\n"


def test_a_second_signal_lets_a_save_end_before_it_stops_a_program():
    with stopping() as asked:
        with asked.saving():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_block_that_has_changed_nothing_stops_at_the_first_signal():
    with stopping() as asked:
        asked.at_once = True
        with pytest.raises(Terminated) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 143
        asked.forget()
        asked.raise_if_requested()
