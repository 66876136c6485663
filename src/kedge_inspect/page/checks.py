"""Shows measurements outside of training: judges over the KL, held-out prompts, and checks of the critic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kedge_base.texts import counted
from kedge_inspect.page.changes import figure
from kedge_inspect.page.looks import has_part
from kedge_inspect.page.numbers import (
    as_number,
    blocks,
    evenly_spaced,
    fitting,
    rounded,
    shortened,
)
from kedge_inspect.page.responses import reasons
from kedge_inspect.page.sentences import before_and_after, moment, paired_responses
from kedge_inspect.record import RunRecord
from kedge_inspect.resolved import critic_of, learns_from_teacher, privileged_of

MOST_POINTS = 240
SMOOTHED_OVER = 25
"""The best update is determined from means over 1/`SMOOTHED_OVER` of the run: one lucky update is not an optimum."""


@dataclass(frozen=True)
class FrontierPoint:
    """A policy during training, scored by judges that training never uses.

    Attributes:
        update: The last update of this policy.
        kl: KL to the reference, nats per response.
        proxy: Mean score of the reward that is trained on.
        judges: By judge, its mean score as `value`, and the limits `low` and `high` of its interval if they are known.
    """

    update: int
    kl: float
    proxy: float
    judges: Mapping[str, Mapping[str, float]]


def frontier(record: RunRecord, points: Sequence[FrontierPoint] = ()) -> dict[str, Any]:
    """Proxy and judges of a run over √KL.

    Args:
        record: The run; its reward terms of weight 0 are judges.
        points: Values of judges outside the run, which replace the run's own.

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
    return [
        FrontierPoint(
            update=int(part[-1]["update"]),
            kl=_mean(part, "objective/kl"),
            proxy=_mean(part, "reward/score_mean"),
            judges={name.removeprefix("score/"): {"value": _mean(part, name)} for name in judged},
        )
        for part in blocks(rows, MOST_POINTS)
    ]


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(row[name] for row in rows)


def _judge(name: str, found: Sequence[FrontierPoint], *, smooth: bool) -> dict[str, Any]:
    columns = {key: [each.judges[name][key] for each in found] for key in found[0].judges[name]}
    values = columns.pop("value")
    # An update has few responses, so its neighbors are averaged in; the demo's points have many responses each.
    reach = len(values) // (2 * SMOOTHED_OVER) if smooth else 0
    means = [fmean(values[max(0, index - reach) : index + reach + 1]) for index in range(len(values))]
    best = max(range(len(means)), key=lambda index: means[index])
    return {"name": name, "values": rounded(values), "best": best, **rounded(columns)}


def _why_empty(record: RunRecord) -> str:
    if not has_part(record, "frontier") or learns_from_teacher(record):
        return ""
    if any("reward/score_mean" in row for row in record.metrics):
        return "The KL was not measured: ppo.measure_kl=true measures it without adding it to the reward."
    return "No scores yet."


MOST_ROWS = 40
COLUMNS = {
    "eval/score": "score",
    "eval/win_rate": "win rate",
    "eval/kl": "KL",
    "eval/length": "length",
    "eval/eos_rate": "EOS rate",
}
MOST_PAIR_BYTES = 500_000


def held_out(record: RunRecord) -> dict[str, Any]:
    """A row per evaluation; of a long run evenly spaced ones, always including the best.

    `pairs` holds the responses of the first and of the last evaluation, at the times `ends`, side by side: evenly
    spaced ones, if there are too many for the page. Without an evaluation, `empty` is the reason.
    """
    rows = record.evaluations
    if not rows:
        return {"empty": "Set ppo.eval_every to evaluate on held-out prompts." if has_part(record, "held_out") else ""}
    best = record.best or _best(rows)
    metrics = {metric: label for metric, label in COLUMNS.items() if any(metric in row for row in rows)}
    decisive = str(best.get("metric", ""))
    if decisive.startswith("eval/") and decisive not in COLUMNS:
        metrics[decisive] = decisive.removeprefix("eval/")
    spaced = set(evenly_spaced(range(len(rows)), MOST_ROWS))
    shown = [row for at, row in enumerate(rows) if at in spaced or row["update"] == best.get("update")]
    pairs = _pairs(record)
    return {
        "sentence": " ".join([*before_and_after(record), *_sentence(record, best)]),
        "left_out": len(rows) - len(shown),
        "pairs": fitting(pairs, MOST_PAIR_BYTES),
        "ends": [moment(rows[at]["update"]) for at in (0, -1)],
        "num_pairs": len(pairs),
        "columns": [{"label": label, "is_share": metric.endswith("_rate")} for metric, label in metrics.items()],
        "rows": [
            {
                "update": row["update"],
                "is_best": row["update"] == best.get("update"),
                "values": rounded([as_number(row.get(metric)) for metric in metrics]),
            }
            for row in shown
        ],
    }


def _pairs(record: RunRecord) -> list[dict[str, Any]]:
    """The responses of the first and of the last evaluation to each prompt, with their scores and lengths."""
    return [
        {"prompt": shortened(str(after["prompt"])), "before": _side(before), "after": _side(after)}
        for before, after in paired_responses(record)
    ]


def _side(response: Mapping[str, Any]) -> dict[str, Any]:
    figures = rounded({name: as_number(response[name]) for name in ("score", "length")})
    return {"text": shortened(str(response["completion"])), **figures, **reasons(response)}


def _best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The best evaluation of a run that marks none, by win rate or else by score; the first of equal ones."""
    metric = next((name for name in ("eval/win_rate", "eval/score") if any(name in row for row in rows)), "")
    valued = [(value, row) for row in rows if (value := as_number(row.get(metric))) is not None]
    if not valued:
        return {}
    value, row = max(valued, key=lambda each: each[0])
    return {"update": row["update"], "metric": metric, "value": value}


def _sentence(record: RunRecord, best: Mapping[str, Any]) -> list[str]:
    value = as_number(best.get("value"))
    if value is None:
        return []
    kept = f"is kept: {record.folder.name}@best is its model" if record.is_best_kept else "is not kept"
    return [f"The best {best['metric']} is {figure(value)}, {moment(best['update'])}. The checkpoint {kept}."]


CRITIC_MOST_ROWS = 12
CRITIC_MOST_POINTS = 300
FIGURES = (
    ("Ordered pairs, different prompts", "pairs_across", "prompt_pairs_across", "ceiling_across", 0.5),
    ("Ordered pairs, same prompt", "pairs_within", None, "ceiling_within", 0.5),
    ("Explained variance", "explained_variance", "prompt_explained_variance", "ceiling_explained", 0.0),
    ("Rank correlation", "rank_correlation", None, None, 0.0),
    ("Rank correlation, same prompt", "rank_correlation_within", None, None, 0.0),
)
"""Label; the figures of the critic, of the prompt's mean return and of a perfect critic; chance."""


def critic(record: RunRecord) -> dict[str, Any]:
    """The last check in detail, and the ordered pairs of all of them.

    Returns:
        `sentence`; `figures`, each with `critic` and `prompt_mean` as intervals, `ceiling` and `chance`; `bins` and
        `points` of the calibration; `rows`, a line per check, evenly spaced ones of very many. Without
        a check, `empty` is the reason.
    """
    checks = record.critic_checks
    if not checks:
        is_possible = has_part(record, "critic") and critic_of(record) != "none"
        return {"empty": "Set ppo.critic_check to check the critic." if is_possible else ""}
    last = checks[-1]
    points = evenly_spaced(last["prefixes"], CRITIC_MOST_POINTS)
    return {
        "sentence": _critic_sentence(last, _place(record, last))
        + (f" The critic also reads {read}, which the policy does not." if (read := privileged_of(record)) else ""),
        "figures": [
            {
                "label": label,
                "critic": _interval(last, own),
                "prompt_mean": None if other is None else _interval(last, other),
                "ceiling": None if ceiling is None else rounded(as_number(last.get(ceiling))),
                "chance": chance,
            }
            for label, own, other, ceiling, chance in FIGURES
        ],
        "bins": rounded([{**each["returns"], "at": each["value"], "count": each["count"]} for each in last["bins"]]),
        "points": rounded([[each["value"], each["returns"]] for each in points], 4),
        "rows": [
            {"update": check["update"], "values": [_interval(check, own) for _, own, *_ in FIGURES[:3]]}
            for check in evenly_spaced(checks, CRITIC_MOST_ROWS)
        ]
        if len(checks) > 1
        else [],
    }


def _place(record: RunRecord, check: Mapping[str, Any]) -> str:
    """Describe the time of a check: its update, or nothing outside a PPO run."""
    if check["update"]:
        return f", after update {check['update']:,}"
    return ", before the first update" if has_part(record, "critic") else ""


def _critic_sentence(check: Mapping[str, Any], place: str) -> str:
    """Sentences on the size of the check, and on the better baseline: the critic or the prompt's mean return."""
    gain = _interval(check, "gain")
    if gain is None or gain["low"] is None:  # a single prompt gives no interval
        verdict = ""
    elif gain["low"] > 0:
        verdict = " The critic explains more of the returns than the prompt's mean return does."
    elif gain["high"] < 0:
        verdict = " The prompt's mean return explains more of the returns than the critic does."
    else:
        verdict = " The check does not tell the critic from the prompt's mean return."
    return (
        f"{counted(check['num_prefixes'], 'prefix')} of responses to {counted(check['num_prompts'], 'prompt')}, about "
        f"{check['num_continuations']:.3g} continuations of each{place}.{verdict}"
    )


def _interval(check: Mapping[str, Any], name: str) -> dict[str, float] | None:
    value = check.get(name)
    return rounded(dict(value)) if isinstance(value, Mapping) else None
