"""A time limit for code that comes with a model and may never finish."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["deadline"]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds, between two bytecode instructions, in any thread.

    A signal works in the main thread only, and a process per call costs more than most calls take.

    Raises:
        TimeoutError: Inside the block, at its deadline.
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
