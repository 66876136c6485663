"""What is gained for how far the policy moves: the proxy reward and the judges over the KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.inspect.page.numbers import as_figure, blocks, mean_of, rounded
from kedge.inspect.record import RunRecord

__all__ = ["Checkpoint", "frontier"]

MOST_POINTS = 240
SMOOTHED_OVER = 25
"""The judge's best is that of a mean over so large a part of the run: one lucky update is no optimum."""


@dataclass(frozen=True)
class Checkpoint:
    """A policy on the way, as judges saw it whom training never sees.

    Attributes:
        update: After which update.
        kl: To the reference, nats per response.
        proxy: Mean score by the reward that is trained on.
        judges: Each judge's figure, by its name.
        low: The lower confidence limit of each.
        high: The upper one.
    """

    update: int
    kl: float
    proxy: float
    judges: Mapping[str, float]
    low: Mapping[str, float]
    high: Mapping[str, float]


def frontier(record: RunRecord, checkpoints: Sequence[Checkpoint] = ()) -> dict[str, Any]:
    """Proxy and judges of a run over √KL.

    Args:
        record: The run, whose reward terms of weight 0 are judges.
        checkpoints: What judges outside of the run said; taken in place of the run's own.

    Returns:
        Columns `update`, `root_kl`, `proxy`; `judges`, each with its `figures`, perhaps limits, and the `best` update.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    found = checkpoints or _of_updates(record)
    if not found:
        return {"empty": _why_empty(record)}
    names = list(found[0].judges)
    return {
        "update": [each.update for each in found],
        "root_kl": rounded([math.sqrt(max(0.0, each.kl)) for each in found]),
        "proxy": rounded([each.proxy for each in found]),
        "judges": [_judge(name, found, given=bool(checkpoints)) for name in names],
    }


def _of_updates(record: RunRecord) -> list[Checkpoint]:
    judged = record.judges
    wanted = ("objective/kl", "reward/score_mean", *judged)
    rows = [row for row in record.metrics if all(as_figure(row.get(name)) is not None for name in wanted)]
    parts = [[rows[index] for index in block] for block in blocks(len(rows), MOST_POINTS)]
    return [
        Checkpoint(
            update=int(part[-1]["update"]),
            kl=_mean(part, "objective/kl"),
            proxy=_mean(part, "reward/score_mean"),
            judges={name.removeprefix("score/"): _mean(part, name) for name in judged},
            low={},
            high={},
        )
        for part in parts
    ]


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return mean_of([float(row[name]) for row in rows])


def _judge(name: str, found: Sequence[Checkpoint], *, given: bool) -> dict[str, Any]:
    figures = [each.judges[name] for each in found]
    # A checkpoint is judged on many responses of its own; an update's responses are few, so neighbours help.
    reach = 0 if given else len(figures) // (2 * SMOOTHED_OVER)
    smooth = [mean_of(figures[max(0, place - reach) : place + reach + 1]) for place in range(len(figures))]
    best = max(range(len(smooth)), key=lambda place: smooth[place])
    limits = {
        side: rounded([getattr(each, side)[name] for each in found])
        for side in ("low", "high")
        if all(name in getattr(each, side) for each in found)
    }
    return {"name": name, "figures": rounded(figures), "best": best, **limits}


def _why_empty(record: RunRecord) -> str:
    if record.stage != "ppo":
        return "Only PPO moves away from a reference."
    if any("reward/score_mean" in row for row in record.metrics):
        return "The KL was not measured: ppo.measure_kl=true measures it where it costs nothing to the policy."
    return "There are no scores yet."
