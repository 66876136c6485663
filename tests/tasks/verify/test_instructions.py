"""Instructions: every kind with a response that follows it and one that does not, and mistakes in rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge_base.errors import RewardError
from kedge_tasks import verify
from kedge_tasks.verify import instruction_text, instructions, instructions_partial
from kedge_tasks.verify.instructions import KINDS, split_sentences

DOCS = Path(__file__).resolve().parents[3] / "docs/verifiers.md"

CASES = [
    ("max_words", {"count": 3}, "one two-three four", "one two three four"),
    ("min_words", {"count": 3}, "it isn't far", "two words"),
    ("max_characters", {"count": 5}, "12345", "123456"),
    ("sentences", {"count": 2}, "Dr. J. Smith came. Who saw (e.g. you) 3.5 m?", "One. Two. Three."),
    ("short_sentences", {"count": 3}, "One two three. Four!", "One two. One two three four."),
    ("paragraphs", {"count": 2}, "a\nb\n \nc", "a\nb"),
    ("contains", {"words": ["boat", "big ship"]}, "A Boat is no big  ship.", "boats, big ship"),
    ("avoids", {"words": ["boat"]}, "boats", "The boat."),
    ("keyword_count", {"word": "sea", "count": 2}, "Sea, sea!", "sea, seas"),
    ("letter_count", {"letter": "e", "count": 2}, "Even", "an egg"),
    ("starts_with", {"text": "Dear John,"}, "Dear John, hello", "dear John, hello"),
    ("ends_with", {"text": "The end."}, "So. The end.\n", "So. The end"),
    ("repeat_prompt", {"request": "Write a  poem."}, '"Write a poem." Roses', "Write a poem."),
    ("lower_case", {}, "all low 3", "One"),
    ("upper_case", {}, "ALL 3!", "ALl"),
    ("capital_words", {"count": 2}, "NASA and ESA", "NASA and I"),
    ("alphabet", {"alphabet": "Cyrillic"}, "Да, 3!", "Да ok"),
    ("no_commas", {}, "a b", "a, b"),
    ("quoted", {}, '"yes"', 'He said "yes"'),
    ("bullets", {"count": 2}, "Here:\n- a\n- b", "- a\n-b\n"),
    ("numbered_list", {"count": 2}, "1. a\n2. b", "1. a\n3. b"),
    ("title", {}, "# Boats\nText", "Boats\n# a"),
    ("sections", {"count": 2}, "## A\nx\n## B\ny", "## A\n### B"),
    ("highlighted", {"count": 2}, "**a b** and **c**", "**a** and ** b **"),
    ("json", {}, '```json\n{"a": 1}\n```', '{"a": 1} ok'),
    ("code_block", {}, "x\n```python\na\n```\ny", "x\n```\n\n```"),
    ("two_answers", {}, "one\n---\ntwo", "one\n---\nOne"),
    ("postscript", {}, "Text.\n\nP.S. More", "P.S. More"),
    ("placeholders", {"count": 2}, "[name] and [day]", "[name] and [ ] and [a](b)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "parameters", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_each_kind_tells_a_good_response_from_a_bad_one(kind, parameters, good, bad):
    row = [{"kind": kind, **parameters}]
    verdicts = instructions([good, bad, " \n"], [row] * 3)
    assert [verdict.reason for verdict in verdicts] == ["right", kind, "no answer found"]
    assert verdicts == [1, 0, 0]


@pytest.mark.parametrize(
    ("kind", "parameters", "good", "bad"),
    [
        ("sentences", {"count": 2}, 'The U.S. won at 5 p.m. there. "No!" he said.', '"No!" he said.'),
        ("starts_with", {"text": "Hello"}, "Hello, you", "Helloween"),
        ("ends_with", {"text": "all."}, "That is all.", "That is small."),
        ("avoids", {"words": ["boat"]}, "a bo", "a bo\u200bat"),
        ("no_commas", {}, "a\u201ab ș", "a\ufe50b"),
        ("lower_case", {}, "straße 3", "你好"),
        ("upper_case", {}, "STRASSE 3", "STRAßE"),
        ("capital_words", {"count": 2}, "GPT4 and NASA", "gPT4 and NASA"),
        ("alphabet", {"alphabet": "Hiragana"}, "らーめん", "ラーメン"),
        ("json", {}, '```JSON\n{"a": 1}\n```', '{"a": NaN}'),
    ],
)
def test_what_kinds_mean_at_their_borders(kind, parameters, good, bad):
    row = [{"kind": kind, **parameters}]
    assert [verdict.reason for verdict in instructions([good, bad], [row] * 2)] == ["right", kind]


@pytest.mark.parametrize("text", [".", "…", "\u200b", "🙂", "{}"])
def test_a_response_without_words_follows_nothing(text):
    row = [{"kind": "no_commas"}, {"kind": "max_words", "count": 3}]
    assert instructions([text], [row])[0].reason == "no answer found"


def test_every_kind_has_a_case_and_a_sentence_with_all_its_parameters():
    assert sorted(case[0] for case in CASES) == sorted(KINDS)
    for kind, parameters, _, _ in CASES:
        text = instruction_text(kind, **parameters)
        assert text[0].isupper()
        assert "{" not in text
        for value in parameters.values():
            assert all(str(each) in text for each in (value if isinstance(value, list) else [value]))


def test_the_documentation_lists_every_kind_and_every_verifier():
    page = DOCS.read_text(encoding="utf-8")
    for name, kind in KINDS.items():
        parameters = ", ".join(f"`{each}`" for each in kind.types) or "–"
        assert f"| `{name}` | {parameters} | {kind.text} |\n" in page
    for name in set(verify.__all__) - {"instruction_text"}:
        assert f"`{name}`" in page


def test_all_must_hold_and_partial_gives_the_share():
    row = [{"kind": "max_words", "count": 3}, {"kind": "no_commas"}, {"kind": "lower_case"}, {"kind": "title"}]
    texts = ["a, b", "# a", "A, b c d"]
    assert [(float(each), each.reason) for each in instructions(texts, [row] * 3)] == [
        (0, "no_commas"), (1, "right"), (0, "max_words"),
    ]  # fmt: skip
    assert [(float(each), each.reason) for each in instructions_partial(texts, [row] * 3)] == [
        (0.5, "no_commas"), (1, "right"), (0, "max_words"),
    ]  # fmt: skip


def test_rows_from_parquet_and_json_are_read():
    padded = [{"kind": "max_words", "count": 3, "words": None, "text": None}]
    assert instructions(["a", "a"], [padded, json.dumps(padded)]) == [1, 1]


def test_thoughts_follow_no_instructions():
    row = [{"kind": "no_commas"}]
    found = instructions(["<think>First, I plan.</think>None here.", "<think>Plan</think>\n", "a, b"], [row] * 3)
    assert [verdict.reason for verdict in found] == ["right", "no answer found", "no_commas"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "expected a list of instructions such as"), ([], "expected a list"), ("max_words", "expected a list"),
        ([{"count": 3}], "expected each instruction to be like"), ("[{", "expected"),
        ([{"kind": "max_word", "count": 3}], "one of these kinds instead of 'max_word': alphabet, avoids"),
        ([{"kind": "max_words"}], "expected 'count' of 'max_words' to be a whole number above 0"),
        ([{"kind": "max_words", "count": 0}], "whole number above 0"),
        ([{"kind": "max_words", "count": True}], "whole number above 0"),
        ([{"kind": "max_words", "count": 3, "word": "a"}], r"the parameters of 'max_words' \(count\), without 'word'"),
        ([{"kind": "avoids", "words": "boat"}], "'words' of 'avoids' to be a list of texts"),
        ([{"kind": "alphabet", "alphabet": "Klingon"}], "to be one of Arabic, Cyrillic"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_row_is_named(row, message):
    good = [{"kind": "no_commas"}]
    with pytest.raises(RewardError, match=f"column 'instructions', prompt 2: .*{message}"):
        instructions.check_rows(instructions=[good, row])


def test_a_mistake_in_a_sentence_is_named():
    with pytest.raises(RewardError, match="instruction 'max_words': expected 'count' of 'max_words' to be a whole"):
        instruction_text("max_words", count="three")


@given(st.lists(st.text("abc XYZ", min_size=1).filter(str.strip), min_size=1, max_size=6), st.sampled_from(".!?"))
def test_joined_sentences_are_as_many(parts, end):
    sentences = [f"we {part.strip().lower()} it{end}" for part in parts]
    assert len(split_sentences(" ".join(sentences))) == len(sentences)


def test_long_texts_take_time_in_proportion():
    row = [{"kind": kind, **parameters} for kind, parameters, _, _ in CASES]
    for piece in ("a", ".", "[", "*", "\n", "A. ", "- ", "`", "1. ", "- - ", "[a"):
        instructions([piece * 20_000], [row])
