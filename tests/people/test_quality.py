"""The quality of labels: biased annotators are found and honest ones are not, and what the report shows."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from math import log

import pytest

from kedge_base.errors import DataError, OutputError
from kedge_inspect.page.document import is_page
from kedge_people.labels import Answer, AnswerFile, Item, Labels, read_labels, write_items
from kedge_people.quality import FASTEST_READING, _times, examine_labels
from kedge_people.report import text_report, write_label_report
from tests.people.annotators import BIASED, both_kinds, simulate

EXPECTED = {
    "always left": {"always_first"},
    "mostly left": {"always_first"},
    "always longer": {"always_longer"},
    "mostly longer": {"always_longer"},
    "always shorter": {"always_shorter"},
    "too fast": {"faster_than_reading"},
    "reversed": {"reversed", "agrees_with_nobody"},
    "always tie": {"always_tie"},
    "alternating": {"pattern_of_positions"},
    "tired": {"faster_than_reading"},
    "tired left": {"always_first", "pattern_of_positions"},
}
"""By kind of annotator, the rules of which one finds it. Chance may hide who chooses at random; see below."""


def accused(labels: Labels) -> dict[str, set[str]]:
    """The rules of the findings, by person."""
    found = defaultdict(set)
    for person, finding in examine_labels(labels).findings:
        found[person].add(finding.rule)
    return found


def check_annotators(seeds) -> tuple[int, int]:
    """Check that biased annotators are found; return how often the random one was not, and honest ones were."""
    hidden = wrong = 0
    for seed in seeds:
        found = accused(both_kinds(seed))
        assert {kind: found[kind] & rules for kind, rules in EXPECTED.items() if not found[kind] & rules} == {}
        hidden += not found["random"]
        wrong += sum(bool(rules) for person, rules in found.items() if person.startswith("honest"))
    return hidden, wrong


def test_biased_annotators_are_found_and_honest_ones_are_not():
    _, wrong = check_annotators([3])
    assert wrong == 0


@pytest.mark.slow
def test_biased_annotators_are_found_for_more_seeds():
    _, wrong = check_annotators(range(4, 10))
    assert wrong <= 1  # of 72


def test_of_two_people_who_disagree_neither_is_accused():
    assert not accused(simulate({"honest": None, "reversed": BIASED["reversed"]}, 1))["honest"]


def test_only_people_read_at_a_persons_pace():
    labels = simulate({"ana": BIASED["too fast"], "openai:judge@http://localhost": BIASED["too fast"]}, 1)
    assert {person for person, _ in examine_labels(labels).findings} == {"ana"}


PAIR = Item("pair", "one two", ("three four", "five"), ("new", "old"))


def answer(name, item="pair", *, person="ana", seconds=10.0, order=(0, 1), verdict="ranked", ranks=(1, 2), **more):
    return Answer(name, item, person, "2026-01-01T00:00:00Z", seconds, order, verdict, ranks, **more)


def test_figures_of_a_person_counted_by_hand():
    items = [PAIR, *(replace(PAIR, id=str(number)) for number in range(4))]
    items.append(Item("3 texts", [{"role": "user", "content": "hi"}], ("a", "b c", "d e f"), ("x", "y", "z")))
    answers = [
        answer("1", "0", seconds=1.0),  # 5 words in a second: 300 per minute
        answer("2", "1", seconds=0.3, order=(1, 0)),  # the prompt is known: 3 words, 600 per minute
        answer("3", "2", ranks=(1, 1)),
        answer("4", "3", verdict="bad", ranks=()),
        answer("5", "pair", verdict="skipped", ranks=()),
        answer("6", "3 texts", order=(2, 0, 1), ranks=(1, 2, 3)),
        answer("7", "0", ranks=(2, 1)),
    ]
    (person,) = examine_labels(Labels({each.id: each for each in items}, answers)).people
    assert (person.num_answers, person.num_skipped, person.seconds) == (5, 1, 10.0)
    assert FASTEST_READING["words"] == 400
    assert (person.pace, person.unit) == (pytest.approx(42.0), "words")  # the median answer: 7 words in ten seconds
    assert person.fast == [0, 1, 0, 0, 0]
    assert person.tied == [0, 0, 1, 1, 0]
    # Of three texts, 0 before 1 is shown in that order, 2 before both: one pair of three for the first, none longer.
    assert person.first == pytest.approx([1, 0, 1 / 3])
    assert person.longer == pytest.approx([1, 1, 0])
    assert (person.again, person.others) == ([0], [])


def test_a_choice_between_equal_texts_says_nothing_about_a_preferred_position():
    items = [replace(PAIR, id=str(number), responses=("same", "same")) for number in range(20)]
    answers = [answer(each.id, each.id) for each in items]
    (person,) = examine_labels(Labels({each.id: each for each in items}, answers)).people
    assert person.first == []


@pytest.mark.parametrize(
    ("prompt", "responses", "characters"),
    [
        ("今天天气怎么样?", ("今天下雨。", "我不知道……"), 7 + 4 + 4),  # a question, a period and dots are not read
        ("東京はどこ?", ("日本の首都です。", "スーパーの隣"), 5 + 7 + 6),  # ー is a part of a word
    ],
    ids=["Chinese", "Japanese"],
)
def test_chinese_and_japanese_are_read_by_the_character(prompt, responses, characters):
    items = {str(number): Item(str(number), f"{number}{prompt}", responses, ("x", "y")) for number in range(20)}
    minutes = (characters + 650 / 400) / 650  # and one word, the number
    slow = [answer(each, each, seconds=60 * minutes * 1.01) for each in items]
    fast = [answer(each, each, person="ben", seconds=60 * minutes * 0.99) for each in items]
    quality = examine_labels(Labels(items, [*slow, *(replace(each, id=f"b{each.id}") for each in fast)]))
    ana, ben = quality.people
    assert (ana.unit, ana.pace, sum(ana.fast)) == ("characters", pytest.approx(650 / 1.01), 0)
    assert (ben.unit, ben.pace, sum(ben.fast)) == ("characters", pytest.approx(650 / 0.99), 20)
    assert [person for person, each in quality.findings if each.rule == "faster_than_reading"] == ["ben"]
    assert "over 650 characters per minute" in text_report(quality)
    assert "100% of 20 answers came faster than at 650 characters per minute; the median is 657" in text_report(quality)


def test_a_text_of_both_kinds_takes_the_time_of_both():
    item = Item("both", "Translate two words", ("你好世界", "再见"), ("x", "y"))
    (person,) = examine_labels(Labels({"both": item}, [answer("1", "both", seconds=6.0)])).people
    # 3 words and 6 characters: 3 / 400 + 6 / 650 of a minute at the fastest, here in a tenth of one.
    assert (person.unit, person.pace) == ("characters", pytest.approx(10 * (3 * 650 / 400 + 6)))


def test_how_many_times_as_likely_is_written_without_an_exponent():
    assert [_times(log(ratio)) for ratio in (1.5, 123, 999, 5000)] == [
        "1.50 times as", "123 times as", "999 times as", "over 1,000 times as"
    ]  # fmt: skip


def test_the_surest_disagreement_comes_first():
    labels = simulate(dict.fromkeys(("ana", "ben", "cleo")) | {"left": BIASED["always left"]}, 4)
    quality = examine_labels(labels)
    sureness = [each.sureness for each in quality.disagreements]
    assert sureness == sorted(sureness, reverse=True)
    assert all(0 < each < 1 for each in sureness)
    choices = {(each.person, each.item): each.ranks for each in labels.answers}
    for each in quality.disagreements:
        one, other = (choices[person, each.item] for person in each.people)
        assert one[each.responses[0]] < one[each.responses[1]]
        assert other[each.responses[0]] > other[each.responses[1]]
    assert "left" not in {person for each in quality.disagreements[:3] for person in each.people}


def test_nothing_is_examined_without_comparisons():
    quality = examine_labels(Labels({"a": PAIR}, []))
    assert (quality.people, quality.findings, quality.disagreements, quality.agreement) == ([], [], [], None)


HOSTILE = "</script><img src=x onerror=alert(1)> \u202e \ud800 \x1b[31m"


def examined(folder):
    return examine_labels(read_labels(folder))


@pytest.fixture
def folder(tmp_path):
    labels = simulate({"ana": None, "ben <b>": None, "dan\x1b[31m": BIASED["always left"]}, 2)
    write_items(tmp_path, [replace(item, prompt=f"{HOSTILE} {item.prompt}") for item in labels.items.values()])
    with AnswerFile(tmp_path) as file:
        for number, each in enumerate(labels.answers):
            file.add(replace(each, axes={"overall": (number % 5, None)}, note=HOSTILE))
    return tmp_path


def test_the_page_has_the_figures_and_the_texts_as_data(folder):
    path = write_label_report(folder, examined(folder))
    page = path.read_bytes()
    assert path == folder / "labels.html"
    assert is_page(page)
    assert page.count(b"<img") == page.count(b"onerror=alert(1)>") == 0
    assert b"script-src 'sha256-" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.decode("utf-8", "replace"), re.DOTALL)[1])
    assert [each["title"].split(" (")[0] for each in data["labels"]["tables"]] == [
        "People",
        "Choices",
        "Grades above those of an average person",
        "Agreement of two people",
        "Win rates of the models",
    ]
    assert [row[0] for row in data["labels"]["tables"][0]["rows"]] == ["ana", "ben <b>", "dan\x1b[31m"]
    assert HOSTILE.split("\ud800")[0] in data["labels"]["disagreements"][0]["prompt"]
    assert len(page) < 400_000  # without the plotting library
    write_label_report(folder, examined(folder))


def test_the_text_has_the_same_findings_and_no_control_characters(folder):
    text = text_report(examined(folder))
    assert "serious: always_first: dan\\x1b[31m: prefers the response shown first (left) in 100% of 60 answers" in text
    assert "180 answers by 3 people; 20 items have those of two or more." in text
    assert re.search(r"Of [1-9]\d* items, two people prefer opposite responses; labels.html shows them", text)
    assert all(char.isprintable() or char == "\n" for char in text)


def test_a_report_of_unusable_folders_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"items\.jsonl"):
        write_label_report(tmp_path, examined(tmp_path))
    write_items(tmp_path, [PAIR])
    assert text_report(examined(tmp_path)).strip() == "Nothing to report: no answer compares responses."
    (tmp_path / "labels.html").write_text("mine")
    with pytest.raises(OutputError, match="not a kedge report"):
        write_label_report(tmp_path, examined(tmp_path))
