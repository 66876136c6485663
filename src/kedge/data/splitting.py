"""Splits off rows for evaluation by prompt, so that no training prompt is evaluated on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kedge.data.records import Comparison, Demonstration, Prompt, Ranking
from kedge.errors import DataError

__all__ = ["Split", "split_eval"]

RecordT = TypeVar("RecordT", Demonstration, Prompt, Comparison | Ranking)


@dataclass(frozen=True)
class Split(Generic[RecordT]):
    """Training and evaluation records, which share no prompt."""

    train: list[RecordT]
    eval: list[RecordT]


def split_eval(records: Sequence[RecordT], fraction: float, seed: int) -> Split[RecordT]:
    """Hold out whole prompts, drawn at random, until they cover the given fraction of the records.

    Both parts keep the order of the records. With a fraction above 0, each part gets at least one prompt.

    Args:
        records: all records.
        fraction: share of the records to hold out, in [0, 1); exceeded where the last prompt has many records.
        seed: seed of the draw.

    Raises:
        DataError: All records have the same prompt, so that nothing can be held out.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction is {fraction}, expected 0 ≤ fraction < 1")
    if fraction == 0:
        return Split(list(records), [])
    counts: dict[str, int] = {}
    for record in records:
        counts[_prompt(record)] = counts.get(_prompt(record), 0) + 1
    if len(counts) < 2:
        raise DataError(
            f"all {len(records)} rows have the same prompt, so none can be held out; set data.eval_fraction=0"
        )
    held = _drawn(counts, fraction * len(records), seed)
    train = [record for record in records if _prompt(record) not in held]
    return Split(train, [record for record in records if _prompt(record) in held])


def _drawn(counts: dict[str, int], wanted: float, seed: int) -> set[str]:
    order = list(counts)
    random.Random(f"evaluation {seed}").shuffle(order)
    held: set[str] = set()
    num_records = 0
    for prompt in order[:-1]:
        if held and num_records >= wanted:
            break
        held.add(prompt)
        num_records += counts[prompt]
    return held


def _prompt(record: Demonstration | Prompt | Comparison | Ranking) -> str:
    if isinstance(record, Prompt):
        return record.text
    # Plain texts have no prompt; equal texts must be in the same part as well.
    return record.completion if isinstance(record, Demonstration) and not record.prompt else record.prompt
