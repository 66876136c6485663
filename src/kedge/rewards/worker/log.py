"""`reward.log`: what reward functions print, and the tracebacks of what they raise."""

from __future__ import annotations

from pathlib import Path

__all__ = ["RewardLog"]

_LIMIT = 1 << 20


class RewardLog:
    """One function's lines in a file that all functions of a run add to, each line behind the function's name.

    What comes before the run's folder exists waits in memory. Of one call no more than 1 MiB is kept: a function that
    prints without end must not fill the disk.

    Args:
        path: The file; None keeps nothing.
        name: The function's.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self.name = name
        self._path = path
        self._waiting: list[bytes] = []
        self._part = b""
        self._room, self._left_out = _LIMIT, 0

    def add(self, printed: bytes) -> None:
        """Add output as it comes; a line that has not ended waits for its end."""
        kept = printed[: self._room]
        self._room -= len(kept)
        self._left_out += len(printed) - len(kept)
        *lines, self._part = (self._part + kept).split(b"\n")
        self._write(lines)

    def end(self, *lines: str) -> None:
        """End a call's output with lines of kedge's own."""
        closing = [self._part] if self._part else []
        if self._left_out:
            closing.append(f"[{self._left_out:,} more bytes were printed]".encode())
        self._write([*closing, *(line.encode("utf-8", "backslashreplace") for line in lines)])
        self._part, self._room, self._left_out = b"", _LIMIT, 0

    def _write(self, lines: list[bytes]) -> None:
        self._waiting += [self.name.encode() + b": " + line + b"\n" for line in lines]
        if self._path is None or not self._waiting or not self._path.parent.is_dir():
            del self._waiting[:-1000]
            return
        with self._path.open("ab") as file:
            file.write(b"".join(self._waiting))
        self._waiting.clear()
