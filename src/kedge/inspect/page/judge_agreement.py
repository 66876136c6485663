"""How far judges agree that judged the same pairs in several evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from kedge.inspect.page.numbers import rounded
from kedge.inspect.record import RunRecord

__all__ = ["judge_agreement"]

OUTCOMES = ("model", "tie", "against")


def judge_agreement(records: Mapping[str, RunRecord]) -> list[dict[str, Any]]:
    """For every two evaluations with pairs in common: how many, how many with the same outcome, and Cohen's κ.

    κ = (p_o − p_e) / (1 − p_e), with p_o the share of equal outcomes and p_e the share expected of independent judges
    with the same frequencies of won, tied and lost; null if both judges always decide alike.

    Args:
        records: Runs by name; those that are not evaluations are left out.

    Source: Cohen 1960, A coefficient of agreement for nominal scales, eq. 1.
    """
    outcomes = {name: _outcomes(record) for name, record in records.items() if record.stage == "evaluate"}
    found = []
    for one, other in itertools.combinations(outcomes, 2):
        pairs = [(outcomes[one][key], outcomes[other][key]) for key in outcomes[one] if key in outcomes[other]]
        if pairs:
            judges = [str(records[name].summary.get("judge", "")) for name in (one, other)]
            same = sum(first == second for first, second in pairs)
            found.append({"runs": [one, other], "judges": judges, "pairs": len(pairs), "same": same,
                          "kappa": rounded(_kappa(pairs))})  # fmt: skip
    return found


def _outcomes(record: RunRecord) -> dict[tuple[str, str, str], str]:
    """The winner of each decided pair, by its texts."""
    texts = ("prompt", "completion", "completion_against")
    return {
        (str(row.get(texts[0])), str(row.get(texts[1])), str(row.get(texts[2]))): row["winner"]
        for row in record.results
        if row.get("winner") in OUTCOMES
    }


def _kappa(pairs: list[tuple[str, str]]) -> float | None:
    count = len(pairs)
    observed = sum(first == second for first, second in pairs) / count
    expected = sum(
        sum(first == outcome for first, _ in pairs) * sum(second == outcome for _, second in pairs) / count**2
        for outcome in OUTCOMES
    )
    return None if expected >= 1 else (observed - expected) / (1 - expected)
