"""Rows held out for evaluation, by prompt: what a model was trained on never measures it."""

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
    """Two halves that share no prompt."""

    train: list[RecordT]
    eval: list[RecordT]


def split_eval(records: Sequence[RecordT], fraction: float, seed: int) -> Split[RecordT]:
    """Hold out whole prompts, drawn at random, until they make up the fraction of the records.

    Both halves keep the records' order. Where a fraction is asked for, each half gets at least one prompt.

    Args:
        records: what was read.
        fraction: share of the records to hold out, 0 (none) to below 1; more where a prompt has many records.
        seed: of the draw.

    Raises:
        DataError: All records have one prompt, so that nothing can be held out.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction is {fraction}, expected 0 ≤ fraction < 1")
    if fraction == 0:
        return Split(list(records), [])
    counts: dict[str, int] = {}
    for record in records:
        counts[_prompt(record)] = counts.get(_prompt(record), 0) + 1
    if len(counts) < 2:
        raise DataError(f"{len(records)} rows share one prompt: none can be held out, set the evaluation fraction to 0")
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
    # Plain texts have no prompt; equal texts must not be divided either.
    return record.completion if isinstance(record, Demonstration) and not record.prompt else record.prompt
