"""`samples.jsonl`: a few responses of every update, with values per token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import ShapeError
from kedge.logs.json_lines import RunLog, plain_json, read_json_lines

__all__ = ["SAMPLES_FILE", "Sample", "SamplesLog", "read_samples"]

SAMPLES_FILE = "samples.jsonl"
OPTIONAL = ("reason", "foreign", "ending")
TOKEN_VALUES = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "entropies", "new_logprobs")


@dataclass(frozen=True)
class Sample:
    """One response with one value per token in every list: of an episode, per token of the policy's own.

    Attributes:
        prompt: The prompt as text.
        response: The response as text; of an episode, what both sides said.
        tokens: The text of each token that the policy chose, including the stop token; empty for a token that is part
            of a character which a later token completes.
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
        reason: The reason for the score, or None. In the file only if there is one, as what follows.
        foreign: Each text in the response that the policy only read, after the number of its tokens before it.
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
    ending: str | None = None

    def as_fixed(self, number: int) -> Sample:
        """The same sample as a response to a fixed prompt."""
        return dataclasses.replace(self, fixed=number)

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
            {name: value for name, value in vars(each).items() if name not in OPTIONAL or value} for each in samples
        ]
        self.append(update, *_rounded(plain_json(rows)))
        if self._also is not None and samples:
            self._also(update, samples)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `samples.jsonl`; raises `DataError` as `read_json_lines`."""
    return read_json_lines(folder / SAMPLES_FILE)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value
