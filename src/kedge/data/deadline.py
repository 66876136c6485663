"""An end for code that came with a model and may have none of its own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["deadline"]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupt the block when its time is up, between two steps of Python code and in whichever thread it runs.

    A signal would reach the main thread alone, and a process of its own costs more than most blocks take.

    Raises:
        TimeoutError: In the block, at its deadline.
    """
    thread, lock, ended = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()

    def interrupt() -> None:
        with lock:
            if not ended.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeoutError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            ended.set()
        timer.cancel()
