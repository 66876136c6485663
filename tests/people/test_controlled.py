"""Controlled win rates: a slow fit, known effects of length and markdown, and cases without an answer."""

import math
import random

import numpy as np
import pytest

from kedge_people.agreement import comparisons_in
from kedge_people.controlled import RIDGE, controlled_win_rate, style_of, win_rates
from kedge_people.labels import Answer, Item, Labels


def sigmoid(logit):
    return 1 / (1 + math.exp(-logit))


def simulated(effect, length_effect, *, num=3000, drift=0.5, seed=0):
    """Pairs in which ours is `drift` standard deviations longer on average."""
    rng = random.Random(seed)
    apart = [rng.gauss(drift, 1) for _ in range(num)]
    scale = math.sqrt(sum(each**2 for each in apart) / num)
    wins = [float(rng.random() < sigmoid(effect + length_effect * math.tanh(each / scale))) for each in apart]
    return wins, [style_of("", 100 + each) for each in apart], [style_of("", 100)] * num


def test_a_slow_fit_has_the_same_intercept():
    rng = random.Random(4)
    wins = [rng.choice([0.0, 0.5, 1.0]) for _ in range(40)]
    ours = [(rng.randrange(5, 50), rng.randrange(3), 0.0, rng.randrange(4)) for _ in wins]
    theirs = [(rng.randrange(5, 50), 0.0, 0.0, rng.randrange(4)) for _ in wins]
    found = controlled_win_rate(wins, ours, theirs)
    columns = []
    for name in (0, 1, 3):
        apart = [one[name] - other[name] for one, other in zip(ours, theirs, strict=True)]
        scale = math.sqrt(sum(each**2 for each in apart) / len(apart))
        columns.append([math.tanh(each / scale) for each in apart])
    rows = [(1.0, *row) for row in zip(*columns, strict=True)]
    weights = [0.0] * 4
    for _ in range(6000):  # gradient ascent, one row after the other
        slopes = [-ridge * weight for ridge, weight in zip(RIDGE, weights, strict=False)]
        for row, win in zip(rows, wins, strict=True):
            missing = win - sigmoid(sum(weight * each for weight, each in zip(weights, row, strict=True)))
            slopes = [slope + missing * each for slope, each in zip(slopes, row, strict=True)]
        weights = [weight + 0.1 * slope for weight, slope in zip(weights, slopes, strict=True)]
    assert found.of == ("length", "headers", "bold")
    assert found.rate.value == pytest.approx(sigmoid(weights[0]), abs=1e-6)


@pytest.mark.parametrize(("effect", "length_effect"), [(0.0, 2.0), (0.5, 1.5), (-0.5, 2.0), (0.3, 0.0)])
def test_a_known_length_effect_is_taken_out(effect, length_effect):
    found = controlled_win_rate(*simulated(effect, length_effect)).rate
    assert found.low <= sigmoid(effect) <= found.high
    assert found.high - found.low < 0.06


def test_the_interval_covers_and_the_raw_rate_does_not():
    covered = misled = 0
    for seed in range(60):
        wins, ours, theirs = simulated(0.0, 2.0, num=200, seed=seed)
        rate = controlled_win_rate(wins, ours, theirs).rate
        covered += rate.low <= 0.5 <= rate.high
        misled += sum(wins) / 200 > 0.57
    assert covered >= 54
    assert misled >= 54


def test_both_sides_sum_to_one():
    wins, ours, theirs = simulated(0.4, 1.0, num=300)
    one = controlled_win_rate(wins, ours, theirs)
    other = controlled_win_rate([1 - win for win in wins], theirs, ours)
    assert one.rate.value + other.rate.value == pytest.approx(1)


def test_markdown_is_counted_outside_of_code():
    text = (
        "# One\n\n## Two\n* a\n- b\n 3. c\n\nSome **bold** and __this__, 2 * 3 * 4.\n```\n# no\n- no **no**\n```\n#hash"
    )
    assert style_of(text, 7) == (7, 2, 3, 2)
    assert style_of("", 0) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("wins", "apart"),
    [
        ([1.0, 0.0] * 14, [1, -1, 2, -2] * 7),  # 28 pairs
        ([1.0] * 40, [1, -1] * 20),  # no loss
        ([1.0, 0.0] * 20, [5] * 40),  # always longer: length and quality cannot be told apart
        ([1.0, 0.0] * 20, [0] * 40),  # no difference
        ([None] * 40, [1, -1] * 20),
    ],
)
def test_it_is_unknown_where_the_pairs_cannot_tell(wins, apart):
    assert (
        controlled_win_rate(wins, [style_of("", 50 + each) for each in apart], [style_of("", 50)] * len(apart)) is None
    )


def test_only_what_is_on_both_sides_is_controlled_for():
    wins = [1.0, 0.0, 1.0, 1.0] * 10
    ours = [(10 + place % 3, 2, 0, place % 2) for place in range(40)]
    assert controlled_win_rate(wins, ours, [(11, 0, 0, 0)] * 40).of == ("length", "bold")


def test_separable_pairs_stay_finite():
    apart = [each for each in range(-20, 21) if each]
    wins = [float(each > 0) for each in apart]
    rate = controlled_win_rate(wins, [(100 + each, 0, 0, 0) for each in apart], [(100, 0, 0, 0)] * 40).rate
    assert 0 < rate.low < rate.value < rate.high < 1
    assert rate.value == pytest.approx(0.5, abs=1e-6)


def test_the_win_rates_of_labels_are_per_item():
    items = {name: Item(name, "p", ("x", "y y"), ("new", "old") if name < "c" else ("old", "new")) for name in "abcd"}
    items["e"] = Item("e", "p", ("x", "y"), ("new", "new"))

    def answer(item, *ranks):
        return Answer(item, item, "ana", "", 1.0, (0, 1), "ranked", ranks)

    ana = {"a": answer("a", 1, 2), "b": answer("b", 1, 1), "c": answer("c", 1, 2), "e": answer("e", 1, 2)}
    ben = {"a": answer("a", 2, 1), "c": answer("c", 1, 2)}
    labels = Labels(items, [])
    (rate,) = win_rates(labels, comparisons_in(labels, {"ana": ana, "ben": ben}))
    # new wins half of a and half of b, and loses c.
    assert (rate.models, rate.num_items, rate.raw.value) == (("new", "old"), 3, pytest.approx(1 / 3))
    assert rate.controlled is None


def test_it_is_reproducible():
    pairs = simulated(0.2, 1.0, num=100)
    assert controlled_win_rate(*pairs) == controlled_win_rate(*(list(map(np.asarray, each)) for each in pairs))
