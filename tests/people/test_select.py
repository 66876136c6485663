"""Which pair next: each method takes the pairs that it names."""

from __future__ import annotations

import math

import pytest

from kedge_base.errors import KedgeError
from kedge_people.labels import Item
from kedge_people.select import VALUES, check_choice, choose, score_items
from tests.tiny import save_tiny_reward_model

ITEMS = [Item(str(number), f"Deck {number}:", ("a", "b", "c"), ("x", "y", "z")) for number in range(4)]
# By model and item: close; far apart; far apart by one model, the other way round by the other; twice the same.
FIRST = [[0.1, 0.0, 0.2], [3.0, 0.0, 1.0], [0.0, 2.0, 1.9], [0.0, 1.0, 5.0]]
SECOND = [[0.0, 0.1, 0.2], [3.0, 0.0, 1.0], [0.0, -2.0, 1.9], [0.0, 1.0, 5.0]]


def chosen(method, scores=(FIRST, SECOND), count=2, **more):
    found = choose(ITEMS, scores, count, value=VALUES[method], **more)
    return [(item.id, "".join(item.responses), "".join(item.models)) for item in found]


def test_a_gap_is_large_or_uncertain():
    # Item 3: a gap of 5. Item 2: b is 2 or −2 from a, 0 ± 2 = 2; from c 0.1 or −3.9: 1.9 + 2 = 3.9. Item 1: 3.
    assert chosen("gap") == [("2", "bc", "yz"), ("3", "ac", "xz")]
    assert chosen("gap", count=3)[0] == ("1", "ab", "xy")
    # A single model has no disagreement.
    assert chosen("gap", [FIRST]) == [("1", "ab", "xy"), ("3", "ac", "xz")]


def test_uncertain_pairs_are_near_even_and_hard_ones_divide_the_models():
    assert chosen("uncertain") == [("0", "ab", "xy"), ("2", "ab", "xy")]  # even on average
    assert chosen("uncertain", [FIRST]) == [("0", "ab", "xy"), ("2", "bc", "yz")]
    assert chosen("hard", count=1) == [("2", "ab", "xy")]


def test_several_responses_are_chosen_by_the_mean_of_their_pairs():
    item = Item("1", "p", ("a", "b", "c", "d"), ("m",) * 4)
    [found] = choose([item], [[[0.0, 1.0, 10.0, 10.5]]], 1, value=VALUES["gap"], num_responses=3)
    assert found.responses == ("a", "c", "d") or found.responses == ("a", "b", "d")
    # a, b, d: 1 + 10.5 + 9.5; a, c, d: 10 + 10.5 + 0.5: both 21.
    assert math.isclose(1 + 10.5 + 9.5, 10 + 10.5 + 0.5)


def test_nine_of_many_responses_are_chosen_in_little_time():
    item = Item("1", "p", tuple("abcdefghijklmnopqr"), ("m",) * 18)
    calls = []

    def value(gaps):
        calls.append(gaps)
        return abs(gaps[0])

    scores = [[[float(place in (0, 1, 2, 3)) for place in range(18)]]]
    [found] = choose([item], scores, 1, value=value, num_responses=9)
    assert len(set(found.responses) & set("abcd")) == 4  # 4·5 = 20 unequal pairs
    assert len(calls) == 18 * 17 / 2


def test_equal_values_depend_on_the_seed_alone_and_no_pair_has_equal_texts():
    items = [Item(str(number), "p", ("a", "a", "b"), ("m",) * 3) for number in range(50)]

    def chosen_equally(items, count, seed=0):
        return choose(items, [], count, value=lambda _: 0.0, seed=seed)

    first, again, other = (chosen_equally(items, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert all(set(item.responses) == {"a", "b"} for item in first)
    assert [int(item.id) for item in first] == sorted(int(item.id) for item in first)
    assert chosen_equally([Item("1", "p", ("a", "a"), ("m", "m"))], 5) == []
    assert len(chosen_equally(items, 99)) == 50


def test_scores_are_those_of_the_reward_model_and_unreadable_items_are_left_out(tmp_path):
    save_tiny_reward_model(tmp_path / "model")
    items = [ITEMS[0], Item("9", "Deck 9:", ("a", "  ", "b"), ("m",) * 3), ITEMS[1]]
    scores = score_items(items, str(tmp_path / "model"))
    assert [len(each) for each in scores] == [3, 0, 3]
    [alone] = score_items([ITEMS[1]], str(tmp_path / "model"))
    assert scores[2] == pytest.approx(alone, abs=1e-6)
    found = choose(items, [scores], 9, value=VALUES["uncertain"])
    assert [item.id for item in found] == ["0", "1"]


@pytest.mark.parametrize(
    ("method", "scorers", "message"),
    [
        ("gap", [], "--select gap needs --scorer"),
        ("hard", ["m"], "--select hard needs --scorer: two reward models"),
        ("gap", ["nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(method, scorers, message):
    with pytest.raises(KedgeError, match=message):
        check_choice(method, scorers)
