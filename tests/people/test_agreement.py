"""Agreement: against the tables that the papers computed by hand, and counted by hand."""

import numpy as np
import pytest

from kedge_people.agreement import (
    alike,
    alpha_of_choices,
    cohens_kappa,
    coincidences_of,
    comparisons_in,
    judgments,
    krippendorffs_alpha,
    outcomes,
    share_of,
    tables_between,
)
from kedge_people.labels import Answer, Item, Labels


def answer(name, person, item, ranks=(), verdict="ranked"):
    order = tuple(range(len(ranks) or 2))
    return Answer(name, item, person, "2026-01-01T00:00:00Z", 5.0, order, verdict, tuple(ranks))


def alpha(rows):
    units = [[int(value) for value in unit if value != "."] for unit in zip(*rows, strict=True)]
    size = 1 + max(map(max, units))
    return krippendorffs_alpha([coincidences_of(unit, size) for unit in units if len(unit) > 1]).value


def test_kappa_of_the_table_in_cohens_paper():
    # Cohen 1960: p_o = .70, p_e = .60·.50 + .30·.30 + .10·.20 = .41, κ = .29/.59.
    table = np.array([[44, 5, 1], [7, 20, 3], [9, 5, 6]])
    assert cohens_kappa([table]).value == pytest.approx(0.29 / 0.59)
    assert alike([table]) == pytest.approx([0.70])


def one_each(table):
    """A table for each of the pairs that a table counts."""
    for place, count in np.ndenumerate(np.array(table)):
        for _ in range(count):
            found = np.zeros_like(table, dtype=float)
            found[place] = 1
            yield found


def test_the_interval_of_kappa_is_cohens():
    # Cohen 1960: σ = √(p_o(1 − p_o)/(N(1 − p_e)²)) with N = 200 of the same shares.
    error = (0.7 * 0.3 / 200) ** 0.5 / 0.59
    found = cohens_kappa([*one_each([[88, 10, 2], [14, 40, 6], [18, 10, 12]])])
    # Within a fifth of a standard error: the interval of the share is not quite symmetric.
    assert found.low == pytest.approx(0.29 / 0.59 - 1.96 * error, abs=error / 5)
    assert found.high == pytest.approx(0.29 / 0.59 + 1.96 * error, abs=error / 5)


def test_full_agreement_on_few_items_leaves_room():
    tables = [*one_each([[6, 0], [0, 6]])]
    # 12 of 12, whose exact lower limit (Clopper and Pearson) is 0.735, and an agreement of ½ by chance.
    assert share_of(alike(tables)).low == pytest.approx(0.735, abs=5e-4)
    for found in (cohens_kappa(tables), krippendorffs_alpha([each + each.T for each in tables])):
        assert found.value == found.high == 1
        assert found.low == pytest.approx(0.47, abs=0.03)  # α's chance is (n/2 − 1)/(n − 1), below ½


def test_kappa_is_undefined_without_variation():
    assert cohens_kappa([np.array([[5, 0], [0, 0]])]) is None
    assert krippendorffs_alpha([np.array([[10, 0], [0, 0]])]) is None


def test_alpha_of_the_tables_in_krippendorffs_paper():
    # Computing Krippendorff's alpha-reliability (2011), examples A, B and C.
    binary = ["0100000010", "1110010000"]
    names = ["".join(str("abcde".index(each)) for each in row) for row in ("aabbdcccedda", "babbbccceddd")]
    missing = ["123321412...", "1233224125.3", ".3332342251.", "12332441251."]
    assert alpha(binary) == pytest.approx(0.095, abs=5e-4)
    assert alpha(names) == pytest.approx(0.692, abs=5e-4)
    assert alpha(missing) == pytest.approx(0.743, abs=5e-4)


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
    assert alike(tables.values()) == pytest.approx([1, 0, 1, 2 / 3])
    assert tables["b"].tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_positions_and_lengths_of_a_comparison():
    items = {"a": Item("a", "p", ("one two three", "one", "one"), ("m", "n", "o"))}
    given = Answer("1", "a", "ana", "", 1.0, (2, 0, 1), "ranked", (1, 2, 2))
    found = comparisons_in(Labels(items, [given]), {"ana": {"a": given}})
    assert [(each.unit[1:], each.outcome, each.position, each.longer) for each in found] == [
        ((0, 1), 1, 1, 10),
        ((0, 2), 1, -1, 10),
        ((1, 2), 0, 0, 0),  # equal texts
    ]


def test_alpha_of_all_people(labels):
    given, _ = judgments(labels)
    # Outcomes of a, b, c and e's pairs (0, 1), (0, 2), (1, 2).
    rows = ["201222", "221022"]
    assert alpha_of_choices(comparisons_in(labels, given)).value == pytest.approx(alpha(rows))


def test_nothing_is_known_without_a_shared_item():
    assert share_of([]) is None
    assert alpha_of_choices([]) is None


@pytest.mark.parametrize(
    "figure", [cohens_kappa, lambda tables: krippendorffs_alpha([each + each.T for each in tables])]
)
@pytest.mark.parametrize("num_items", [12, 60])
def test_intervals_beyond_chance_cover(figure, num_items):
    # Both know the answer, one of two equally frequent ones, in 80 % of the cases: κ = α = 0.64.
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        truth = rng.integers(2, size=num_items)
        one, other = (np.where(rng.random(num_items) < 0.8, truth, rng.integers(2, size=num_items)) for _ in range(2))
        tables = np.eye(2)[one][:, :, None] * np.eye(2)[other][:, None]
        found = figure([*tables])
        covered += found is None or found.low <= 0.64 <= found.high
    assert covered / 200 == pytest.approx(0.96, abs=0.04)
