"""Who is asked what: shares, overlap, repeats, orders, and people who join later."""

from collections import Counter
from dataclasses import replace

import pytest

from kedge_base.errors import ConfigError, DataError
from kedge_people.assignments import (
    ASSIGNMENTS_FILE,
    Assignments,
    names_of,
    read_assignments,
    write_assignments,
)
from kedge_people.labels import Answer, Item, Labels


def labels(count=40, *, answered=(), size=3):
    items = [Item(str(number), f"p{number}", tuple("abcd"[:size]), ("m",) * size) for number in range(count)]
    answers = [Answer(f"{name}-{item}", item, name, "", 1.0, (0, 1, 2), "skipped") for name, item in answered]
    return Labels({item.id: item for item in items}, answers)


def own(assignments, person, found):
    return [question.item for question in assignments.questions(person, found.items)]


def test_a_share_is_for_everybody_and_the_rest_for_one_each():
    found = labels(40)
    dealt = Assignments(overlap=0.2, repeats=0).dealt(found, ["ana", "ben"])
    ana, ben = (own(dealt, person, found) for person in dealt.people)
    assert len({*ana} & {*ben}) == 8
    assert {*ana} | {*ben} == {*found.items}
    assert len(ana) == len(ben) == 8 + 16
    assert ana == sorted(ana, key=int), "in the order of the folder"
    assert dealt.dealt(found, ["ana"]) == dealt, "nothing changes without further people or items"


@pytest.mark.parametrize(("overlap", "shared"), [(0, 0), (0.5, 10), (1, 20)])
def test_the_overlap_is_exact(overlap, shared):
    found = labels(20)
    dealt = Assignments(overlap=overlap).dealt(found, ["ana", "ben", "cyd"])
    assert list(dealt.owners.values()).count(None) == shared


def test_repeats_come_much_later_in_another_order():
    found = labels(40)
    dealt = Assignments(repeats=0.1).dealt(found, ["ana"])
    questions = dealt.questions("ana", found.items)
    counts = Counter(question.item for question in questions)
    again = [item for item, count in counts.items() if count == 2]
    assert (len(questions), len(again)) == (44, 4)
    for item in again:
        first, second = [place for place, question in enumerate(questions) if question.item == item]
        assert second - first >= 20
        assert questions[first].order != questions[second].order
        assert sorted(questions[first].order) == sorted(questions[second].order) == [0, 1, 2]
    assert dealt.questions("ana", found.items) == questions, "a reload asks the same"


def test_a_first_answer_undone_after_its_repeat_is_asked_again_in_its_own_order():
    found = labels(4, size=2)
    dealt = Assignments(repeats=0.25).dealt(found, ["ana"])
    questions = dealt.questions("ana", found.items)
    given = [Answer(str(number), each.item, "ana", "", 1.0, each.order, "bad") for number, each in enumerate(questions)]
    [item] = [name for name, count in Counter(each.item for each in questions).items() if count == 2]
    first = [each.item for each in questions].index(item)
    assert dealt.left("ana", found.items, given[:first] + given[first + 1 :]) == [questions[first]]
    reseeded = [replace(each, order=each.order[::-1]) for each in given]
    assert dealt.left("ana", found.items, reseeded) == [], "the order of an answer decides between questions alone"


def test_a_single_response_is_not_asked_again():
    found = labels(40, size=1)
    dealt = Assignments(repeats=0.5).dealt(found, ["ana"])
    assert own(dealt, "ana", found) == list(found.items)


def test_orders_are_random_by_person_item_and_seed():
    found = labels(200, size=2)
    orders = {
        (seed, person): [Assignments(seed=seed).question(person, item).order for item in found.items.values()]
        for seed in (0, 1)
        for person in ("ana", "ben")
    }
    assert len({tuple(each) for each in orders.values()}) == 4
    for each in orders.values():
        assert 70 <= each.count((0, 1)) <= 130  # 100 ± 4 standard deviations


def test_a_person_who_joins_gets_what_is_open():
    found = labels(40)
    dealt = Assignments(overlap=0.25, repeats=0).dealt(found, ["ana", "ben"])
    done = [(person, item) for person in ("ana", "ben") for item in own(dealt, person, found)[:10]]
    found = labels(40, answered=done)
    joined = dealt.dealt(found, ["cyd"])
    assert joined.people == ("ana", "ben", "cyd")
    for person, item in done:
        assert joined.owners[item] in (None, person), "what is answered stays"
    for person in ("ana", "ben"):
        alone = [item for item in own(dealt, person, found)[10:] if dealt.owners[item] == person]
        assert joined.owners[alone[0]] == person, "so does what may be on the screen"
    open_ones = [item for item in found.items if joined.owners[item] and item not in {item for _, item in done}]
    shares = Counter(joined.owners[item] for item in open_ones)
    assert max(shares.values()) - min(shares.values()) <= 2
    assert {item for item, owner in joined.owners.items() if owner is None} == {
        item for item, owner in dealt.owners.items() if owner is None
    }


def test_items_that_are_added_are_dealt_and_nothing_moves():
    dealt = Assignments().dealt(labels(20), ["ana", "ben"])
    more = dealt.dealt(labels(30), ["ben"])
    assert {name: more.owners[name] for name in dealt.owners} == dealt.owners
    assert list(more.owners) == [str(number) for number in range(30)]


def test_assignments_are_kept(tmp_path):
    assert read_assignments(tmp_path) == Assignments()
    dealt = Assignments(seed=3, axes=("overall",)).dealt(labels(5), ["ana", "ben"])
    write_assignments(tmp_path, dealt)
    assert read_assignments(tmp_path) == dealt
    for text in ("{", "[]", '{"people": ["ana"]}', '{"people": [], "axes": [], "x": 1}'):
        (tmp_path / ASSIGNMENTS_FILE).write_text(text)
        with pytest.raises(DataError, match="is damaged"):
            read_assignments(tmp_path)


def test_names_are_checked():
    assert names_of("ana, ben-2 ,j.doe@x.org", "--people") == ("ana", "ben-2", "j.doe@x.org")
    for text, fault in (
        ("ana,,ben", "'' is not a name"),
        ("a/b", "is not a name"),
        ("ana,ana", "given twice"),
        ("x" * 65, "is not a name"),
    ):
        with pytest.raises(ConfigError, match=fault):
            names_of(text, "--people")
