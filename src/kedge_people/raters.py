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
(EM over quadrature nodes); Louis 1982 (standard errors).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from kedge_base.intervals import Interval
from kedge_people.agreement import Comparison
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

MOST_ROUNDS = 300
CLOSE = 1e-5
"""Maximum rounds of EM, and the largest move of a parameter at which it ends."""

LARGEST_STEP = 1.0
"""Largest change of a parameter in one round."""

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

    @cached_property
    def by_person(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per person, units, choices, and factors of all parameters `[rating, node, category, parameter]`."""
        values = np.multiply.outer(NODES, self.steps)[None, :, :, None]
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for mine in (self.people == person for person in range(1 + self.people.max())):
            terms = np.repeat(self.terms[mine][:, None], len(NODES), 1)
            factors = np.concatenate([np.repeat(values, len(terms), 0), terms], -1)
            found.append((self.units[mine], self.chosen[mine], factors))
        return found


def log_posterior(ratings: Ratings, prior: np.ndarray, parameters: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the log posterior density of all parameters, and each unit's distribution over the nodes.

    Args:
        ratings: The ratings.
        prior: `[parameter, (mean, deviation)]`.
        parameters: `[person, parameter]`.
    """
    logs = np.tile(np.log(WEIGHTS), (1 + ratings.units.max(), 1))
    for (units, chosen, factors), mine in zip(ratings.by_person, parameters, strict=True):
        np.add.at(logs, units, _chosen(np.log(_probabilities(factors @ mine + ratings.offsets)), chosen))
    most = logs.max(1, keepdims=True)
    density = np.exp(logs - most)
    total = density.sum(1, keepdims=True)
    known = (most + np.log(total)).sum() - (((parameters - prior[:, 0]) / prior[:, 1]) ** 2).sum() / 2
    return float(known), density / total


def fit_raters(ratings: Ratings, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the parameters with the largest posterior density, and their standard errors.

    A standard error takes the other people's parameters as given.

    Args:
        ratings: The ratings.
        prior: `[parameter, (mean, deviation)]`.

    Returns:
        Two arrays `[person, parameter]`.
    """
    parameters = np.tile(prior[:, 0], (len(ratings.by_person), 1))
    errors = np.zeros_like(parameters)
    moved = math.inf
    for left in reversed(range(MOST_ROUNDS)):
        is_last = moved < CLOSE or not left
        _, density = log_posterior(ratings, prior, parameters)
        moved = 0.0
        for person, (units, chosen, factors) in enumerate(ratings.by_person):
            weights = density[units]
            likely = _probabilities(factors @ parameters[person] + ratings.offsets)
            expected = (likely[..., None, :] @ factors)[..., 0, :]
            scores = _chosen(np.swapaxes(factors, 2, 3), chosen) - expected
            gradient = np.einsum("rk,rkp->p", weights, scores) - (parameters[person] - prior[:, 0]) / prior[:, 1] ** 2
            curvature = _crossed(weights[..., None] * likely, factors) - _crossed(weights, expected)
            curvature += np.diag(prior[:, 1] ** -2.0)
            step = np.clip(np.linalg.solve(curvature, gradient), -LARGEST_STEP, LARGEST_STEP)
            parameters[person] += step
            moved = max(moved, float(abs(step).max()))
            if is_last:
                means = (weights[:, None] @ scores)[:, 0]
                unknown = _crossed(weights, scores) - means.T @ means
                errors[person] = np.sqrt(np.maximum(np.diag(np.linalg.inv(curvature - unknown)), 0.0))
        if is_last:
            break
    return parameters, errors


def _crossed(weights: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Sum of the outer products of the vectors in the last axis, weighted."""
    rows = vectors.reshape(-1, vectors.shape[-1])
    return (rows * weights.reshape(-1, 1)).T @ rows


@dataclass(frozen=True)
class Comparer:
    """How a person compares.

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
    _, density = log_posterior(ratings, COMPARING, found)

    def comparer(at: int) -> Comparer:
        known = [_log_likelihood(ratings, at, density, found[at], factor * typical) for factor in (1, 0, -1)]
        accuracy = _interval(found[at, 0], errors[at, 0], _accuracy)
        return Comparer(accuracy, found[at], scale, known[1] - known[0], known[2] - known[0])

    return {person: comparer(at) for person, at in people.items()}


def _log_likelihood(
    ratings: Ratings, person: int, density: np.ndarray, parameters: np.ndarray, discrimination: float
) -> float:
    """Log probability of a person's answers for another discrimination, given everybody else's answers."""
    units, chosen, factors = ratings.by_person[person]
    alone = np.ones((len(density), len(NODES)))
    new = alone.copy()
    np.multiply.at(alone, units, _chosen(_probabilities(factors @ parameters), chosen))
    np.multiply.at(new, units, _chosen(_probabilities(factors @ [discrimination, *parameters[1:]]), chosen))
    others = density / alone
    return float(np.log((others * new).sum(1) / others.sum(1)).sum())


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
            rows = [((item, at), person, grade) for at, grade in enumerate(given) if grade is not None]
            grades.setdefault(axis, []).extend(rows)
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


def _chosen(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Pick the chosen category of each rating from the last axis."""
    return np.take_along_axis(values, chosen.reshape(-1, *[1] * (values.ndim - 1)), -1)[..., 0]
