"""Marks of messages and rows that exclude an answer from what is learned."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest

from kedge.config import Config, DataConfig
from kedge.data import Comparison, encode_example, read_rows
from kedge_base.errors import DataError
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

CHAT = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
HUMAN, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}
GOOD = {"prompt": "a", "completion": "b"}


def learned(row: Any, tokenizer: Any = CHAT, **options: Any) -> list[str]:
    """The text of each run of learned tokens of a row, without EOS."""
    [record] = read_rows([row], "demonstrations", tokenizer=tokenizer, **options).records
    example = encode_example(tokenizer, record.prompt, record.completion, read=record.read)
    ids = [*example.prompt, *example.completion]
    runs: list[list[int]] = []
    before = -2
    for place in example.learned():
        runs = [*runs, []] if place != before + 1 else runs
        runs[-1].append(ids[place])
        before = place
    return [tokenizer.decode(run).removesuffix("<eos>") for run in runs]


def reason(row: Any, tokenizer: Any = CHAT, **options: Any) -> str:
    [rejection] = read_rows(
        [GOOD, row], "demonstrations", tokenizer=tokenizer, max_rejected_fraction=0.5, **options
    ).rejected
    return rejection.reason


def answer(text: str, **flags: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **flags}


EXCLUDING = [
    {"weight": 0},
    {"weight": 0.0},
    {"weight": "0"},
    {"loss": False},
    {"loss": "False"},
    {"loss_mask": 0},
    {"loss_scale": 0},
    {"train": False},
    {"training": False},
    {"trainable": False},
    {"train_on_turn": False},
    {"trainOnTurn": False},
    {"masked": True},
    {"is_masked": 1},
    {"label": False},
    {"weight": 1, "train": False},
]


@pytest.mark.parametrize("flag", EXCLUDING, ids=str)
def test_an_answer_that_its_flags_exclude_is_only_read(flag):
    messages = [USER, answer("Wrong.", **flag), USER, answer("So.")]
    assert learned({"messages": messages}) == ["So."]
    assert learned({"messages": json.dumps(messages)}) == ["So."]
    assert learned({"prompt": [USER], "completion": messages[1:]}) == ["So."]
    shared = [HUMAN, {"from": "gpt", "value": "Wrong.", **flag}, HUMAN, GPT]
    assert learned({"conversations": shared, "system": "Be brief."}) == ["So."]
    assert learned({"messages": [*messages[2:], *messages[:2]]}) == ["So."]  # the last answer is the excluded one
    both = [USER, answer("One."), USER, answer("Wrong.", **flag), USER, answer("Two.")]
    assert learned({"messages": both}) == ["One.", "Two."]
    for row in ({"messages": messages[:2]}, {"prompt": [USER], "completion": messages[1]}):
        assert reason(row).startswith("nothing to learn: the answers are excluded by their flags")
    assert reason({"messages": [*messages[2:], *messages[:2]]}, train_on="last").startswith("nothing to learn")


@pytest.mark.parametrize(
    "flag", [{"weight": 1}, {"train": True}, {"loss_mask": "1"}, {"masked": False}, {"weight": None}], ids=str
)
def test_an_answer_that_its_flags_include_is_learned(flag):
    assert learned({"messages": [USER, answer("One.", **flag), USER, answer("Two.")]}) == ["One.", "Two."]


def test_flags_of_messages_that_are_not_learned_may_say_so():
    read = {"weight": 0, "train": False, "masked": True}
    tool = {"role": "tool", "content": "42", **read}
    messages = [{"role": "system", "content": "Brief.", **read}, {**USER, **read}, answer("One."), tool, answer("Two.")]
    assert learned({"messages": messages}) == ["One.", "Two."]


@pytest.mark.parametrize("name", ["label", "tag", "rating", "score"])
def test_the_class_of_a_turn_is_no_flag(name):
    assert learned({"messages": [{**USER, name: 0}, answer("One.", **{name: 0}), USER, answer("Two.")]}) == [
        "One.",
        "Two.",
    ]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_flag_that_asks_for_another_message_is_refused(role):
    found = reason({"messages": [{"role": role, "content": "Why?", "train": True}, USER, ASSISTANT]})
    assert found.startswith("field 'messages[0].train' is True, which kedge cannot follow: it learns the assistant's ")


@pytest.mark.parametrize(
    "flag",
    [
        {"weight": 0.5},
        {"loss": "no"},
        {"mask": True},
        {"mask": 0},
        {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]},
        {"ignore": True},
        {"skip_loss": True},
        {"exclude": 1},
        {"train_eot": False},
    ],
    ids=str,
)
def test_flags_that_cannot_be_followed_are_refused(flag):
    [name] = flag
    row = {"messages": [USER, answer("Wrong.", **flag), USER, answer("So.")]}
    assert reason(row).startswith(f"field 'messages[1].{name}' is ")


@pytest.mark.parametrize("blank", ["", " ", None, []])
def test_a_system_message_that_is_left_out_moves_no_flag(blank):
    messages = [USER, answer("Wrong.", weight=0), {"role": "system", "content": blank}, USER, answer("So.")]
    assert learned({"messages": messages}) == ["So."]
    assert learned({"messages": [*messages[2:], *messages]}) == ["So.", "So."]
    assert learned({"prompt": "Why?", "completion": messages[1:]}) == ["So."]


def test_the_flags_of_a_comparison_hold_where_it_is_a_demonstration():
    row = {"chosen": [USER, answer("So.", weight=0)], "rejected": [USER, answer("No.")]}
    assert reason(row).startswith("nothing to learn")
    earlier = {name: [USER, answer("Wrong.", weight=0), USER, answer(name)] for name in row}
    assert learned(earlier) == ["chosen"]
    [record] = read_rows([row], "comparisons", tokenizer=CHAT).records
    assert isinstance(record, Comparison)


def test_prompts_keep_the_messages_that_flags_exclude():
    row = {"messages": [USER, answer("Wrong.", weight=0), USER]}
    [prompt] = read_rows([row], "prompts", tokenizer=CHAT).records
    assert prompt.columns["messages"] == [USER, answer("Wrong."), USER]


def test_turns_that_are_cut_keep_what_is_learned():
    messages = [
        USER,
        answer("Long ago. " * 9),
        USER,
        answer("Wrong.", weight=0),
        USER,
        answer("One."),
        USER,
        answer("Two."),
    ]
    whole = learned({"messages": messages[2:]})
    assert learned({"messages": messages}, truncate="keep_end", max_length=120) == whole == ["One.", "Two."]


@pytest.mark.parametrize("num_systems", [0, 1, 2, 3])
def test_of_a_conversation_that_is_cut_the_answers_that_are_left_are_learned(num_systems: int) -> None:
    systems = [{"role": "system", "content": "Be brief."}] * num_systems
    turns = [[USER, answer(f"Number {number}.")] for number in range(6)]
    found = []
    for length in range(60, 400, 20):
        messages = [*systems, *(message for turn in turns for message in turn)]
        with suppress(DataError):
            found.append(learned({"messages": messages}, truncate="keep_end", max_length=length))
    assert {tuple(each) for each in found} == {
        tuple(f"Number {number}." for number in range(start, 6)) for start in range(6)
    }


TURN = "{% for m in messages %}<|{{ m.role }}|>\n"
MARKED = "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
UNMARKED = "{{ m.content }}{{ eos_token }}{{ '\\n' }}"
END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
LAST_ALONE = TURN + "{% if loop.last %}" + MARKED + "{% else %}" + UNMARKED + "{% endif %}" + END
SURE_ALONE = TURN + "{% if m.role == 'assistant' and m.content[0] == 'S' %}" + MARKED.replace("{% gen", "{%- gen")
SURE_ALONE += "{% else %}" + UNMARKED + "{% endif %}" + END


@pytest.mark.parametrize("template", [LAST_ALONE, SURE_ALONE])
def test_answers_that_the_template_does_not_mark_are_only_read(template):
    tokenizer = tiny_tokenizer(chat_template=template)
    messages = [USER, answer("Wrong."), USER, answer("So.")]
    oracle: Any = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [token for token, mask in zip(oracle["input_ids"], oracle["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "So.<eos>"
    assert learned({"messages": messages}, tokenizer) == ["So."]


def test_an_answer_alone_that_the_template_does_not_mark_is_refused():
    tokenizer = tiny_tokenizer(chat_template=SURE_ALONE)
    assert reason({"messages": [USER, answer("Wrong.")]}, tokenizer).startswith("nothing to learn")


BAD = [
    {"label": False},
    {"label": 0},
    {"label": "False"},
    {"label": "bad"},
    {"kto_tag": False},
    {"desirable": False},
    {"undesirable": True},
    {"score": 0},
    {"reward": -1.5},
    {"chosen": False},
    {"rejected": True},
    {"is_correct": False},
    {"correctness": 0},
    {"helpfulness_rating": 0},
    {"thumbsUp": False},
    {"feedback": "negative"},
    {"helpfulness": 0},
    {"pass_rate": 0.0},
    {"deleted": True},
    {"weight": 0},
    {"loss_mask": [0, 0]},
]


@pytest.mark.parametrize("mark", BAD, ids=str)
def test_an_answer_that_a_column_calls_bad_is_not_learned(mark):
    [name] = mark
    forms = (
        {"prompt": "Why?", "completion": " No."},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"messages": [USER, ASSISTANT]},
        {"conversations": [HUMAN, GPT]},
        {"instruction": "Why?", "input": "", "output": "No."},
        {"question": "Why?", "answer": "No."},
    )
    for form in forms:
        found = reason({**form, **mark})
        assert found.startswith(f"field {name!r} is ")
        assert found.endswith(f"rename it: data.columns.demonstrations.{name}_other={name}")
        renamed = {f"demonstrations.{name}_other": name}
        assert len(read_rows([{**form, **mark}], "demonstrations", tokenizer=CHAT, columns=renamed).records) == 1
    with pytest.raises(DataError, match=r"1 of 2 rows .* cannot be used, .*max_rejected_fraction=0.05 allows"):
        read_rows([GOOD, {**forms[0], **mark}], "demonstrations", tokenizer=CHAT, max_rejected_fraction=0.05)


def test_the_advice_can_be_followed_for_several_columns():
    names = ["label", "chosen", "rejected", "loss_mask", "helpfulness_rating", "kto_tag"]
    row = {"prompt": "Why?", "completion": " So.", **dict.fromkeys(names, 0), "rejected": True}
    columns: dict[str, str] = {}
    for _ in names:
        with pytest.raises(DataError) as caught:
            read_rows([row], "demonstrations", tokenizer=CHAT, columns=columns)
        [(ours, theirs)] = re.findall(r"data\.columns\.([\w.]+)=(\w+)", str(caught.value))
        columns[ours] = theirs
    assert Config(data=DataConfig(columns=columns)).data.columns == columns
    assert sorted(columns.values()) == sorted(names)
    assert learned(row, columns=columns) == [" So."]


@pytest.mark.parametrize(
    "mark",
    [{"label": True}, {"kto_tag": 1}, {"score": 1}, {"undesirable": False}, {"label": None}, {"label": float("nan")},
     {"label": "physics"}, {"rejected": ""}, {"source": 0}, {"id": 0}, {"labels": [0, 1]}, {"category": False}],
    ids=str,
)  # fmt: skip
def test_other_columns_do_not_matter(mark):
    assert learned({"prompt": "Why?", "completion": " So.", **mark}) == [" So."]


def test_classifications_and_pairs_are_read_as_before():
    assert learned({"text": "A dull film.", "label": 0}) == [" dull film."]  # the first token has no context
    assert learned({"prompt": "A dull film.", "completion": " negative", "label": "negative"}) == [" negative"]
    assert learned({"input": "Why?", "output_1": "No.", "output_2": "So.", "label": 2, "score": 0}) == ["So."]


def test_columns_that_grade_answers_are_named():
    rows = [{"prompt": "Why?", "completion": " So.", "rating": rating, "label": 1} for rating in (5, 1)]
    table = read_rows(rows, "demonstrations", tokenizer=CHAT)
    assert table.notes == ["answers are learned regardless of 'rating'"]
    assert len(table.records) == 2


@pytest.mark.parametrize("number", [0.0, -3.2, 0.5, 1, "0", False])
@pytest.mark.parametrize("name", ["toxicity_score", "sentimentScore", "instruct_reward"])
def test_numbers_whose_low_values_may_be_good_refuse_no_row(name, number):
    rows = [{"prompt": "Why?", "completion": " So.", name: each} for each in (number, 0.7)]
    table = read_rows(rows, "demonstrations", tokenizer=CHAT)
    assert len(table.records) == 2
    assert table.notes == [f"answers are learned regardless of {name!r}"]
