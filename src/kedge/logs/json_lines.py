"""JSON-lines files that may be read while they are being written: metrics, evaluations, samples."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import Self

from kedge_base.errors import DataError, ShapeError
from kedge_base.machine.durable import replace_contents, sync, sync_folder
from kedge_base.run_folder.output import writing
from kedge_base.run_folder.record_format import MEASURED, METRICS_FILE, SAMPLES_FILE

LONGEST_INT = 8192
"""Largest integer written in decimal, in bits: Python refuses to convert more than 4,300 digits."""


class JsonLines:
    """Appends rows to a JSON-lines file; each row can be read immediately, and `sync` forces them to disk.

    Equal rows give equal bytes. NaN and ±∞ become null.

    Args:
        path: The file; created if missing. A trailing partial row, left by a killed process, is removed.

    Raises:
        OutputError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("ab+", buffering=0)  # a buffer would keep and retry bytes that a full disk refuses
            self._file.seek(0)
            self._file.truncate(self._file.readall().rfind(b"\n") + 1)
        self._is_new = True

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; its keys keep their order.

        Raises:
            OutputError: Writing fails; no part of the row is left in the file.
        """
        text = json.dumps(plain_json(row), ensure_ascii=False, allow_nan=False) + "\n"
        # UTF-8 cannot encode a lone surrogate; what backslashreplace writes is its JSON escape.
        remaining = memoryview(text.encode("utf-8", "backslashreplace"))
        before = os.fstat(self._file.fileno()).st_size
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except BaseException as error:  # includes KeyboardInterrupt; re-raised
            with suppress(OSError):
                self._file.truncate(before)
            with writing(self._path):
                raise error

    def sync(self) -> None:
        """Force all rows to disk, so that a power cut loses none of them.

        Raises:
            OutputError: The system refuses.
        """
        if self._file.closed:
            return
        with writing(self._path):
            if not self._path.exists() and self._path.parent.is_dir():
                self._write_again()
            sync(self._file.fileno())
            if self._is_new and self._path.parent.is_dir():
                sync_folder(self._path.parent)
        self._is_new = False

    def _write_again(self) -> None:
        """Copy the rows to a new file and continue there, after the folder was moved, or deleted and recreated."""
        self._file.seek(0)
        rows = self._file.readall()
        self._file.close()
        replace_contents(self._path, [rows])
        self._file = self._path.open("ab+", buffering=0)

    def close(self) -> None:
        """Force all rows to disk and close the file."""
        try:
            self.sync()
        finally:
            self._file.close()


class RunLog:
    """A log of a run: each row has the number of its update and is flushed. Used as a context, it closes the file.

    The file is only opened or created by `open` or the first row, since a resumed run may still be rejected.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: JsonLines | None = None

    def open(self) -> JsonLines:
        """Open the file unless it is open; from then on, its rows survive if the folder is deleted."""
        self._lines = self._lines or JsonLines(self._path)
        return self._lines

    def append(self, update: int, *rows: Mapping[str, Any]) -> None:
        """Append rows of an update."""
        for row in rows:
            self.open().write({"update": update, **row})

    def sync(self) -> None:
        """Flush all rows to disk, before a checkpoint that relies on them."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsLog(RunLog):
    """Writes `metrics.jsonl`: `update` first, times and memory last, the rest by name; flushed after each row.

    Equal metrics give equal bytes. NaN and ±∞ become null. An existing file is appended to.

    Args:
        folder: The run's folder.
        also: Called with each row once it is in the file, such as `LoggerGroup.write`.
    """

    def __init__(self, folder: Path, also: Callable[[int, Mapping[str, Any]], None] | None = None) -> None:
        super().__init__(folder / METRICS_FILE)
        self._also = also

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Append the row of one update.

        Args:
            update: Number of the update, from 1.
            metrics: Values by name: numbers, one-element tensors or arrays, text, None.
        """
        names = sorted(metrics, key=lambda name: (name.startswith(MEASURED), name))
        self.append(update, {name: metrics[name] for name in names})
        self.show(update, metrics)

    def show(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Show a row without writing it to the file."""
        if self._also is not None:
            self._also(update, metrics)


def rows_until(path: Path, last_update: int) -> list[bytes]:
    """The lines of a log up to and including an update, without an incomplete last line.

    Raises:
        DataError: A line is not a row with an update.
    """
    kept: list[bytes] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # what follows the last one is incomplete
        try:
            if int(json.loads(line)["update"]) <= last_update:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise DataError(f"{str(path)!r}, line {number}: not a row with an update") from error
    return kept


def plain_json(value: Any, nonfinite: Callable[[float], str | None] = lambda value: None) -> Any:
    """Convert a value to JSON types. Unknown types become text, because a log must not end a run.

    Args:
        value: The value.
        nonfinite: What NaN and ±∞ become.
    """
    if type(value) is float:  # by far the most common case; this check is eight times faster
        return value if math.isfinite(value) else nonfinite(value)
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(value, float):
        return value if math.isfinite(value) else nonfinite(value)
    if isinstance(value, int) and value.bit_length() > LONGEST_INT:
        return hex(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(entry, nonfinite) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(entry, nonfinite) for entry in value]
    return repr(value)


def as_rows(columns: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Turn equally long columns into rows."""
    for entries in zip(*columns.values(), strict=True):
        yield dict(zip(columns, entries, strict=True))


SAMPLE_OPTIONAL = ("reason", "foreign", "turns", "ending")
TOKEN_VALUES = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "entropies", "new_logprobs")


@dataclass(frozen=True)
class Sample:
    """One response; every list has one value per token; in an episode, per token of the policy.

    Attributes:
        prompt: The prompt as text.
        response: The response as text; for an episode, the text of both sides.
        tokens: The text of each token that the policy chose, including the stop token; empty for a token that is part
            of a character completed by a later token.
        score: The response's score, or None if it was not scored.
        stopped: False if the response was truncated.
        logprobs: The policy's log probability of each token, nats.
        ref_logprobs: The reference's, nats, or None without a reference.
        values: The critic's value before each token, or None without a critic.
        rewards: Reward per token.
        advantages: Advantage per token, as used in the policy loss.
        entropies: Entropy of the distribution each token was drawn from, nats, or None if not computed.
        new_logprobs: Log probabilities in the update's last epoch, nats, or None if it had no such epoch.
        fixed: The number of a fixed prompt, from 0, or None for responses that are trained on.
        reason: The reason for the score, or None. Like the next three, it is omitted from the file if empty.
        foreign: Each text in the response that the policy only read, after the number of its tokens before it.
        turns: The turns of an episode; each has four numbers, those of `kedge.logs.experience_metrics.Sides`.
        ending: How an episode ended, one of `kedge.algorithm.experience.ENDINGS`.

    Raises:
        ShapeError: A list differs in length from `tokens`.
    """

    prompt: str
    response: str
    tokens: Sequence[str]
    score: float | None
    stopped: bool
    logprobs: Sequence[float]
    ref_logprobs: Sequence[float] | None
    values: Sequence[float] | None
    rewards: Sequence[float]
    advantages: Sequence[float]
    entropies: Sequence[float] | None = None
    new_logprobs: Sequence[float] | None = None
    fixed: int | None = None
    reason: str | None = None
    foreign: Sequence[tuple[int, str]] | None = None
    turns: Sequence[Sequence[int]] | None = None
    ending: str | None = None

    def __post_init__(self) -> None:
        for name in TOKEN_VALUES:
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ShapeError(f"{name} has {len(values)} entries; expected {len(self.tokens)}, one per token")


class SamplesLog(RunLog):
    """Writes `samples.jsonl`: one row per kept response, flushed after each update.

    Values are rounded to six significant digits: they are for reading.

    Args:
        folder: The run's folder.
        also: Called with the samples once they are in the file, such as `LoggerGroup.write_samples`.
    """

    def __init__(self, folder: Path, also: Callable[[int, Sequence[Sample]], None] | None = None) -> None:
        super().__init__(folder / SAMPLES_FILE)
        self._also = also

    def write(self, update: int, samples: Iterable[Sample]) -> None:
        """Append the kept responses of one update."""
        samples = list(samples)
        rows = [
            {name: value for name, value in vars(each).items() if name not in SAMPLE_OPTIONAL or value}
            for each in samples
        ]
        self.append(update, *_rounded(plain_json(rows)))
        if self._also is not None and samples:
            self._also(update, samples)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value
