"""Agreement between people, and of a person with themselves: share, Cohen's κ and Krippendorff's α, with intervals.

An answer is split into one outcome per pair of responses: the first is better, both are equal, or the second is better.
"All bad" is a tie of all. Each figure is computed from a sum of tables over items; its interval resamples items.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np

from kedge_base.intervals import Interval, resampled_interval
from kedge_people.labels import Answer, Labels

Answers: TypeAlias = Mapping[str, Mapping[str, Answer]]
"""People's answers, by person and item."""

Tables: TypeAlias = dict[str, np.ndarray]
"""By item, the number of pairs of responses by the outcomes of one person (rows) and another (columns)."""

RESAMPLES = 1000
"""Resamples of the items behind an interval."""


@dataclass(frozen=True)
class Comparison:
    """A person's outcome for two responses of an item, `i` before `j`.

    Attributes:
        person: Who compared.
        unit: The item's id, and the places of both responses.
        outcome: 1 if `i` is better, 0 for a tie, −1 if `j` is better.
        position: 1 if `i` was shown before `j`, else −1.
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
            lengths = [len(text) for text in labels.items[name].responses]
            for (i, j), outcome in outcomes(answer).items():
                position = 1 if answer.order.index(i) < answer.order.index(j) else -1
                found.append(Comparison(person, (name, i, j), outcome, position, lengths[i] - lengths[j]))
    return found


def by_unit(comparisons: Iterable[Comparison]) -> dict[tuple[str, int, int], list[Comparison]]:
    """Group comparisons by the responses compared."""
    units: dict[tuple[str, int, int], list[Comparison]] = {}
    for each in comparisons:
        units.setdefault(each.unit, []).append(each)
    return units


def cohens_kappa(tables: np.ndarray) -> np.ndarray:
    """Agreement beyond chance of two raters: κ = (p_o − p_e)/(1 − p_e).

    Args:
        tables: `[…, category, category]`: the number of units by the categories that both raters chose.

    Returns:
        `[…]`; NaN if both always use one and the same category.

    Source: Cohen 1960.
    """
    shares = tables / tables.sum((-2, -1), keepdims=True)
    observed = np.trace(shares, axis1=-2, axis2=-1)
    expected = (shares.sum(-1) * shares.sum(-2)).sum(-1)
    return _ratio(observed - expected, 1 - expected)


def krippendorffs_alpha(coincidences: np.ndarray, *, ordinal: bool = False) -> np.ndarray:
    """Agreement beyond chance of any number of raters who need not have rated everything.

    α = 1 − (n − 1)·Σ o_ck·δ²_ck / Σ n_c·n_k·δ²_ck,   n_c = Σ_k o_ck,   n = Σ n_c

    Nominal: δ_ck = 1 if c ≠ k. Ordinal: δ_ck is the number of values from c to k, with half of those equal to c and k.

    The only library for it, `krippendorff`, is under the GPL.

    Args:
        coincidences: `[…, value, value]`; see `coincidences_of`. Values are in ascending order.
        ordinal: True for ranks and grades.

    Returns:
        `[…]`; NaN if all values are the same.

    Source: Krippendorff 2011, Computing Krippendorff's alpha-reliability.
    """
    counts = coincidences.sum(-1)
    places = counts.cumsum(-1) - counts / 2 if ordinal else np.arange(counts.shape[-1])
    apart = places[..., :, None] - places[..., None, :]
    squared = apart**2 if ordinal else (apart != 0) * 1.0
    observed = (coincidences * squared).sum((-2, -1))
    expected = (counts[..., :, None] * counts[..., None, :] * squared).sum((-2, -1))
    return 1 - _ratio((counts.sum(-1) - 1) * observed, expected)


def coincidences_of(values: Sequence[int], size: int) -> np.ndarray:
    """Return the matrix `[size, size]` of the pairs of values that a unit got, each counted 1/(m − 1) of m values."""
    counts = np.bincount(values, minlength=size).astype(float)
    return (np.outer(counts, counts) - np.diag(counts)) / max(len(values) - 1, 1)


def share_alike(tables: np.ndarray) -> np.ndarray:
    """Share of the units `[…, category, category]` on which two raters chose the same category."""
    return _ratio(np.trace(tables, axis1=-2, axis2=-1), tables.sum((-2, -1)))


def interval_over(
    tables: Iterable[np.ndarray], figure: Callable[[np.ndarray], np.ndarray], *, least: float = 0.0
) -> Interval | None:
    """A figure of a sum of tables, one per item, with an interval from resampling the items.

    Args:
        tables: A table per item.
        figure: Computes the figure of each of several tables.
        least: The lowest possible value; the largest is 1.

    Returns:
        None if the figure cannot be computed.
    """
    stacked = np.array([*tables])
    size = len(stacked)
    if not size or math.isnan(value := float(figure(stacked.sum(0)))):
        return None
    drawn = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), RESAMPLES)
    return resampled_interval(value, figure(np.tensordot(drawn, stacked, 1)).tolist(), size, bounds=(least, 1.0))


def tables_between(comparisons: Iterable[Comparison]) -> dict[tuple[str, str], Tables]:
    """Return the tables of each two people, in the order of the comparisons, who compared the same responses."""
    found: dict[tuple[str, str], Tables] = defaultdict(lambda: defaultdict(lambda: np.zeros((3, 3))))
    for (item, _, _), each in sorted(by_unit(comparisons).items()):
        for one, other in combinations(each, 2):
            found[one.person, other.person][item][one.outcome + 1, other.outcome + 1] += 1
    return found


def table_of_repeat(first: Answer, again: Answer) -> np.ndarray:
    """Return the table of a person's outcomes in a first answer (rows) and in a repeat."""
    table = np.zeros((3, 3))
    for one, other in zip(outcomes(first).values(), outcomes(again).values(), strict=True):
        table[one + 1, other + 1] += 1
    return table


def summed(tables: Iterable[Tables]) -> list[np.ndarray]:
    """Add up the tables of each item."""
    found: dict[str, np.ndarray] = {}
    for by_item in tables:
        for item, table in by_item.items():
            found[item] = found.get(item, 0.0) + table
    return [*found.values()]


def alpha_of_choices(comparisons: Iterable[Comparison]) -> Interval | None:
    """Krippendorff's nominal α of all people's outcomes."""
    return _alpha(
        ((item, [each.outcome for each in unit]) for (item, _, _), unit in by_unit(comparisons).items()), ordinal=False
    )


def alpha_of_ranks(answers: Answers) -> Interval | None:
    """Krippendorff's ordinal α of all people's ranks in items with three or more responses."""
    ranks: dict[str, list[Sequence[float]]] = {}
    for by_item in answers.values():
        for item, answer in by_item.items():
            if len(answer.ranks) > 2:
                ranks.setdefault(item, []).append(answer.ranks)
    return _alpha(((item, unit) for item, each in ranks.items() for unit in zip(*each, strict=True)), ordinal=True)


def _alpha(units: Iterable[tuple[str, Sequence[float]]], *, ordinal: bool) -> Interval | None:
    rated = [(item, values) for item, values in units if len(values) > 1]
    known = sorted({value for _, values in rated for value in values})
    tables = ({item: coincidences_of([known.index(each) for each in values], len(known))} for item, values in rated)
    return interval_over(summed(tables), lambda table: krippendorffs_alpha(table, ordinal=ordinal), least=-1.0)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, math.nan)
