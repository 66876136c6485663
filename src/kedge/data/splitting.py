"""Splits off rows for evaluation: by prompt where there are several, so that no training prompt is evaluated on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kedge.data.records import Comparison, Demonstration, Prompt, Ranking
from kedge.errors import DataError

__all__ = ["RecordT", "Split", "split_eval"]

RecordT = TypeVar("RecordT", Demonstration, Prompt, Comparison | Ranking)


@dataclass(frozen=True)
class Split(Generic[RecordT]):
    """Training and evaluation records.

    Attributes:
        train: Records to train on.
        eval: Records held out.
        train_rows: Positions of the training records among all.
        by_prompt: Whether the two share no prompt; False if all records have the same one.
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
        fraction: share of the records to hold out, in [0, 1); exceeded where the last prompt has many records.
        seed: seed of the draw.

    Raises:
        DataError: All records are equal, or there is only one, so that nothing can be held out.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction is {fraction}, expected 0 ≤ fraction < 1")
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
    held: set[str] = set()
    num_records = 0
    for key in order[:-1]:
        if held and num_records >= wanted:
            break
        held.add(key)
        num_records += counts[key]
    return held


def _prompt(record: Demonstration | Prompt | Comparison | Ranking) -> str:
    if isinstance(record, Prompt):
        return record.text
    # Plain texts have no prompt; equal texts must be in the same part as well.
    return record.completion if isinstance(record, Demonstration) and not record.prompt else record.prompt
