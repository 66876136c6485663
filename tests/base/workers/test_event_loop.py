"""The event loop of users' async code."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import kedge_base.workers.event_loop as event_loop_module
from kedge_base.workers.event_loop import event_loop


def test_threads_that_need_it_at_once_get_the_same_loop():
    """Otherwise a semaphore or a client of one call belongs to a loop that other calls do not run in."""
    event_loop_module._forget_loop()
    start = threading.Barrier(8)

    def first_use(_):
        start.wait()
        return event_loop()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(first_use, range(8)))) == 1


@pytest.mark.parametrize("when", ["before it starts", "while it is awaited"])
def test_an_interrupt_cancels_a_call_at_whatever_moment(when, monkeypatch):
    """A signal may arrive between the start of a call and the wait for it, before there is anything to cancel."""
    loop = event_loop()
    submit = type(loop).submit
    reached = []
    started, ended = threading.Event(), threading.Event()

    async def call():
        started.set()
        try:
            await asyncio.sleep(5)
            reached.append("acted")
        except asyncio.CancelledError:
            reached.append("cancelled")
            raise
        finally:
            ended.set()

    def interrupted(self, coroutine):
        if when == "before it starts":  # the loop is busy until the interrupt is over
            blocked = threading.Event()
            self._loop.call_soon_threadsafe(blocked.wait)
            threading.Timer(0.2, blocked.set).start()
        submit(self, coroutine)
        if when == "while it is awaited":
            started.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(loop), "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(call())
    assert submit(loop, asyncio.sleep(0, "done")).result(10) == "done"  # the loop is free again
    if when == "while it is awaited":
        assert ended.wait(10)
    assert reached == (["cancelled"] if started.is_set() else [])


def test_a_call_that_stops_the_loop_is_the_only_one_that_it_stops():
    """Otherwise all later calls of the process would find a closed loop."""

    async def stops():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return "awaited all the same"

    loop = event_loop()
    assert loop.submit(stops()).result(10) == "awaited all the same"
    assert loop.submit(asyncio.sleep(0, "done")).result(10) == "done"


def test_a_fork_made_by_a_call_ends_where_it_waits():
    """It shares the loop's selector with this process, and would take its events."""

    async def forks():
        child = os.fork()
        await asyncio.sleep(0)
        while True:  # in the child, nothing runs from here on
            found, _ = os.waitpid(child, os.WNOHANG)
            if found:
                return found == child
            await asyncio.sleep(0.01)

    assert event_loop().submit(forks()).result(10)
