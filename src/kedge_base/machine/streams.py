"""Makes standard streams that cannot end a run: output that cannot be written is dropped.

If a reader exits (`| head`), a terminal is closed or the disk of a log is full, a line is lost, but not hours of
training. Characters that the encoding lacks are replaced.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


@contextmanager
def lasting_streams() -> Iterator[None]:
    """In the block, writing to standard output and error never fails, and no standard descriptor is closed.

    Descriptors that are closed (`<&- >&-`) are opened on /dev/null: otherwise the next file or socket would get their
    numbers. Streams that do not belong to the process, as in a notebook, are unchanged.
    """
    _fill_descriptors()
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115  it lasts as long as the process
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # it was closed in the block
                stream.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def refused_output() -> OSError | None:
    """The error that lost standard output; None if nothing was lost, or the reader closed the pipe."""
    error = getattr(_raw(sys.stdout), "error", None)
    return None if isinstance(error, BrokenPipeError) else error


class _Lasting(io.FileIO):
    """A file descriptor whose writes never fail: bytes that cannot be written are dropped."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):
            try:
                count = super().write(view[written:])
            except OSError as error:
                self.error = error
                break
            if count is None:  # a full pipe that another process has made non-blocking
                select.select([], [self], [])
            written += count or 0
        return len(view)


def _fill_descriptors() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """Put a stream on a `_Lasting` descriptor; return it unchanged if it does not write to this descriptor."""
    if stream is None:
        return io.TextIOWrapper(_Lasting(descriptor, "w", closefd=False), write_through=True)
    is_console = sys.platform == "win32" and stream.isatty()  # Unicode there needs Python's own class
    if is_console or not isinstance(stream, io.TextIOWrapper) or isinstance(_raw(stream), _Lasting):
        return stream
    with suppress(OSError, ValueError):
        if stream.fileno() != descriptor:
            return stream
        with suppress(OSError):
            stream.flush()
        raw = _Lasting(descriptor, "w", closefd=False)
        return io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors="replace" if stream.errors == "strict" else stream.errors,
            newline=None if sys.platform == "win32" else "\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
    return stream


def _raw(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
