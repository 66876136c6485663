"""What a reward source is given, what it gives back, and the check that every source's scores pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from kedge.errors import NonfiniteScoreError, RewardError

__all__ = ["MESSAGES_COLUMN", "Responses", "RewardSource", "Scores", "checked_scores"]

Scores = list[float | None]
"""One number per response; None where a source has nothing to say about a response."""

MESSAGES_COLUMN = "messages"
"""The prompt column with a conversational prompt's messages, as they were before a chat template rendered them."""


@dataclass(frozen=True)
class Responses:
    """What the policy said to a batch of prompts: one entry per response in every list.

    Attributes:
        prompts: the prompts as text, conversational ones as rendered by the policy's chat template.
        completions: the responses as text, without the stop token.
        prompt_ids: the prompts in the policy's tokens.
        response_ids: the responses in the policy's tokens, the stop token included where one was sampled.
        stopped: True where the response ended with the stop token, False where it was cut.
        columns: the other fields of the prompts' rows, each a list with one entry per response.
        max_new_tokens: the length at which responses are cut, tokens; None where nothing cuts them.
        seed: for a source that draws random numbers, in [0, 2⁶³); a function of the run's seed and the update alone,
            so that a resumed run draws what an uninterrupted one does.

    Raises:
        RewardError: The lists differ in length.
    """

    prompts: list[str]
    completions: list[str]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    stopped: list[bool]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    max_new_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        lists: dict[str, Sequence[Any]] = {
            "completions": self.completions,
            "prompt_ids": self.prompt_ids,
            "response_ids": self.response_ids,
            "stopped": self.stopped,
            **{f"columns[{name!r}]": column for name, column in self.columns.items()},
        }
        for name, entries in lists.items():
            if len(entries) != len(self.prompts):
                raise RewardError(f"{name} has {len(entries)} entries; expected {len(self.prompts)}, one per prompt")

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, rows: Sequence[int]) -> Responses:
        """Some of the responses, in the order given."""

        def chosen(entries: list[Any]) -> list[Any]:
            return [entries[row] for row in rows]

        return Responses(
            chosen(self.prompts),
            chosen(self.completions),
            chosen(self.prompt_ids),
            chosen(self.response_ids),
            chosen(self.stopped),
            {name: chosen(column) for name, column in self.columns.items()},
            self.max_new_tokens,
            self.seed,
        )


@runtime_checkable
class _Array(Protocol):
    """A tensor, array or array scalar of any library. Reward functions run where none of them need be imported."""

    def tolist(self) -> Any: ...


class RewardSource(Protocol):
    """Anything that gives a score to each response."""

    @property
    def name(self) -> str:
        """What the metrics call it."""
        ...

    def scores(self, responses: Responses) -> Scores:
        """One finite number per response, or None where this source has none for it."""
        ...


def checked_scores(returned: object, *, name: str, count: int) -> Scores:
    """What a source returned, as Python floats, once it is shown to keep the contract.

    Args:
        returned: A list, tuple, tensor or array with one number or None per response. Truth values count as 1 and 0.
        name: The source, for the message.
        count: Number of responses that it was to score.

    Raises:
        RewardError: Another type, another length, or an entry that is neither a number nor None.
        NonfiniteScoreError: An entry is NaN or infinite.
    """
    entries = returned.tolist() if isinstance(returned, _Array) else returned
    if not isinstance(entries, (list, tuple)):
        raise RewardError(f"{name} returned {_shown(returned)}; expected a list of {count} numbers, one per response")
    if len(entries) != count:
        raise RewardError(f"{name} returned {len(entries)} scores for {count} responses; expected one per response")
    return [_checked_score(entry, name=name, index=index) for index, entry in enumerate(entries)]


def _checked_score(entry: object, *, name: str, index: int) -> float | None:
    if entry is None:
        return None
    number = entry.tolist() if isinstance(entry, _Array) else entry
    if isinstance(entry, _Array) and isinstance(number, list) and len(number) == 1:
        number = number[0]
    if not isinstance(number, Real):
        raise RewardError(f"{name} gave response {index} {_shown(entry)}; expected a number, or None for no score")
    try:
        score = float(number)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        told = f"{name} gave response {index} {score}; expected a finite number, or None for no score"
        raise NonfiniteScoreError(told, index)
    return score


def _shown(value: object, limit: int = 60) -> str:
    """A value and its type on one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= limit else text[:limit] + '…'} (a {type(value).__name__})"
