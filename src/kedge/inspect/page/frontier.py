"""Over-optimization: the proxy reward and the judges over the KL to the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.inspect.page.numbers import as_number, blocks, mean_of, rounded
from kedge.inspect.record import RunRecord

__all__ = ["FrontierPoint", "frontier"]

MOST_POINTS = 240
SMOOTHED_OVER = 25
"""The best update is taken from means over one part in this many of the run: one lucky update is not an optimum."""


@dataclass(frozen=True)
class FrontierPoint:
    """A policy during training, scored by judges that training never uses.

    Attributes:
        update: The last update of this policy.
        kl: KL to the reference, nats per response.
        proxy: Mean score of the reward that is trained on.
        judges: Mean score by judge.
        low: Lower confidence limit by judge.
        high: Upper confidence limit by judge.
    """

    update: int
    kl: float
    proxy: float
    judges: Mapping[str, float]
    low: Mapping[str, float]
    high: Mapping[str, float]


def frontier(record: RunRecord, points: Sequence[FrontierPoint] = ()) -> dict[str, Any]:
    """Proxy and judges of a run over √KL.

    Args:
        record: The run, whose reward terms of weight 0 are judges.
        points: Values of judges outside the run, used instead of the run's own.

    Returns:
        Columns `update`, `root_kl`, `proxy`; `judges`, each with its `values`, limits if known, and the index `best`.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    found = points or _points_of_updates(record)
    if not found:
        return {"empty": _why_empty(record)}
    names = list(found[0].judges)
    return {
        "update": [each.update for each in found],
        "root_kl": rounded([math.sqrt(max(0.0, each.kl)) for each in found]),
        "proxy": rounded([each.proxy for each in found]),
        "judges": [_judge(name, found, smooth=not points) for name in names],
    }


def _points_of_updates(record: RunRecord) -> list[FrontierPoint]:
    judged = record.judges
    wanted = ("objective/kl", "reward/score_mean", *judged)
    rows = [row for row in record.metrics if all(as_number(row.get(name)) is not None for name in wanted)]
    parts = [[rows[index] for index in block] for block in blocks(len(rows), MOST_POINTS)]
    return [
        FrontierPoint(
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


def _judge(name: str, found: Sequence[FrontierPoint], *, smooth: bool) -> dict[str, Any]:
    values = [each.judges[name] for each in found]
    # An update has few responses, so its neighbors are averaged in; the demo's points have many responses each.
    reach = len(values) // (2 * SMOOTHED_OVER) if smooth else 0
    means = [mean_of(values[max(0, index - reach) : index + reach + 1]) for index in range(len(values))]
    best = max(range(len(means)), key=lambda index: means[index])
    limits = {
        side: rounded([getattr(each, side)[name] for each in found])
        for side in ("low", "high")
        if all(name in getattr(each, side) for each in found)
    }
    return {"name": name, "values": rounded(values), "best": best, **limits}


def _why_empty(record: RunRecord) -> str:
    if record.stage != "ppo":
        return ""
    if any("reward/score_mean" in row for row in record.metrics):
        return "The KL was not measured: ppo.measure_kl=true measures it without adding it to the reward."
    return "No scores yet."
