"""The stream of prompts for training: seeded, endless and resumable."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Generic, TypeVar

from kedge.data.fields import field_of, number_of
from kedge.data.records import Comparison, Demonstration, Prompt, Ranking, RowError
from kedge_base.errors import ConfigError, DataError


def room_for_prompt(
    context_lengths: Mapping[str, int | None], max_new_tokens: int, *, turn_tokens: int | None = None
) -> int | None:
    """Return the number of tokens that the shortest context leaves for a prompt; None for no limit.

    Args:
        context_lengths: The context length of each model, by the model's name in messages.
        max_new_tokens: Tokens of a response.
        turn_tokens: Tokens of a turn in episodes, which may be longer than a context; None for no such episodes.

    Raises:
        ConfigError: No tokens are left.
    """
    limits = {name: length for name, length in context_lengths.items() if length is not None}
    if not limits:
        return None
    shortest = min(limits, key=limits.__getitem__)
    room = limits[shortest] - max_new_tokens
    if room < 1 and turn_tokens is not None:
        room = limits[shortest] - turn_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt: {shortest} reads at most "
            f"{limits[shortest]} tokens"
        )
    return room


def prompt_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Return the columns of prompts that all have the same ones, with an entry per prompt."""
    return {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}


def difficulties(prompts: Sequence[Prompt], column: str) -> list[float]:
    """Read the numbers in a column of the prompts.

    Raises:
        DataError: A prompt has no finite number there.
    """
    numbers: list[float] = []
    for prompt in prompts:
        try:
            numbers.append(number_of(field_of(prompt.columns, column), column))
        except RowError as error:
            raise DataError(
                f"data.curriculum={column}: every prompt needs a number in this column; {prompt.place}, "
                f"{prompt.text[:40]!r}: {error}"
            ) from error
    return numbers


LEAST_WEIGHT = 0.25
"""Weight of a prompt whose responses all scored the same, relative to the average: it is retried every few passes."""


class PromptStream:
    """An endless stream of prompts, reshuffled on every pass.

    A pass visits every prompt once. With several ranks, each draws the prompts of the whole batch.

    With a curriculum, the first pass goes from the lowest value of a column to the highest, with ties shuffled; later
    passes are shuffled, since every level has been seen.

    Depending on the scores of its latest responses, a prompt can be skipped in the next passes or drawn more or less
    often; see `note`.

    Source: spec §2.6. Draws by spread: VCRL (arXiv 2509.19803) §3 uses the variance of a group's scores, which is
    largest if half of the responses are right, as the value of a prompt for training.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        curriculum: str | None = None,
        mixture: Mixture | None = None,
        rest: int = 0,
        by_spread: bool = False,
    ) -> None:
        """Start at the first prompt of the first pass.

        Args:
            prompts: the pool.
            seed: seed of the shuffles.
            curriculum: column with the difficulty of a prompt, a number; None also shuffles the first pass.
            mixture: shares of several sources; None for successive passes over all prompts.
            rest: number of passes that skip a prompt without spread.
            by_spread: from the second pass on, draw prompts in proportion to their spread.

        Raises:
            DataError: The list of prompts is empty, or one has no number in the column.
        """
        self._levels = None if curriculum is None else difficulties(prompts, curriculum)
        if not prompts:
            raise DataError("the list of prompts is empty")
        self._prompts = prompts
        self._mixture = mixture
        self._seed = seed
        self._passes = rest
        self._by_spread = by_spread
        self._spreads: dict[int, float] = {}
        self._rested: dict[int, int] = {}
        self._left_out = set[int]()
        self._drawn: dict[int, int] = {}  # not saved: `note` has been called when a run is saved
        self._epoch = self._position = 0
        self._order = self._shuffled()

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts."""
        return [self._prompts[self._advance()] for _ in range(num_prompts)]

    def note(self, prompts: Sequence[Prompt], spreads: Sequence[float]) -> float:
        """Record the spread of responses' scores; return the share of all prompts that the next pass skips.

        Prompts without spread are skipped for some passes. A pass that would be empty uses all prompts.

        Args:
            prompts: drawn from this stream.
            spreads: the variance of the scores of each prompt's responses; 0 if they are all the same.
        """
        drawn = dict(zip(map(id, prompts), spreads, strict=True))
        found = {row: drawn[id(prompt)] for row, prompt in enumerate(self._prompts) if id(prompt) in drawn}
        if self._by_spread:
            self._spreads |= found
        if self._passes:
            self._put_to_rest(found)
        return sum(self._rests(row, self._epoch + 1) for row in self._rested) / len(self._prompts)

    def _put_to_rest(self, spreads: Mapping[int, float]) -> None:
        """Skip rows without spread from the pass after the one that drew them, maybe this one; use others again."""
        for row, spread in spreads.items():
            if spread:
                self._rested.pop(row, None)
            else:
                self._rested[row] = self._drawn.get(row, self._epoch)
        coming = self._order[self._position :]
        now = {row for row in coming if row in spreads and self._rests(row, self._epoch)}
        self._left_out |= now
        self._order[self._position :] = [row for row in coming if row not in now]

    def state_dict(self) -> dict[str, Any]:
        """The stream's position and its records of prompts, as plain numbers."""
        rested: dict[str, Any] = {}
        if self._by_spread:
            rested = {"spreads": [list(each) for each in self._spreads.items()], "order": list(self._order)}
        if self._rested or self._left_out:
            rested |= {"rested": [list(each) for each in self._rested.items()], "left_out": sorted(self._left_out)}
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self._prompts), **rested}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            DataError: The state is from a run with another number of prompts.
        """
        if state["num_prompts"] != len(self._prompts):
            raise DataError(
                f"the run was saved with {state['num_prompts']} prompts, but the data has {len(self._prompts)}; "
                "resume with the original data"
            )
        self._rested = dict(state.get("rested", ()))
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._left_out = set(state.get("left_out", ()))
        self._spreads = dict(state.get("spreads", ()))
        self._order = list(state["order"]) if self._by_spread and "order" in state else self._shuffled()

    def _advance(self) -> int:
        if self._position == len(self._order):
            self._epoch = self._epoch + 1
            self._position = 0
            self._left_out = {row for row in self._rested if self._rests(row, self._epoch)}
            self._order = self._shuffled()
            if not self._order:
                self._left_out = set()
                self._order = self._shuffled()
        self._position += 1
        row = self._order[self._position - 1]
        self._drawn[row] = self._epoch
        return row

    def _rests(self, row: int, epoch: int) -> bool:
        """True if a pass skips a prompt: some passes after it was found to have no spread."""
        rested = self._rested.get(row)
        return rested is not None and rested < epoch <= rested + self._passes

    def _shuffled(self) -> list[int]:
        # The order depends on seed and pass number only, so that resuming needs no generator state.
        if self._mixture is None:
            order = list(range(len(self._prompts)))
            random.Random(f"prompts {self._seed} {self._epoch}").shuffle(order)
        else:
            order = self._mixture.order(self._epoch)
        order = [row for row in order if row not in self._left_out]
        if order and any(self._spreads.values()):
            order = self._by_weight(order)
        levels = self._levels
        return order if levels is None or self._epoch > 0 else sorted(order, key=levels.__getitem__)

    def _by_weight(self, order: list[int]) -> list[int]:
        """Draw the same number of rows in proportion to their weights, by systematic resampling within each source.

        The weight is the spread relative to the mean known spread, at least LEAST_WEIGHT; 1 if the spread is unknown.
        """
        draw = random.Random(f"spread {self._seed} {self._epoch}")
        mean = fmean(self._spreads.values())
        parts: dict[int, list[int]] = {}
        for row in order:
            parts.setdefault(self._mixture.origins[row] if self._mixture else 0, []).append(row)
        drawn: list[int] = []
        for part in parts.values():
            weights = [max(self._spreads.get(row, mean) / mean, LEAST_WEIGHT) for row in part]
            scale = len(part) / sum(weights)
            reached = len(drawn) + draw.random()
            end = len(drawn) + len(part)
            for row, weight in zip(part, weights, strict=True):
                reached += weight * scale
                drawn += [row] * (min(int(reached), end) - len(drawn))
            drawn += part[-1:] * (end - len(drawn))  # make up for rounding errors
        draw.shuffle(drawn)
        return drawn


@dataclass(frozen=True)
class Mixture:
    """Passes over records of several sources, each with a fixed share of the rows.

    A pass has as many rows as there are records. Every source is a separate stream of shuffled passes, from which each
    pass of the mixture takes its share: no row of a large source is lost, and a small source repeats as often as its
    share demands, each time complete before it starts over.

    Attributes:
        origins: index of the source of each record.
        shares: weight of each source, at least 0, and 0 for one without records; only their proportions count.
        seed: seed of the shuffles.
    """

    origins: Sequence[int]
    shares: Sequence[float]
    seed: int

    def order(self, epoch: int) -> list[int]:
        """Return the indices of the records in a pass, counted from 0. Depends only on the seed and the pass."""
        order = [
            row
            for source, count in enumerate(self.counts)
            for row in self._stretch(source, start=epoch * count, count=count)
        ]
        random.Random(f"mixture {self.seed} {epoch}").shuffle(order)
        return order

    @property
    def counts(self) -> list[int]:
        """Return the number of rows of each source in a pass: its share of all records, rounded so that they add up
        (largest remainder).
        """
        exact = [share / sum(self.shares) * len(self.origins) for share in self.shares]
        counts = [int(count) for count in exact]
        for source in sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])[
            : len(self.origins) - sum(counts)
        ]:
            counts[source] += 1
        return counts

    def _stretch(self, source: int, *, start: int, count: int) -> list[int]:
        """Take consecutive rows from the endless stream of a source's shuffled passes."""
        rows = [row for row, origin in enumerate(self.origins) if origin == source]
        drawn: list[int] = []
        while len(drawn) < count:
            number, offset = divmod(start + len(drawn), len(rows))
            shuffled = random.Random(f"source {self.seed} {source} {number}").sample(rows, len(rows))
            drawn += shuffled[offset : offset + count - len(drawn)]
        return drawn


RecordT = TypeVar("RecordT", Demonstration, Prompt, Comparison | Ranking)


@dataclass(frozen=True)
class Split(Generic[RecordT]):
    """Training and evaluation records.

    Attributes:
        train: Records to train on.
        eval: Records held out.
        train_rows: Positions of the training records among all.
        by_prompt: The two parts share no prompt; False if all records have the same prompt.
    """

    train: list[RecordT]
    eval: list[RecordT]
    train_rows: list[int]
    by_prompt: bool = True


def split_eval(records: Sequence[RecordT], fraction: float, seed: int) -> Split[RecordT]:
    """Hold out whole prompts, drawn at random, until they cover the given fraction of the records.

    Records that all have the same prompt, such as a classification turned into preferences, are held out one by one
    instead; equal records stay together. Both parts keep the order of the records. With a fraction above 0, each part
    gets at least one prompt or record.

    Args:
        records: all records.
        fraction: share of the records to hold out, in [0, 1); exceeded if the last prompt has many records.
        seed: seed of the draw.

    Raises:
        DataError: All records are equal, or there is only one, so that nothing can be held out.
    """
    if fraction == 0:
        return Split(list(records), [], list(range(len(records))))
    by_prompt = len({_prompt(record) for record in records}) > 1
    keys = [_prompt(record) if by_prompt else repr(record) for record in records]
    counts = Counter(keys)
    if len(counts) < 2:
        raise DataError(
            f"all {len(records)} rows are equal, so none can be held out; set data.eval_fraction=0"
            if len(records) > 1
            else "the only row cannot be held out; set data.eval_fraction=0"
        )
    held = _drawn(counts, fraction * len(records), seed)
    rows = [row for row, key in enumerate(keys) if key not in held]
    held_out = [record for key, record in zip(keys, records, strict=True) if key in held]
    return Split([records[row] for row in rows], held_out, rows, by_prompt)


def _drawn(counts: Mapping[str, int], wanted: float, seed: int) -> set[str]:
    order = list(counts)
    random.Random(f"evaluation {seed}").shuffle(order)
    held_out: set[str] = set()
    num_records = 0
    for key in order[:-1]:
        if held_out and num_records >= wanted - 1e-6:  # 7% of 100 is a little more than 7 in floating point
            break
        held_out.add(key)
        num_records += counts[key]
    return held_out


def _prompt(record: Demonstration | Prompt | Comparison | Ranking) -> str:
    if isinstance(record, Prompt):
        return record.text
    # Plain texts have no prompt; equal texts must also end up in the same part.
    return record.completion if isinstance(record, Demonstration) and not record.prompt else record.prompt
