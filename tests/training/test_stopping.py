"""Early stops: the first signal is a request, the second ends the process, and the grace period is limited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kedge.system.ranks import ALONE, Ranks
from kedge.training.stopping import Terminated, stopping


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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_lost_terminal_is_a_request_too_unless_it_is_ignored(is_ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with stopping() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert asked.requested != is_ignored
            if not is_ignored:
                with pytest.raises(Terminated) as caught:
                    asked.raise_if_requested()
                assert caught.value.code == 129
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_block_that_never_looks_is_interrupted_when_the_grace_is_over():
    started = time.monotonic()

    def stubborn() -> None:
        with stopping(grace_seconds=0.2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(Terminated):
        stubborn()
    assert 0.15 < time.monotonic() - started < 4


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


def test_off_the_main_thread_nothing_is_changed():
    handlers = []

    def work() -> None:
        with stopping() as asked:
            handlers.append((signal.getsignal(signal.SIGTERM), asked.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [(signal.getsignal(signal.SIGTERM), False)]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_process_at_once(signum, status):
    stubborn = """
import time
from kedge.training.stopping import stopping
with stopping() as asked:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""
    with subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signum)
        assert process.wait(timeout=20) == status
