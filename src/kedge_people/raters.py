"""A joint model of the raters: how well each tells responses apart, and their position bias, length bias and severity.

A unit has an unknown value x ~ N(0, 1): how much better the first response of a pair is, or how good a response is.
Each person has parameters of their own:

    comparisons   P(y) ∝ exp(y·d/2 + t·[y = 0]),   d = a·x + b·position + c·length,   y = 1, 0 (tie), −1
    grades        P(y) ∝ f_y·exp(y·(a·x − s) − r·y²),   y: steps above the middle grade, f_y: its share among all grades

a: discrimination, negative for a reversed scale; b, c: log odds for the response shown first, and for the longer one;
t: log weight of ties; s: severity; r: preference for middle grades. The values x are integrated out by quadrature, so
that an answer that nobody else gave says nothing about how reliable a person is. The priors, which two people need,
are those of `COMPARING` and `GRADING`.

Sources: Bradley and Terry 1952; Davidson 1970 (ties); Linacre 1989 (severity, many-facet Rasch); Bock and Aitkin 1981
(quadrature).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge_base.intervals import Interval
from kedge_people.agreement import Comparison
from kedge_people.fitting import fitted
from kedge_people.labels import Answer

COMPARING = np.array([(1.5, 1.0), (0.0, 1.0), (0.0, 1.0), (-1.5, 1.5)])
"""Prior mean and deviation of a, b, c and t. With a = 1.5, a person chooses the better response of 73 % of the
pairs, as often as two labelers of InstructGPT agree (Ouyang et al. 2022, section 3.4).
"""

GRADING = np.array([(1.0, 0.5), (0.0, 1.0), (0.0, 0.5)])
"""Prior mean and deviation of a, s and r."""

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""Quadrature of the standard normal distribution."""

TYPICAL = (0.5, 2.0)
"""Range of a of a typical person, which is the median of all people's."""

GRID = np.array([NormalDist().inv_cdf((place + 0.5) / 200) for place in range(200)])
"""Equally likely values of the standard normal distribution, for figures that depend on the sign of x."""

Z = 1.96


@dataclass(frozen=True)
class Ratings:
    """Choices among categories.

    Attributes:
        units: `[rating]`: what was rated.
        people: `[rating]`: by whom.
        chosen: `[rating]`: the category.
        steps: `[category]`: the factor of x.
        terms: `[rating, category, term]`: factors of the parameters after the first.
        offsets: `[category]`: log weights.
    """

    units: np.ndarray
    people: np.ndarray
    chosen: np.ndarray
    steps: np.ndarray
    terms: np.ndarray
    offsets: np.ndarray

    def log_likelihood(self, parameters: Tensor) -> Tensor:
        """Return the log probability of all ratings, with each unit's value integrated out.

        Args:
            parameters: `[person, parameter]`.
        """
        mine = parameters[torch.from_numpy(self.people)]
        shifts = torch.einsum("rct,rt->rc", torch.from_numpy(self.terms), mine[:, 1:]) + torch.from_numpy(self.offsets)
        values = mine[:, 0, None, None] * torch.from_numpy(np.multiply.outer(NODES, self.steps))
        likely = (values + shifts[:, None]).log_softmax(-1)
        chosen = likely.gather(-1, torch.from_numpy(self.chosen)[:, None, None].expand(-1, len(NODES), 1))[..., 0]
        start = torch.from_numpy(np.log(WEIGHTS)).repeat(1 + int(self.units.max()), 1)
        return start.index_add(0, torch.from_numpy(self.units), chosen).logsumexp(-1).sum()


def fit_raters(ratings: Ratings, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the parameters with the largest posterior density, and their standard errors.

    Args:
        ratings: The ratings.
        prior: `[parameter, (mean, deviation)]`.

    Returns:
        Two arrays `[person, parameter]`.
    """
    means, deviations = torch.from_numpy(prior).unbind(-1)

    def loss(parameters: Tensor) -> Tensor:
        return (((parameters - means) / deviations) ** 2).sum() / 2 - ratings.log_likelihood(parameters)

    found, covariance = fitted(loss, means.repeat(1 + int(ratings.people.max()), 1))
    with np.errstate(invalid="ignore"):  # two people who mirror each other may leave the fit at a saddle
        return found, np.sqrt(np.diag(covariance)).reshape(found.shape)


@dataclass(frozen=True)
class Comparer:
    """A person's fit in the model of comparisons.

    Attributes:
        accuracy: Share of the pairs in which they choose the better response, without their biases; ½ for a coin, less
            for a reversed scale.
        parameters: a, b, c, t.
        scale: Difference in characters that counts 1 before the tanh.
        log_coin: Log of how many times more likely the answers are for a person who does not tell responses apart than
            for a typical one, given everybody else's.
        log_reversed: The same for a person who chooses the worse response as often as a typical one the better.
    """

    accuracy: Interval
    parameters: np.ndarray
    scale: float
    log_coin: float
    log_reversed: float

    def evidence(self, comparison: Comparison) -> float:
        """Probability that the first response of a pair is the better one, given this person's comparison alone."""
        a, b, c, t = self.parameters
        half = (a * GRID + b * comparison.position + c * math.tanh(comparison.longer / self.scale)) / 2
        likely = _probabilities(np.stack([-half, np.full_like(half, t), half], -1))[:, comparison.outcome + 1]
        return float(likely[GRID > 0].sum() / likely.sum())


def fit_comparers(comparisons: Sequence[Comparison]) -> dict[str, Comparer]:
    """Fit the model of comparisons."""
    if not comparisons:
        return {}
    people = _numbered(each.person for each in comparisons)
    units = _numbered(each.unit for each in comparisons)
    scale = math.sqrt(fmean(each.longer**2 for each in comparisons)) or 1.0
    steps = np.array([-0.5, 0.0, 0.5])
    terms = np.zeros((len(comparisons), 3, 3))
    covariates = np.array([[each.position, math.tanh(each.longer / scale)] for each in comparisons])
    terms[:, :, :2] = steps[:, None] * covariates[:, None]
    terms[:, 1, 2] = 1.0
    columns = [(units[each.unit], people[each.person], each.outcome + 1) for each in comparisons]
    unit, person, chosen = np.array(columns).T
    ratings = Ratings(unit, person, chosen, steps, terms, np.zeros(3))
    found, errors = fit_raters(ratings, COMPARING)
    typical = np.clip(np.median(found[:, 0]), *TYPICAL)

    def likelihood(at: int, discrimination: float) -> float:
        changed = torch.from_numpy(found.copy())
        changed[at, 0] = discrimination
        return float(ratings.log_likelihood(changed))

    def comparer(at: int) -> Comparer:
        usual, coin, reversed_ = (likelihood(at, factor * typical) for factor in (1, 0, -1))
        accuracy = _interval(found[at, 0], errors[at, 0], _accuracy)
        return Comparer(accuracy, found[at], scale, coin - usual, reversed_ - usual)

    return {person: comparer(at) for person, at in people.items()}


def fit_severities(answers: Iterable[Answer]) -> dict[str, dict[str, Interval]]:
    """Fit the model of grades for each axis, from each person's first grades of an item.

    Returns:
        By axis and person, how far a person's grades are above those of an average one for the same response.
    """
    grades: dict[str, list[tuple[tuple[str, int], str, int]]] = {}
    first: dict[tuple[str, str], Answer] = {}
    for answer in answers:
        if answer.axes:
            first.setdefault((answer.person, answer.item), answer)
    for (person, item), answer in first.items():
        for axis, given in answer.axes.items():
            grades.setdefault(axis, []).extend(
                ((item, at), person, grade) for at, grade in enumerate(given) if grade is not None
            )
    return {axis: _severities(rows) for axis, rows in sorted(grades.items()) if rows}


def _severities(rows: Sequence[tuple[tuple[str, int], str, int]]) -> dict[str, Interval]:
    people = _numbered(person for _, person, _ in rows)
    units = _numbered(unit for unit, _, _ in rows)
    lowest = min(grade for _, _, grade in rows)
    unit, person, chosen = np.array([(units[unit], people[person], grade - lowest) for unit, person, grade in rows]).T
    counts = np.bincount(chosen) + 0.5
    steps = np.arange(len(counts)) - (len(counts) - 1) / 2
    terms = np.tile(np.stack([-steps, -(steps**2)], -1), (len(rows), 1, 1))
    offsets = np.log(counts / counts.sum())
    found, errors = fit_raters(Ratings(unit, person, chosen, steps, terms, offsets), GRADING)

    def mean(at: int, severity: float) -> float:
        potentials = np.multiply.outer(found[at, 0] * NODES - severity, steps) - found[at, 2] * steps**2 + offsets
        return float(WEIGHTS @ _probabilities(potentials) @ steps)

    return {
        name: _interval(found[at, 1], errors[at, 1], lambda value, at=at: mean(at, value) - mean(at, 0.0))
        for name, at in people.items()
    }


def _numbered(names: Iterable[Hashable]) -> dict[Any, int]:
    """Number the different names in order."""
    return {name: at for at, name in enumerate(dict.fromkeys(names))}


def _accuracy(discrimination: float) -> float:
    return float((1 / (1 + np.exp(-discrimination * abs(GRID)))).mean())


def _interval(value: float, error: float, figure: Callable[[float], float]) -> Interval:
    """A monotonic figure of a parameter, with its interval."""
    ends = sorted((figure(value - Z * error), figure(value + Z * error)))
    return Interval(figure(value), *ends)


def _probabilities(potentials: np.ndarray) -> np.ndarray:
    likely = np.exp(potentials - potentials.max(-1, keepdims=True))
    return likely / likely.sum(-1, keepdims=True)
