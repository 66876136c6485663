"""The labels of a round of `kedge rlhf` by people: its items wait in a folder of labels until they are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge_base.errors import DataError
from kedge_people.labels import ITEMS_FILE, Item, comparisons, write_data_sets, write_items


def human_labels(
    folder: Path, sampled: Sequence[Mapping[str, Any]] = (), *, least: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Ask people, or collect their answers.

    Args:
        folder: The folder of labels; it is made unless its items are there.
        sampled: For a new folder, rows of `prompt`, distinct `responses`, `model` and further columns.
        least: Number of items that must be answered; None, or more than there are, for all.

    Returns:
        The comparisons, and how many items must still be answered; an answer may be a skip, unless it undoes another.

    Raises:
        DataError: No prompt has two responses that differ, or the folder is damaged.
    """
    if not (folder / ITEMS_FILE).is_file():
        items = [_item(number, row) for number, row in enumerate(sampled, 1) if len(row["responses"]) > 1]
        if not items:
            raise DataError(
                f"{folder}: the responses to each prompt are the same, so that there is nothing to compare; increase "
                "rollout.temperature"
            )
        folder.mkdir(exist_ok=True)
        write_items(folder, items)
    labels = write_data_sets(folder)
    needed = len(labels.items) if least is None else min(least, len(labels.items))
    return list(comparisons(labels)), max(0, needed - len({each.item for each in labels.answers}))


def _item(number: int, row: Mapping[str, Any]) -> Item:
    columns = {name: value for name, value in row.items() if name not in ("prompt", "responses", "model")}
    responses = tuple(row["responses"])
    return Item(str(number), row["prompt"], responses, (row["model"],) * len(responses), columns)
