"""The curves of a run: its metrics as columns, with the three choices of x axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kedge.inspect.page.numbers import Reduce, as_number, blocks, mean_of, rounded
from kedge.inspect.page.panels import PANELS, matches
from kedge.inspect.record import RunRecord
from kedge.inspect.resolved import KL_COSTS, charges_kl

__all__ = ["curves", "drawn_metrics", "items_per_update", "reduction"]


def curves(record: RunRecord, *, most_points: int) -> dict[str, Any]:
    """The metrics of a run as columns, with the update, responses and seconds of each point.

    Long runs are thinned: each point is the mean of `every` consecutive updates, or the maximum of `_max` metrics and
    the minimum of `_min` metrics.

    Args:
        record: The run.
        most_points: Largest number of points of a curve.
    """
    rows = record.metrics
    parts = blocks(len(rows), most_points)
    seconds = list(itertools.accumulate(as_number(row.get("time/update")) or 0.0 for row in rows))
    updates = [int(row["update"]) for row in rows]
    last = [part[-1] for part in parts]
    each = items_per_update(record)
    names = drawn_metrics(record)
    columns = {name: [_reduced([rows[i].get(name) for i in part], reduction(name)) for part in parts] for name in names}
    return {
        "update": [updates[i] for i in last],
        "seconds": rounded([seconds[i] for i in last], 6),
        "items": None if each is None else [updates[i] * each for i in last],
        "every": len(parts[0]) if parts else 1,
        "columns": rounded({name: column for name, column in columns.items() if any(x is not None for x in column)}),
    }


SIZES = {"sft": "sft.batch_size", "reward": "reward_model.batch_size", "critic": "critic.batch_size"}
"""The field with the rows of a step."""


def items_per_update(record: RunRecord) -> int | None:
    """Responses or environment steps of an update, or rows of a step; None if the configuration lacks them."""
    if record.stage == "ppo":
        prompts, responses = record.setting("rollout.num_prompts"), record.setting("rollout.num_responses")
        return prompts * responses if isinstance(prompts, int) and isinstance(responses, int) else None
    if record.stage == "control":
        envs, steps = record.setting("control.num_envs"), record.setting("control.num_steps")
        return envs * steps if isinstance(envs, int) and isinstance(steps, int) else None
    size = record.setting(SIZES.get(record.stage, ""))
    return size if isinstance(size, int) else None


def drawn_metrics(record: RunRecord) -> list[str]:
    """The metrics of a run that some chart shows."""
    patterns = [pattern for panel in PANELS.get(record.stage, ()) for pattern in panel.lines]
    hidden = {"update"} if charges_kl(record) else {"update", *KL_COSTS}
    names = dict.fromkeys(name for row in record.metrics for name in row if name not in hidden)
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]


def reduction(name: str) -> Reduce:
    """What stands for several updates: the maximum, the minimum, or the mean."""
    if name.endswith("_max"):
        return max
    return min if name.endswith("_min") else mean_of


def _reduced(values: Sequence[Any], reduce: Reduce) -> float | None:
    numbers = [number for value in values if (number := as_number(value)) is not None]
    return reduce(numbers) if numbers else None
