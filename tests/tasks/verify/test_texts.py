"""Choices, matches, patterns, tags and JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.rewards.function import FunctionReward
from kedge.rewards.source import Responses
from kedge_base.errors import RewardError
from kedge_tasks.verify import choice, exact, f1, json_schema, normalized, number, pattern, tags

CITIES = ["London", "Paris", "New York", "York"]


def reason(verifier, text, *columns, **more):
    [verdict] = verifier([text], *([column] for column in columns), **more)
    assert float(verdict) == (verdict.reason == "right")
    return verdict.reason


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "(B)",
        "B.",
        "b",
        "[B]",
        "The answer is [[B]].",
        "**B**",
        "B) Paris",
        "B. Paris",
        "The answer is B",
        "The answer is B because …",
        "The answer is (B).",
        "Answer: B",
        r"\boxed{B}",
        r"so $\boxed{\text{B}}$",
        "#### B",
        "answer is **B**",
        "A is in England.\nB",
        "I choose option B.",
        "I think (B) is right",
        "Paris",
        "It is Paris, of course.",
        "The answer is A. No: the answer is B.",
        "The correct option is B",
        "Final answer = B",
        "The answer is B. Option A is wrong.",
        "Answer: (B)\n\nOption C (New York) is in America.",
        "The answer is b.",
        "the answer is (b), of course",
        "Answer: b",
        'The answer is "B".',
        "B!",
        "I choose B.",
        "The answer should be B",
        "<think>Option A?</think><answer>B</answer>",
        "<think>London?</think> Paris",
    ],
)
def test_the_chosen_option_is_found(text):
    assert reason(choice, text, "B", CITIES) == "right"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A", "wrong choice"),
        ("The answer is C, not B", "wrong choice"),
        ("London", "wrong choice"),
        ("New York", "wrong choice"),
        ("The answer is A or B", "several answers"),
        ("Answer: A, B", "several answers"),
        ("Either (A) or (B)", "several answers"),
        ("A. London\nB. Paris", "several answers"),
        ("London or Paris", "several answers"),
        ("A big city", "no answer found"),
        ("I do not know", "no answer found"),
        ("The answer is not B", "no answer found"),
        ("", "no answer found"),
        ("The answer is E", "wrong choice"),
        ("The answer is A. Option B is the capital of France, so it is wrong here.", "wrong choice"),
        ("The answer is A because choice B is not a city.", "wrong choice"),
        ("The answer is a city", "no answer found"),
        ("I choose a city", "no answer found"),
    ],
)
def test_what_is_no_right_choice_says_why(text, expected):
    assert reason(choice, text, "B", CITIES) == expected


def test_the_right_option_is_named_by_letter_text_or_place():
    for answer in ("B", "(b)", "paris", 1, "1"):
        assert reason(choice, "B", answer, CITIES) == "right"
    assert reason(choice, "B", "B", None) == "right"
    assert reason(choice, "C", "C", {"text": CITIES, "label": ["A", "B", "C", "D"]}) == "right"
    assert reason(choice, "New York", "C", CITIES) == "right"  # not also York
    assert reason(choice, "we look at (A", "B", CITIES, stopped=[False]) == "cut off"


def test_a_column_by_another_name_lets_two_tasks_be_mixed():
    def sums(completions, total, stopped=None):
        return number(completions, total, stopped)

    sums.__dict__["check_rows"] = lambda total: number.check_rows(answer=total)
    columns = {"total": [12, None], "answer": [None, "B"]}
    responses = Responses(["?", "?"], ["12", "B"], [[1], [1]], [[1], [1]], [True, True], columns)
    for function, expected in ((sums, [1.0, None]), (choice, [None, 1.0])):
        source = FunctionReward(function, skips_missing=True)
        source.check(columns)
        assert source.score(responses) == expected


def test_options_that_are_numbers_keep_their_sign_and_their_point():
    assert reason(choice, "-2", "-2", ["-2", "2"]) == "right"
    assert reason(choice, "2", "A", ["-2", "3"]) == "no answer found"
    assert reason(choice, "It is 15.", "1.5", ["1.5", "15"]) == "wrong choice"
    assert reason(normalized, "-2", "2") == "wrong text"
    assert reason(normalized, "1,000.", "1000") == "right"


def test_an_answer_in_its_tag_is_read_by_all():
    text = "<think>Not 7, nor Rome.</think>\n<answer> 42 </answer>"
    for verifier in (exact, normalized, number):
        assert reason(verifier, text, "42") == "right"
    assert reason(json_schema, text, {"type": "integer"}) == "right"
    assert reason(tags, text) == "right"


def test_lists_may_be_written_as_json_as_in_a_cell_of_a_csv_file():
    assert reason(choice, "It is Paris.", "B", json.dumps(CITIES)) == "right"
    assert reason(choice, "C", "C", json.dumps({"text": CITIES, "label": [*"ABCD"]})) == "right"
    assert reason(choice, "B", "B", "") == "right"
    for verifier in (exact, normalized):
        assert reason(verifier, "Paris", '["Lutetia", "Paris"]') == "right"
        assert reason(verifier, '["Lutetia", "Paris"]', '["Lutetia", "Paris"]') == "right"
        assert reason(verifier, "1", "[1, 2]") == "wrong text"
    with pytest.raises(RewardError, match="expected `choices` as a list, or as a mapping of labels to texts"):
        choice.check_rows(answer=["A"], choices=["Paris or London"])


@pytest.mark.parametrize(
    ("answer", "choices"),
    [("Rome", CITIES), ("Paris", None), (4, CITIES), (None, CITIES), ("4", CITIES), ("1", {"A1": "x"})],
)
def test_a_row_without_a_right_option_is_named(answer, choices):
    with pytest.raises(RewardError, match=r"column 'answer', prompt 1: .* is not usable; expected"):
        choice.check_rows(answer=[answer], choices=[choices])


@given(
    st.sampled_from("ABCD"),
    st.sampled_from("ABCD"),
    st.sampled_from(["{}", "({})", "{}.", "**{}**", "The answer is {}."]),
)
def test_each_letter_is_right_for_itself_alone(given_letter, right, form):
    found = reason(choice, form.format(given_letter), right, CITIES)
    assert found == ("right" if given_letter == right else "wrong choice")


def test_exact_and_normalized_matches():
    assert reason(exact, " Paris\n", "Paris") == "right"
    assert reason(exact, "paris", "Paris") == "wrong text"
    assert reason(exact, "Paris", ["Lutetia", "Paris"]) == "right"
    assert reason(exact, "Par", "Par", stopped=[False]) == "cut off"
    assert reason(normalized, "The  paris!", "Paris") == "right"
    assert reason(normalized, "Paris, France", "Paris") == "wrong text"
    assert reason(normalized, " ", "Paris") == "no answer found"
    assert reason(normalized, "(a)", "A") == reason(normalized, "The", "the") == reason(normalized, "!", "!") == "right"
    for text in ("the", "B", "!", "..."):
        assert reason(normalized, text, "A") == "wrong text"
    with pytest.raises(RewardError, match="expected a text, or a list"):
        exact.check_rows(answer=[""])


@pytest.mark.parametrize(
    ("text", "answer", "score", "why"),
    [
        ("Denver Broncos", "Denver Broncos", 1.0, "right"),
        ("the broncos, Denver!", "Denver Broncos", 1.0, "right"),
        ("It is Denver Broncos", "Denver Broncos", 2 / 3, "partly right"),  # precision 2/4, recall 2/2
        ("Denver Denver", "Denver Broncos", 0.5, "partly right"),  # the second Denver is not shared
        ("Carolina", "Denver Broncos", 0.0, "wrong text"),
        ("It is Paris", ["Paris, France", "Paris"], 0.5, "partly right"),  # the better of 2/5 and 1/2
        ("<think>Lyon</think>Nice", "Nice", 1.0, "right"),
        (" ", "Nice", 0.0, "no answer found"),
    ],
)
def test_f1_of_shared_words(text, answer, score, why):
    [verdict] = f1([text], [answer])
    assert (float(verdict), verdict.reason) == (pytest.approx(score), why)


WORDS = st.lists(st.sampled_from(["red", "green", "blue", "7"]), min_size=1, max_size=6)


@given(WORDS, WORDS)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(response, answer):
    left, shared = [*answer], 0
    for word in response:
        if word in left:
            left.remove(word)
            shared += 1
    precision, recall = shared / len(response), shared / len(answer)
    expected = 2 * precision * recall / (precision + recall) if shared else 0.0
    assert f1([" ".join(response)], [" ".join(answer)]) == pytest.approx([expected])
    assert f1(["7"], ["7"], stopped=[False])[0].reason == "cut off"


def test_patterns():
    assert reason(pattern, "a boat", "b.at") == "right"
    assert reason(pattern, "a boat", r"\Ab.at\Z") == "no match"
    assert reason(pattern, "a bo", "b.at", stopped=[False]) == "cut off"
    with pytest.raises(
        RewardError, match=r"column 'pattern', prompt 2: '\(' is not usable; expected a regular expression"
    ):
        pattern.check_rows(pattern=["a", "("])


def test_thoughts_are_skipped_by_patterns_that_do_not_name_them():
    assert reason(pattern, "<think>42?</think>It is 7.", "42") == "no match"
    assert reason(pattern, "<think>7?</think>42", r"\A42\Z") == "right"
    assert reason(pattern, "<think>7?</think>42", r"\A<think>.*</think>42\Z") == "right"


def test_a_catastrophic_pattern_is_stopped():
    found = pattern(["a" * 40 + "b", "aab"], ["(a+)+$", "b"])
    assert [verdict.reason for verdict in found] == ["took too long", "right"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a < b</think><answer>c</answer>", "right"),
        ("<think>a</think>\n<answer>c</answer>\n", "right"),
        ("<think><i>a</i></think><answer>c</answer>", "right"),
        ("a<think>a</think><answer>c</answer>", "text outside the tags"),
        ("<think>a</think>b<answer>c</answer>", "text outside the tags"),
        ("<think>a</think>", "missing tag"),
        ("<answer>c</answer><think>a</think>", "tags out of order"),
        ("<think> </think><answer>c</answer>", "empty tag"),
        ("<think>a</think><answer>c</answer><answer>d</answer>", "tags out of order"),
        ("c", "missing tag"),
    ],
)
def test_tags(text, expected):
    assert reason(tags, text) == expected


def test_a_tag_at_the_end_of_the_prompt_counts():
    assert reason(tags, "a</think><answer>c</answer>", "Q\n<think>\n") == "right"
    assert reason(tags, "a</think><answer>c</answer>", "Q") == "missing tag"
    assert reason(tags, "<think>a", stopped=[False]) == "cut off"
    assert reason(tags, "<a>b</a>", names=["a"]) == "right"


@pytest.mark.parametrize("names", ["think", [], ["think", ""], [1]])
def test_names_that_are_no_list_of_tags_are_found_before_the_run(names):
    """`names: think` would be five tags of a letter each, which no response has."""
    with pytest.raises(RewardError, match=r"^tags: names=.*: expected a list of names, such as \[think, answer\]"):
        FunctionReward(tags, settings={"names": names}).check({})


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"age": 3}', "right"),
        ('```json\n{"age": 3}\n```', "right"),
        ('Here:\r\n  ```JSON\r\n{"age": 3}\r\n  ```', "right"),
        ('```python\nprint(3)\n```\n```json\n{"age": 3}\n```\n```text\nDone\n```', "right"),
        ("```python\n3\n```", "not JSON"),
        ('<think>{}</think>{"age": 3}', "right"),
        ('{"age": "3"}', "against the schema"),
        ("{}", "against the schema"),
        ('{"age": 3} ok', "not JSON"),
        ("three", "not JSON"),
        ('{"age": NaN}', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_json_against_a_schema(text, expected):
    pytest.importorskip("jsonschema")
    assert reason(json_schema, text, SCHEMA) == reason(json_schema, text, json.dumps(SCHEMA)) == expected


def test_unusable_schemas_and_hostile_ones():
    pytest.importorskip("jsonschema")
    for schema in ({"type": "integr"}, "{", 3):
        with pytest.raises(RewardError, match=r"column 'schema', prompt 1: .* is not usable; expected a JSON schema"):
            json_schema.check_rows(schema=[schema])
    for missing in ("http://localhost/none", "#/$defs/none"):
        nested = {"properties": {"a": {"prefixItems": [{"$ref": missing}]}}, "$defs": {"a": {"enum": [{"$ref": "no"}]}}}
        with pytest.raises(RewardError, match=r"expected a JSON schema that contains what it refers to, '.*none'"):
            json_schema.check_rows(schema=[nested])
    inner = {"$defs": {"b": {"$id": "http://localhost/b", "$ref": "none"}}, "$ref": "#/$defs/b"}
    with pytest.raises(RewardError, match="which it does not contain"):
        json_schema(["3"], [inner])
    slow = {"type": "string", "pattern": "^(a+)+$"}
    assert reason(json_schema, '"' + "a" * 40 + 'b"', slow) == "took too long"
    assert reason(json_schema, '{"age": ', SCHEMA, stopped=[False]) == "cut off"
