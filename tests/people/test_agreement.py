"""Agreement: against the tables that the papers computed by hand, and counted by hand."""

import math

import numpy as np
import pytest

from kedge_people.agreement import (
    alpha_of_choices,
    alpha_of_ranks,
    cohens_kappa,
    coincidences_of,
    comparisons_in,
    interval_over,
    judgments,
    krippendorffs_alpha,
    outcomes,
    share_alike,
    table_of_repeat,
    tables_between,
)
from kedge_people.labels import Answer, Item, Labels


def answer(name, person, item, ranks=(), verdict="ranked"):
    order = tuple(range(len(ranks) or 2))
    return Answer(name, item, person, "2026-01-01T00:00:00Z", 5.0, order, verdict, tuple(ranks))


def alpha(rows, **options):
    units = [[int(value) for value in unit if value != "."] for unit in zip(*rows, strict=True)]
    size = 1 + max(map(max, units))
    return krippendorffs_alpha(sum(coincidences_of(unit, size) for unit in units if len(unit) > 1), **options)


def test_kappa_of_the_table_in_cohens_paper():
    # Cohen 1960: p_o = .70, p_e = .60·.50 + .30·.30 + .10·.20 = .41, κ = .29/.59.
    table = np.array([[44, 5, 1], [7, 20, 3], [9, 5, 6]])
    assert cohens_kappa(table) == pytest.approx(0.29 / 0.59)
    assert share_alike(table) == pytest.approx(0.70)


def test_kappa_is_undefined_without_variation():
    assert math.isnan(cohens_kappa(np.array([[5, 0], [0, 0]])))


def test_alpha_of_the_tables_in_krippendorffs_paper():
    # Computing Krippendorff's alpha-reliability (2011), examples A, B and C.
    binary = ["0100000010", "1110010000"]
    names = ["".join(str("abcde".index(each)) for each in row) for row in ("aabbdcccedda", "babbbccceddd")]
    missing = ["123321412...", "1233224125.3", ".3332342251.", "12332441251."]
    assert alpha(binary) == pytest.approx(0.095, abs=5e-4)
    assert alpha(names) == pytest.approx(0.692, abs=5e-4)
    assert alpha(missing) == pytest.approx(0.743, abs=5e-4)
    assert alpha(missing, ordinal=True) == pytest.approx(0.815, abs=5e-4)


def test_the_outcomes_of_an_answer():
    assert outcomes(answer("a", "ana", "1", (1, 2, 2))) == {(0, 1): 1, (0, 2): 1, (1, 2): 0}
    assert outcomes(answer("a", "ana", "1", verdict="bad")) == {(0, 1): 0}


@pytest.fixture
def labels():
    items = {name: Item(name, "p", ("x", "y"), ("m", "n")) for name in "abcd"}
    items["e"] = Item("e", "p", ("x", "y", "z"), ("m", "n", "o"))
    items["f"] = Item("f", "p", ("x",), ("m",))
    ana = {"a": (1, 2), "b": (2, 1), "c": (1, 1), "d": (1, 2), "e": (1, 2, 3), "f": (1,)}
    ben = {"a": (1, 2), "b": (1, 2), "c": (1, 1), "e": (2, 1, 3), "f": (1,)}
    answers = [answer(f"ana-{item}", "ana", item, ranks) for item, ranks in ana.items()]
    answers += [answer(f"ben-{item}", "ben", item, ranks) for item, ranks in ben.items()]
    answers += [answer("ana-a2", "ana", "a", (1, 2)), answer("ana-b2", "ana", "b", (1, 2))]
    answers += [answer("ben-d", "ben", "d", verdict="skipped")]
    return Labels(items, answers)


def test_agreement_between_two_people_and_on_repeats(labels):
    given, repeats = judgments(labels)
    assert {person: sorted(items) for person, items in given.items()} == {"ana": list("abcde"), "ben": list("abce")}
    assert [(first.id, again.id) for first, again in repeats] == [("ana-a", "ana-a2"), ("ana-b", "ana-b2")]
    ((people, tables),) = tables_between(comparisons_in(labels, given)).items()
    assert people == ("ana", "ben")
    # The same: a, c, and two of e's three pairs. Another winner: b and the third pair.
    assert list(tables) == list("abce")
    assert share_alike(sum(tables.values())) == pytest.approx(4 / 6)
    assert tables["b"].tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    found = interval_over(tables.values(), share_alike)
    assert found.value == pytest.approx(4 / 6)
    assert 0 <= found.low < found.value < found.high <= 1
    assert share_alike(sum(table_of_repeat(*each) for each in repeats)) == 0.5


def test_positions_and_lengths_of_a_comparison():
    items = {"a": Item("a", "p", ("one two three", "one", "one"), ("m", "n", "o"))}
    given = Answer("1", "a", "ana", "", 1.0, (2, 0, 1), "ranked", (1, 2, 2))
    found = comparisons_in(Labels(items, [given]), {"ana": {"a": given}})
    assert [(each.unit[1:], each.outcome, each.position, each.longer) for each in found] == [
        ((0, 1), 1, 1, 10),
        ((0, 2), 1, -1, 10),
        ((1, 2), 0, -1, 0),
    ]


def test_alpha_of_all_people(labels):
    given, _ = judgments(labels)
    # Outcomes of a, b, c and e's pairs (0, 1), (0, 2), (1, 2).
    rows = ["201222", "221022"]
    assert alpha_of_choices(comparisons_in(labels, given)).value == pytest.approx(float(alpha(rows)))
    assert alpha_of_ranks(given).value == pytest.approx(float(alpha(["012", "102"], ordinal=True)))


def test_nothing_is_known_without_a_shared_item():
    assert interval_over([], share_alike) is None
    assert alpha_of_choices([]) is None
    assert alpha_of_ranks({}) is None


def test_the_interval_of_a_share_covers():
    draws = np.random.default_rng(5).random((200, 60)) < 0.7
    tables = [[np.diag([1.0, 0.0]) if hit else np.array([[0.0, 1.0], [0, 0]]) for hit in row] for row in draws]
    intervals = [interval_over(each, share_alike) for each in tables]
    assert sum(each.low <= 0.7 <= each.high for each in intervals) / 200 == pytest.approx(0.94, abs=0.04)
