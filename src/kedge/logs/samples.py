"""`samples.jsonl`: a few responses of every update, with the figures of each of their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import ShapeError
from kedge.logs.json_lines import JsonLines, plain_json, read_json_lines

__all__ = ["SAMPLES_FILE", "Sample", "SamplesLog", "read_samples"]

SAMPLES_FILE = "samples.jsonl"
TOKEN_FIGURES = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "entropies", "new_logprobs")


@dataclass(frozen=True)
class Sample:
    """One response with what everybody thought of each of its tokens; one figure per token in every list.

    Attributes:
        prompt: the prompt as text.
        response: the response as text.
        tokens: the response's tokens as text, the stop token included.
        score: the response's score, or None where no source had one.
        stopped: False where the response was cut.
        logprobs: the policy's log probability of each token, nats.
        ref_logprobs: the reference's, nats, or None where no reference takes part.
        values: the critic's value before each token, or None without a critic.
        rewards: reward per token.
        advantages: advantage per token, as the policy loss weighs it.
        entropies: entropy of the distribution that each token was drawn from, nats, or None where nobody computed it.
        new_logprobs: log probabilities in the update's last epoch, nats, or None where it had no such epoch.
        fixed: the number of a prompt that is asked again and again, from 0, or None.

    Raises:
        ShapeError: A list has another length than `tokens`.
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

    def as_fixed(self, number: int) -> Sample:
        """The same as an answer to a prompt that is asked again and again."""
        return dataclasses.replace(self, fixed=number)

    def __post_init__(self) -> None:
        for name in TOKEN_FIGURES:
            figures = getattr(self, name)
            if figures is not None and len(figures) != len(self.tokens):
                raise ShapeError(f"{name} has {len(figures)} entries; expected {len(self.tokens)}, one per token")


class SamplesLog:
    """Rows of `samples.jsonl`: one per kept response, its update in front; flushed update by update.

    Figures have six significant digits: they are for reading.

    Args:
        folder: The run's folder.
        also: Who else is told, such as `Loggers.write_samples`, once the file has the rows.
    """

    def __init__(self, folder: Path, also: Callable[[int, Sequence[Sample]], None] | None = None) -> None:
        self._lines, self._also = JsonLines(folder / SAMPLES_FILE), also

    def write(self, update: int, samples: Iterable[Sample]) -> None:
        """Add the kept responses of one update."""
        samples = list(samples)
        for sample in samples:
            row = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
            self._lines.write({"update": update, **_rounded(plain_json(row))})
        if self._also is not None and samples:
            self._also(update, samples)

    def sync(self) -> None:
        """Have the disk take all rows now, before a checkpoint that counts on them."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def __enter__(self) -> SamplesLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `samples.jsonl`; `DataError` as `read_json_lines`."""
    return read_json_lines(folder / SAMPLES_FILE)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value
