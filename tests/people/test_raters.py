"""The joint model of raters: slow sums, slopes of zero at the solution, and parameters that were simulated."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kedge_people.agreement import Comparison
from kedge_people.labels import Answer
from kedge_people.raters import (
    COMPARING,
    GRADING,
    NODES,
    WEIGHTS,
    Ratings,
    fit_comparers,
    fit_raters,
    fit_severities,
)
from kedge_people.report import _percent


def compare(person, unit, quality, rng, *, reliability=1.5, position=0.0, length=0.0, words=0, tie=-1.5):
    place = rng.choice((-1, 1))
    d = reliability * quality + position * place + length * math.tanh(words / 10)
    outcome = rng.choices((1, 0, -1), (math.exp(d / 2), math.exp(tie), math.exp(-d / 2)))[0]
    return Comparison(person, (str(unit), 0, 1), outcome, place, words)


def simulated(*, seed=0, num=150, **people):
    rng = random.Random(seed)
    units = [(rng.gauss(0, 1), round(rng.gauss(0, 10))) for _ in range(num)]
    return [
        compare(person, unit, quality, rng, words=words, **given)
        for person, given in people.items()
        for unit, (quality, words) in enumerate(units)
    ]


def ratings_of(rows, steps, *terms):
    unit, person, chosen = np.array(rows).T
    return Ratings(unit, person, chosen, np.array(steps), np.array(terms), np.zeros(len(steps)))


def log_posterior(ratings, prior, parameters):
    apart = (parameters - prior[:, 0]) / prior[:, 1]
    return float(ratings.log_likelihood(torch.from_numpy(parameters))) - (apart**2).sum() / 2


def test_the_likelihood_is_a_sum_over_units_and_nodes():
    rng = random.Random(3)
    rows = [(rng.randrange(4), rng.randrange(2), rng.randrange(3)) for _ in range(12)]
    terms = [[[rng.gauss(0, 1), rng.gauss(0, 1)] for _ in range(3)] for _ in rows]
    parameters = np.array([[1.2, -0.3, 0.5], [0.4, 0.7, -1.0]])
    slow = 0.0
    for unit in range(4):
        total = 0.0
        for node, weight in zip(NODES, WEIGHTS, strict=True):
            for (of, person, chosen), term in zip(rows, terms, strict=True):
                if of == unit:
                    a, *others = parameters[person]
                    logits = [
                        a * step * node + sum(p * t for p, t in zip(others, each, strict=True))
                        for step, each in zip((-0.5, 0, 0.5), term, strict=True)
                    ]
                    weight *= math.exp(logits[chosen]) / sum(map(math.exp, logits))
            total += weight
        slow += math.log(total)
    found = ratings_of(rows, (-0.5, 0, 0.5), *terms).log_likelihood(torch.from_numpy(parameters))
    assert float(found) == pytest.approx(slow, rel=1e-9)


@pytest.mark.parametrize("prior", [COMPARING[:3], GRADING])
def test_the_fit_is_where_the_slopes_are_zero(prior):
    rng = random.Random(6)
    rows = [(unit, person, rng.randrange(4)) for unit in range(15) for person in range(3) if rng.random() < 0.8]
    terms = [[[rng.gauss(0, 1), rng.gauss(0, 1)] for _ in range(4)] for _ in rows]
    ratings = ratings_of(rows, (-1.5, -0.5, 0.5, 1.5), *terms)
    found, errors = fit_raters(ratings, prior)
    size = found.size

    def density(*moves):
        moved = found.reshape(-1).copy()
        for at, by in moves:
            moved[at] += by
        return log_posterior(ratings, prior, moved.reshape(found.shape))

    curvature = np.zeros((size, size))
    for i in range(size):
        assert (density((i, 1e-4)) - density((i, -1e-4))) / 2e-4 == pytest.approx(0, abs=1e-3)
        for j in range(size):
            ends = [density((i, a * 1e-3), (j, b * 1e-3)) * a * b for a in (1, -1) for b in (1, -1)]
            curvature[i, j] = -sum(ends) / 4e-6
    # All parameters are unknown together: the standard errors are those of the whole inverse.
    assert errors.reshape(-1) == pytest.approx(np.diag(np.linalg.inv(curvature)) ** 0.5, rel=1e-3)  # by differences


def test_what_was_simulated_is_found():
    found = fit_comparers(
        simulated(
            good={"reliability": 2.5},
            usual={},
            left={"position": 2.0},
            long={"length": 2.5},
            coin={"reliability": 0.0},
            other={"reliability": -1.5},
            num=300,
        )
    )
    for name, value in (("good", 2.5), ("usual", 1.5), ("left", 1.5), ("long", 1.5), ("coin", 0.0), ("other", -1.5)):
        right = np.mean([1 / (1 + math.exp(-value * abs(x))) for x in np.random.default_rng(0).normal(size=20000)])
        assert found[name].accuracy.low < right < found[name].accuracy.high
    assert found["left"].parameters[1] > 1.3 > 0.5 > abs(found["usual"].parameters[1])
    assert found["long"].parameters[2] > 1.5 > 0.6 > abs(found["usual"].parameters[2])
    assert found["coin"].log_coin > 5 > 0 > found["usual"].log_coin
    assert found["other"].log_reversed > found["other"].log_coin > 5


def test_two_people_suffice_and_share_the_reliability():
    found = fit_comparers(simulated(ana={}, ben={}, num=100))
    assert found.keys() == {"ana", "ben"}
    for each in found.values():
        assert 0.5 < each.accuracy.low < each.accuracy.value < each.accuracy.high < 0.9
        assert 0.65 < each.accuracy.value < 0.8
        assert abs(each.parameters[1]) < 0.6


def test_answers_without_another_person_do_not_make_anyone_reliable():
    (only,) = fit_comparers(simulated(ana={}, num=100)).values()
    assert only.accuracy.low < 0.5
    assert only.accuracy.high > 0.8


def test_a_choice_against_ones_bias_is_worth_more():
    left = fit_comparers(simulated(ana={}, ben={}, left={"position": 2.0}))["left"]
    first = left.evidence(Comparison("left", ("1", 0, 1), 1, 1, 0))
    against = left.evidence(Comparison("left", ("1", 0, 1), 1, -1, 0))
    assert 0.5 < first < against < 1
    tie = left.evidence(Comparison("left", ("1", 0, 1), 0, -1, 0)) + left.evidence(
        Comparison("left", ("1", 0, 1), 0, 1, 0)
    )
    assert tie == pytest.approx(1)


def test_severity_is_in_grades_and_nobody_is_severe_alone():
    rng = random.Random(9)
    shift = {"harsh": -1.0, "usual": 0.0, "mild": 1.0}
    answers = []
    for item in range(120):
        quality = [rng.gauss(4, 1.2) for _ in range(2)]
        for name, by in shift.items():
            grades = tuple(min(7, max(1, round(each + by + rng.gauss(0, 0.7)))) for each in quality)
            grades = (grades[0], None) if item % 5 == 0 else grades
            answers.append(Answer("", str(item), name, "", 1.0, (0, 1), "ranked", (1, 2), {"overall": grades}))
    found = fit_severities(answers)["overall"]
    assert fit_severities([*answers, replace(answers[0], axes={"overall": (7, 7)})])["overall"] == found  # a repeat
    assert list(found) == list(shift)
    for name, by in shift.items():
        assert found[name].value == pytest.approx(by, abs=0.3)
        assert found[name].high - found[name].low < 0.7
    alone = fit_severities(each for each in answers if each.person == "harsh")["overall"]["harsh"]
    assert alone.low < 0 < alone.high


def test_nothing_is_fitted_without_answers():
    assert fit_comparers([]) == {}
    assert fit_severities([]) == {}


def test_people_who_mirror_each_other_have_no_limits_and_no_warning():
    """The fit starts where it cannot tell which of the two is reversed."""
    mirrored = [
        Comparison(person, (str(unit), 0, 1), side * (1 if unit % 2 else -1), 1, 0)
        for unit in range(100)
        for person, side in (("a", 1), ("b", -1))
    ]
    for each in fit_comparers(mirrored).values():
        assert each.accuracy.value == pytest.approx(0.5, abs=0.2)
        assert not each.accuracy.is_known
        assert _percent(each.accuracy) == f"{each.accuracy.value:.0%}"
