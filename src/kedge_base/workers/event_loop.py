"""An event loop for users' async code, for the lifetime of the process."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

_T = TypeVar("_T")

LAST_SECONDS = 1.0
"""Seconds to wait, when the process ends, for calls that timed out."""


class _EventLoop:
    """The event loop of all async functions and environments, in a separate thread; closed when the process ends.

    Semaphores and the connections of HTTP clients belong to the loop that first used them, and user code makes them
    once: for all calls, all functions of a module, all episodes, and all stages of a script. In a notebook the calling
    thread already runs a loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_open = True
        selector = getattr(self._loop, "_selector", None)
        if selector is not None and hasattr(os, "register_at_fork"):
            # A fork made by a call would take this process's events; without a selector, it cannot wait for any.
            os.register_at_fork(after_in_child=selector.close)
        self._thread = threading.Thread(target=self._run, name="kedge-async", daemon=True)
        self._thread.start()
        atexit.register(self._close)

    def submit(self, call: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a call."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a call; an interrupt of the waiting thread at any time cancels the call."""
        tasks: list[asyncio.Task[_T]] = []
        is_awaited = True

        async def cancellable() -> _T:
            tasks.append(task := asyncio.ensure_future(call))
            if not is_awaited:
                task.cancel()
            return await task

        try:
            return self.submit(cancellable()).result()
        finally:
            is_awaited = False
            for task in tasks:
                self._loop.call_soon_threadsafe(task.cancel)

    def _run(self) -> None:
        process = os.getpid()
        while self._is_open:  # a call may stop the loop, or raise what is raised again where it is awaited
            with suppress(SystemExit, KeyboardInterrupt):
                try:
                    self._loop.run_forever()
                finally:
                    if os.getpid() != process:
                        os._exit(0)
        self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _stop(self) -> None:
        self._is_open = False
        self._loop.stop()

    def _close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(LAST_SECONDS)


_the_loop = cache(_EventLoop)
_starting = threading.Lock()


def event_loop() -> _EventLoop:
    """Return this process's event loop, started on first use, which several threads may make at once."""
    with _starting:
        return _the_loop()


def _forget_loop() -> None:
    """Forget the loop in a forked process, which lacks its thread, and that of a thread that was starting it."""
    global _starting
    _starting = threading.Lock()
    _the_loop.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loop)
