"""The checks of the critic on the page: its order and error beside a group baseline's, and its calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.inspect.page.numbers import as_number, evenly_spaced, rounded
from kedge.inspect.record import RunRecord
from kedge.inspect.resolved import critic_of

__all__ = ["critic"]

MOST_ROWS = 12
MOST_POINTS = 300
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
        `points` of the calibration; `rows`, a line per check, evenly spaced ones of very many. `empty` is the reason if
        there is none.
    """
    checks = record.critic_checks
    if not checks:
        is_possible = record.stage == "ppo" and critic_of(record) != "none"
        return {"empty": "Set ppo.critic_check to check the critic." if is_possible else ""}
    last = checks[-1]
    points = [last["prefixes"][at] for at in evenly_spaced(len(last["prefixes"]), MOST_POINTS)]
    return {
        "sentence": _sentence(last, _place(record, last)),
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
            {"update": checks[at]["update"], "values": [_interval(checks[at], own) for _, own, *_ in FIGURES[:3]]}
            for at in evenly_spaced(len(checks), MOST_ROWS)
        ]
        if len(checks) > 1
        else [],
    }


def _place(record: RunRecord, check: Mapping[str, Any]) -> str:
    """When the critic was checked; a critic that is no run of PPO's has no update."""
    if check["update"]:
        return f", after update {check['update']:,}"
    return ", before the first update" if record.stage == "ppo" else ""


def _sentence(check: Mapping[str, Any], place: str) -> str:
    """What was compared, and whether the critic is the better baseline."""
    gain = _interval(check, "gain")
    verdict = ""
    if gain is not None and gain["low"] is None:
        gain = None  # of a single prompt
    if gain is not None and gain["low"] > 0:
        verdict = " The critic explains more of the returns than the prompt's mean return does."
    elif gain is not None and gain["high"] < 0:
        verdict = " The prompt's mean return explains more of the returns than the critic does."
    elif gain is not None:
        verdict = " The check does not tell the critic from the prompt's mean return."
    return (
        f"{check['num_prefixes']:,} prefixes of responses to {check['num_prompts']:,} prompts, about "
        f"{check['num_continuations']:.3g} continuations of each{place}.{verdict}"
    )


def _interval(check: Mapping[str, Any], name: str) -> dict[str, float] | None:
    value = check.get(name)
    return rounded(dict(value)) if isinstance(value, Mapping) else None
