"""Agreement between people: share, Cohen's κ and Krippendorff's α, with intervals.

An answer is split into one outcome per pair of responses: the first is better, both are equal, or the second is better.
"All bad" is a tie of all. Each figure is computed from tables, one per item.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np

from kedge_base.intervals import Interval, share_interval
from kedge_people.labels import Answer, Labels

Answers: TypeAlias = Mapping[str, Mapping[str, Answer]]
"""People's answers, by person and item."""

Tables: TypeAlias = dict[str, np.ndarray]
"""By item, the number of pairs of responses by the outcomes of one person (rows) and another (columns)."""


@dataclass(frozen=True)
class Comparison:
    """A person's outcome for two responses of an item, `i` before `j`.

    Attributes:
        person: Who compared.
        unit: The item's id, and the places of both responses.
        outcome: 1 if `i` is better, 0 for a tie, −1 if `j` is better.
        position: 1 if `i` was shown before `j`, else −1; 0 if their texts are equal.
        longer: How many characters more `i` has; languages without spaces have no words to count.
    """

    person: str
    unit: tuple[str, int, int]
    outcome: int
    position: int
    longer: int


def judgments(labels: Labels) -> tuple[Answers, list[tuple[Answer, Answer]]]:
    """Return the first answers that compare two or more responses, and each repeat after its first answer."""
    first: dict[str, dict[str, Answer]] = {}
    repeats: list[tuple[Answer, Answer]] = []
    for answer in labels.answers:
        if answer.verdict != "skipped" and len(answer.order) > 1:
            known = first.setdefault(answer.person, {}).setdefault(answer.item, answer)
            if known is not answer:
                repeats.append((known, answer))
    return dict(sorted(first.items())), repeats


def outcomes(answer: Answer) -> dict[tuple[int, int], int]:
    """Return an answer's outcome for each pair of responses; see `Comparison`."""
    ranks = answer.ranks if answer.verdict == "ranked" else (1,) * len(answer.order)
    return {(i, j): (ranks[i] < ranks[j]) - (ranks[i] > ranks[j]) for i, j in combinations(range(len(ranks)), 2)}


def comparisons_in(labels: Labels, answers: Answers) -> list[Comparison]:
    """Split answers into comparisons of two responses."""
    found: list[Comparison] = []
    for person, by_item in answers.items():
        for name, answer in by_item.items():
            texts = labels.items[name].responses
            for (i, j), outcome in outcomes(answer).items():
                is_before = answer.order.index(i) < answer.order.index(j)
                position = 0 if texts[i] == texts[j] else 1 if is_before else -1
                found.append(Comparison(person, (name, i, j), outcome, position, len(texts[i]) - len(texts[j])))
    return found


def by_unit(comparisons: Iterable[Comparison]) -> dict[tuple[str, int, int], list[Comparison]]:
    """Group comparisons by the responses compared."""
    units: dict[tuple[str, int, int], list[Comparison]] = {}
    for each in comparisons:
        units.setdefault(each.unit, []).append(each)
    return units


def share_of(values: Sequence[float]) -> Interval | None:
    """Return the mean of shares with its interval; None without any."""
    return share_interval(values) if values else None


def alike(tables: Iterable[np.ndarray]) -> list[float]:
    """Return each table's share of pairs for which both outcomes are the same."""
    return [float(np.trace(table) / table.sum()) for table in tables]


def cohens_kappa(tables: Sequence[np.ndarray]) -> Interval | None:
    """Agreement beyond chance of two raters: κ = (p_o − p_e)/(1 − p_e).

    Args:
        tables: `[category, category]` per item: the number of units by the categories that both raters chose.

    Returns:
        None if both always use one and the same category.

    Source: Cohen 1960, whose standard error also takes p_e as known.
    """
    total = np.sum(tables, 0)
    return _beyond_chance(tables, float(total.sum(0) @ total.sum(1) / total.sum() ** 2))


def krippendorffs_alpha(coincidences: Sequence[np.ndarray]) -> Interval | None:
    """Agreement beyond chance of any number of raters who need not have rated everything.

    α = (A_o − A_e)/(1 − A_e),   A_o = Σ o_cc/n,   A_e = Σ n_c·(n_c − 1)/(n·(n − 1)),   n_c = Σ_k o_ck,   n = Σ n_c

    The only library for it, `krippendorff`, is under the GPL.

    Args:
        coincidences: `[category, category]` per item; see `coincidences_of`.

    Returns:
        None without items, or if all values are the same.

    Source: Krippendorff 2011, Computing Krippendorff's alpha-reliability, nominal data.
    """
    if not coincidences:
        return None
    counts = np.sum(coincidences, (0, 1))
    total = counts.sum()
    return _beyond_chance(coincidences, float(counts @ (counts - 1) / (total * (total - 1))))


def _beyond_chance(tables: Sequence[np.ndarray], chance: float) -> Interval | None:
    """Correct the agreement over all tables, and the ends of its interval over items, for what chance would give."""
    if chance >= 1:
        return None
    share = share_interval(alike(tables))
    apart = alike([np.sum(tables, 0)])[0] - share.value  # items may have different weights
    low, value, high = (
        min(max((end + apart - chance) / (1 - chance), -1.0), 1.0) for end in (share.low, share.value, share.high)
    )
    return Interval(value, low, high)


def coincidences_of(values: Sequence[int], size: int) -> np.ndarray:
    """Return the matrix `[size, size]` of the pairs of values that a unit got, each counted 1/(m − 1) of m values."""
    counts = np.bincount(values, minlength=size).astype(float)
    return (np.outer(counts, counts) - np.diag(counts)) / (len(values) - 1)


def tables_between(comparisons: Iterable[Comparison]) -> dict[tuple[str, str], Tables]:
    """Return the tables of every two people who compared the same responses, in the order of the comparisons."""
    found: dict[tuple[str, str], Tables] = defaultdict(lambda: defaultdict(lambda: np.zeros((3, 3))))
    for (item, _, _), each in sorted(by_unit(comparisons).items()):
        for one, other in combinations(each, 2):
            found[one.person, other.person][item][one.outcome + 1, other.outcome + 1] += 1
    return found


def summed(tables: Iterable[Tables]) -> list[np.ndarray]:
    """Add up the tables of each item."""
    found: dict[str, np.ndarray] = {}
    for by_item in tables:
        for item, table in by_item.items():
            found[item] = found.get(item, 0.0) + table
    return [*found.values()]


def alpha_of_choices(comparisons: Iterable[Comparison]) -> Interval | None:
    """Krippendorff's α of all people's outcomes."""
    found: Tables = defaultdict(lambda: np.zeros((3, 3)))
    for (item, _, _), unit in by_unit(comparisons).items():
        if len(unit) > 1:
            found[item] += coincidences_of([each.outcome + 1 for each in unit], 3)
    return krippendorffs_alpha([*found.values()])
