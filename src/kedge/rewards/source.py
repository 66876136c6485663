"""The reward source protocol: a source's inputs and results, and the checks on its results."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from kedge_base.errors import NonfiniteScoreError, RewardError
from kedge_base.thoughts import opened_thought
from kedge_base.verdict import Verdict

if TYPE_CHECKING:  # a reward function's process imports this module, and needs no torch
    from kedge.rewards.model import ModelReward

Score: TypeAlias = "float | list[float] | None"
"""One number for a response, or one per response token (a process reward), or None for no score."""

Scores: TypeAlias = "list[float | None]"
"""One number per response, or None for no score."""

LONGEST_REASON = 60
"""Maximum characters of a reason, which is a short phrase and names a metric."""

LARGEST = 1e12
"""The largest allowed score: sums of squares over tokens and responses must not overflow fp32, which ends at 3e38."""

MESSAGES_COLUMN = "messages"
"""The prompt column with a conversational prompt's messages, before a chat template rendered them."""


@dataclass(frozen=True)
class Responses:
    """The policy's responses to a batch of prompts: every list has one entry per response.

    Attributes:
        prompts: the prompts as text, conversational ones as rendered by the policy's chat template.
        completions: the responses as text, without the stop token.
        prompt_ids: the prompts in the policy's tokens.
        response_ids: the responses in the policy's tokens, including the stop token where one was sampled.
        stopped: True where the response ended with a stop token, False where it was cut off.
        columns: the other fields of the prompts' rows, each a list with one entry per response.
        max_new_tokens: the response length limit, tokens; None for no limit.
        seed: for sources that draw random numbers, in [0, 2⁶³). It only depends on the run's seed and the update, so
            that a resumed run draws the same numbers.
        paid: the environment's rewards, one number per response token, NaN if it failed; empty without an environment.
        turns: the turns of each episode as messages, see `episodes`; empty for single-turn responses.
        preceding: the text right before each last turn, which may open a thought; empty for texts that no model wrote.

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
    paid: list[list[float]] = field(default_factory=list[list[float]])
    turns: list[list[dict[str, str]]] = field(default_factory=list[list[dict[str, str]]])
    preceding: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        optional = ("paid", "turns", "preceding")
        lists = {
            name: entries
            for name, entries in vars(self).items()
            if isinstance(entries, list) and (entries or name not in optional)
        }
        lists |= {f"columns[{name!r}]": column for name, column in self.columns.items()}
        for name, entries in lists.items():
            if len(entries) != len(self.prompts):
                raise RewardError(f"{name} has {len(entries)} entries; expected {len(self.prompts)}, one per prompt")

    def __len__(self) -> int:
        return len(self.completions)

    @classmethod
    def joined(cls, parts: Sequence[Responses]) -> Responses:
        """Join batches with the same columns; limit and seed are those of the first."""
        first = parts[0]
        names = [name for name, entries in vars(first).items() if isinstance(entries, list)]
        lists = {name: [entry for part in parts for entry in getattr(part, name)] for name in names}
        columns = {name: [entry for part in parts for entry in part.columns[name]] for name in first.columns}
        return replace(first, **lists, columns=columns)

    @property
    def lengths(self) -> list[int]:
        """Tokens per response, including the stop token where one was sampled."""
        return [len(ids) for ids in self.response_ids]

    @property
    def episodes(self) -> list[list[dict[str, str]]]:
        """The responses as messages: those of `assistant` are the policy's, those of `environment` are the texts in
        between.
        """
        return self.turns or [[{"role": "assistant", "content": text}] for text in self.completions]

    @property
    def last_turns(self) -> list[str]:
        """The last turn of the policy in each response."""
        return [[each["content"] for each in turns if each["role"] == "assistant"][-1] for turns in self.episodes]

    @property
    def answers(self) -> list[str]:
        """The last turns as verifiers read them: preceded by the tag of a thought that they continue."""
        preceding = self.preceding or [""] * len(self)
        return [opened_thought(before) + text for before, text in zip(preceding, self.last_turns, strict=True)]

    def select(self, rows: Sequence[int]) -> Responses:
        """Select responses, in the order given."""
        lists = {name: entries for name, entries in vars(self).items() if isinstance(entries, (list, dict))}
        return replace(self, **chosen(lists, rows))


def chosen(entries: Any, rows: Sequence[int]) -> Any:
    """Select rows of a list with one entry per response, or of each list in a mapping; None and [] are returned."""
    if isinstance(entries, Mapping):
        return {name: chosen(inner, rows) for name, inner in entries.items()}
    return [entries[row] for row in rows] if entries else entries


class RewardSource(Protocol):
    """Anything that scores responses."""

    @property
    def name(self) -> str:
        """Its name in metrics and messages."""
        ...

    @property
    def models(self) -> Mapping[str, ModelReward]:
        """The models it runs, by name; empty for functions."""
        ...

    def check(self, columns: Collection[str]) -> None:
        """Check before a run that the prompts have the columns it needs; raises `RewardError` if not."""
        ...

    def score(self, responses: Responses) -> Sequence[Score]:
        """One entry per response: a finite number, a list of one per response token, or None for no score."""
        ...


@runtime_checkable
class _Array(Protocol):
    """A tensor, array or array scalar of any library; no library has to be imported."""

    def tolist(self) -> Any: ...


PROMPT_NUMBER = re.compile(r"(?<=, )prompt (\d+)(?=: )")
"""The number of a prompt, from 1, in an error about an entry of a column."""


def checked_scores(
    returned: object, *, name: str, lengths: Sequence[int], rows: Sequence[int] | None = None
) -> list[Score]:
    """Check a source's return value, and convert it to Python floats.

    Args:
        returned: A list, tuple, tensor or array with one entry per response: a number, a list, tuple or array of one
            number per response token, a `Verdict` or its mapping, or None. An array with a single number is a number.
            Booleans count as 1 and 0.
        name: The source, for messages.
        lengths: Tokens per response.
        rows: The numbers of the responses in the batch, for errors; None if they are all of it.

    Raises:
        RewardError: Another type or length.
        NonfiniteScoreError: A number is NaN or infinite.
    """
    entries = _plain(returned)
    count = len(lengths)
    if not isinstance(entries, (list, tuple)):
        raise RewardError(f"{name} returned {_shown(returned)}; expected a list of {count} numbers, one per response")
    check_count(entries, count, f"{name} returned ")
    by_token = any(isinstance(each, (list, tuple)) and len(each) > 1 for each in map(_plain, entries))
    return [
        _checked_entry(entry, name=name, row=row, length=length, by_token=by_token)
        for row, entry, length in zip(rows or range(count), entries, lengths, strict=True)
    ]


def check_count(entries: Sequence[object], count: int, giver: str = "") -> None:
    """Check that there are as many scores as responses (`RewardError` if not)."""
    if len(entries) == count:
        return
    first = _plain(entries[0]) if entries else None
    is_pair = isinstance(first, (list, tuple)) and len(first) == count
    hint = f": the first part, which has {count}, without the others" if is_pair else ""
    raise RewardError(f"{giver}{len(entries)} scores for {count} responses; expected one per response{hint}")


def plain_scores(scores: Sequence[Score]) -> list[Score | dict[str, Any]]:
    """Convert scores to JSON types, which `checked_scores` reads back."""
    return [score.as_json() if isinstance(score, Verdict) else score for score in scores]


def _checked_entry(entry: object, *, name: str, row: int, length: int, by_token: bool) -> Score:
    if entry is None:
        return None
    if isinstance(entry, Verdict):
        entry = entry.as_json()
    if isinstance(entry, Mapping):
        return _checked_verdict(entry, f"{name} gave response {row}", row=row)
    value = _plain(entry)
    if isinstance(entry, _Array) and isinstance(value, list) and len(value) == 1 and not (by_token and length == 1):
        value = value[0]
    if not isinstance(value, (list, tuple)):
        return _checked_number(value, f"{name} gave response {row}", "or None for no score", row=row)
    if len(value) != length:
        hint = "; if that is the response's score, take it out of the list, as scores.squeeze(-1) does of a tensor"
        raise RewardError(
            f"{name} gave response {row} a list of {len(value)} numbers; expected one number, or a list of {length}, "
            f"one per response token{hint if len(value) == 1 else ''}"
        )
    return [
        _checked_number(number, f"{name} gave token {slot} of response {row}", "one per response token", row=row)
        for slot, number in enumerate(value)
    ]


def _checked_verdict(entry: Mapping[Any, Any], giver: str, *, row: int) -> Verdict:
    if set(entry) - {"answer"} != {"score", "reason"}:
        raise RewardError(
            f"{giver} {_shown(entry)}; expected a number, or a score with its reason: "
            "{'score': 0.0, 'reason': 'wrong value'}"
        )
    reason = entry["reason"]
    if not isinstance(reason, str) or not reason.strip() or len(reason) > LONGEST_REASON:
        raise RewardError(
            f"{giver} the reason {_shown(reason)}; expected a phrase of at most {LONGEST_REASON} characters, such as "
            "'wrong value'"
        )
    answer = entry.get("answer")
    if not (answer is None or isinstance(answer, str)):
        raise RewardError(f"{giver} the answer {_shown(answer)}; expected a text, or None")
    score = _checked_number(entry["score"], giver, "also with a reason", row=row)
    return Verdict(score, " ".join(reason.split()), None if answer is None else "".join(answer))


def _checked_number(entry: object, giver: str, expected: str, *, row: int) -> float:
    number = _plain(entry)
    if not isinstance(number, Real):
        raise RewardError(f"{giver} {_shown(entry)}; expected a number, {expected}")
    try:
        score = float(number)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise NonfiniteScoreError(f"{giver} {score}; expected a finite number, {expected}", row)
    if abs(score) > LARGEST:
        raise NonfiniteScoreError(
            f"{giver} {score:g}, whose sums and squares are infinite in fp32; expected a number up to {LARGEST:g}", row
        )
    return score


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, _Array) else value


def _shown(value: object, limit: int = 60) -> str:
    """Format a value and its type on one line, truncated if long."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= limit else text[:limit] + '…'} (of type {type(value).__name__})"


def free_names(columns: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Give each column a distinct name that is not taken: `given_NAME` if its own is."""
    names = {column: column for column in columns if column not in taken}
    for column in (column for column in columns if column in taken):
        name = f"given_{column}"
        while name in names.values():
            name = f"given_{name}"
        names[column] = name
    return names
