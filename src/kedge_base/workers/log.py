"""The output of worker processes, in a log file."""

from __future__ import annotations

from pathlib import Path

from kedge_base.run_folder.output import writing

_LIMIT = 1 << 20


class CallLog:
    """Appends the output of one worker to a log file that several share, each line prefixed by its name.

    Output is buffered until the run's folder exists. At most 1 MiB per call is kept, so that endless output does not
    fill the disk.

    Args:
        path: The file; None discards the output.
        name: The worker's name.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self.name = name
        self._path = path
        self._waiting: list[bytes] = []
        self._part = b""
        self._room = _LIMIT
        self._left_out = 0

    def add(self, printed: bytes) -> None:
        """Add output as it is read; an incomplete line is buffered."""
        kept = printed[: self._room]
        self._room -= len(kept)
        self._left_out += len(printed) - len(kept)
        *lines, self._part = (self._part + kept).split(b"\n")
        self._write(lines)

    def end(self, *lines: str) -> None:
        """End a call's output, with further lines from kedge."""
        closing = [self._part] if self._part else []
        if self._left_out:
            closing.append(f"[{self._left_out:,} more bytes were printed]".encode())
        self._write([*closing, *(line.encode("utf-8", "backslashreplace") for line in lines)])
        self._part = b""
        self._room = _LIMIT
        self._left_out = 0

    def _write(self, lines: list[bytes]) -> None:
        self._waiting += [self.name.encode() + b": " + line + b"\n" for line in lines]
        if self._path is None or not self._waiting or not self._path.parent.is_dir():
            del self._waiting[:-1000]
            return
        with writing(self._path), self._path.open("ab") as file:
            file.write(b"".join(self._waiting))
        self._waiting.clear()
