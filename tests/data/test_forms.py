"""Rows as other projects write them, under other names, as objects and as token ids."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.data import (
    Comparison,
    Demonstration,
    Prompt,
    encode_example,
    encode_prompt,
    read_comparisons,
    read_demonstrations,
    read_prompts,
)
from kedge.errors import DataError
from tests.tiny import CHAT_TEMPLATE, tiny_sentencepiece_tokenizer, tiny_tokenizer

PLAIN, CHAT = tiny_tokenizer(), tiny_tokenizer(chat_template=CHAT_TEMPLATE)
RENDERED = "<|user|>\nWhy?\n<|assistant|>\n"
HUMAN, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}
USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
OTHER = {"role": "assistant", "content": "No."}


def only(table: Any) -> Any:
    """The single record of a table without rejections; else the reasons."""
    return table.records[0] if not table.rejected else [rejection.reason for rejection in table.rejected]


def reasons(read: Any, good: dict[str, Any], row: dict[str, Any], tokenizer: Any = CHAT) -> list[str]:
    table = read([good, row], tokenizer=tokenizer, max_rejected_fraction=0.5)
    return [rejection.reason for rejection in table.rejected]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [HUMAN, GPT]},
        {"conversations": [USER, ASSISTANT], "text": "Why? So."},
        {"conversation": [HUMAN, GPT], "source": "x"},
        {"messages": [HUMAN, GPT]},
        {"prompt": USER, "completion": ASSISTANT},
        {"instruction": "Why?", "input": "", "output": "So.", "text": "### Instruction: Why?"},
    ],
)
def test_demonstrations_of_other_projects(row):
    assert only(read_demonstrations([row], tokenizer=CHAT)) == Demonstration(RENDERED, "So.")


def test_a_system_column_is_the_first_message():
    row = {"conversations": [HUMAN, GPT], "system": "Brief."}
    system = {"role": "system", "content": "Brief."}
    text = CHAT.apply_chat_template([system, USER], tokenize=False, add_generation_prompt=True)
    assert only(read_demonstrations([row], tokenizer=CHAT)).prompt == text
    row = {"instruction": "Why?", "output": "So.", "system": "Brief."}
    assert only(read_demonstrations([row], tokenizer=CHAT)).prompt == text


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}},
        {"prompt": "Why?", "chosen": ASSISTANT, "rejected": OTHER},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
        {"prompt": "Why?", "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        {"messages": [USER], "chosen": "So.", "rejected": "No."},
        {"instruction": "Why?", "input": "", "chosen": "So.", "rejected": "No."},
        {"question": "Why?", "chosen": "So.", "rejected": "No."},
    ],
)
def test_comparisons_of_other_projects(row):
    assert only(read_comparisons([row], tokenizer=CHAT)) == Comparison(RENDERED, "So.", "No.")


def test_prompts_of_other_projects():
    found = only(read_prompts([{"conversations": [HUMAN, GPT], "id": 3}], tokenizer=CHAT))
    assert found == Prompt(RENDERED, {"id": 3, "messages": [USER]})
    found = only(read_prompts([{"instruction": "Why?", "input": "Sea", "output": "So."}], tokenizer=CHAT))
    assert found.text == "<|user|>\nWhy?\nSea\n<|assistant|>\n"
    assert found.columns["completion"] == "So."


def test_alpaca_rows_without_a_chat_template_get_the_prompt_of_alpaca():
    row = {"instruction": "Sort.", "input": "b a", "output": "a b"}
    record = only(read_demonstrations([row], tokenizer=PLAIN))
    assert record.prompt.startswith("Below is an instruction that describes a task, paired with an input that ")
    assert record.prompt.endswith("### Instruction:\nSort.\n\n### Input:\nb a\n\n### Response:\n")
    assert record.completion == "a b"
    assert "### Input" not in only(read_demonstrations([{**row, "input": ""}], tokenizer=PLAIN)).prompt


def test_an_unknown_speaker_is_a_bad_row():
    good, bad = {"messages": [USER, ASSISTANT]}, {"conversations": [{"from": "bard", "value": "x"}, GPT]}
    [reason] = reasons(read_demonstrations, good, bad)
    assert reason.startswith("field 'conversations[0].from' is 'bard', expected one of system, human")


@pytest.mark.parametrize("tokenizer", [PLAIN, tiny_sentencepiece_tokenizer()])
def test_token_ids_are_used_as_they_are(tokenizer):
    example = encode_example(tokenizer, "The boat lay", " at anchor.")
    ids = [*example.prompt, *example.completion]
    labels = [-100] * len(example.prompt) + example.completion
    mask = [0] * len(example.prompt) + [1] * len(example.completion)
    padded = {"input_ids": [*ids, 0, 0], "labels": [*labels, -100, -100], "attention_mask": [1] * len(ids) + [0, 0]}
    for row in ({"input_ids": ids, "labels": labels}, {"input_ids": ids, "completion_mask": mask}, padded):
        record = only(read_demonstrations([row], tokenizer=tokenizer))
        assert record == Demonstration("The boat lay", " at anchor.")
    prompt = only(read_prompts([{"input_ids": example.prompt, "id": 1}], tokenizer=tokenizer))
    assert (prompt.text, prompt.columns) == ("The boat lay", {"id": 1})
    assert encode_prompt(tokenizer, prompt.text) == example.prompt
    whole = only(read_demonstrations([{"input_ids": ids}], tokenizer=tokenizer))
    assert whole == Demonstration("", "The boat lay at anchor.")


def test_token_ids_that_cannot_be_used_are_bad_rows():
    text = "The boat lay at"
    good, ids = {"prompt": "a", "completion": "b"}, encode_prompt(PLAIN, text)
    letters = [encode_prompt(PLAIN, letter)[0] for letter in text]  # the same text, in other tokens
    assert len(ids) < len(letters)
    for row, reason in (
        ({"input_ids": [10**6]}, "token id 1000000 is not in the vocabulary"),
        ({"input_ids": letters}, "would encode the text of 'input_ids' to other ids"),
        ({"input_ids": ids, "labels": [1]}, f"field 'labels' has 1 entries, 'input_ids' has {len(ids)}"),
        ({"input_ids": ids, "labels": [1] * (len(ids) - 1) + [-100]}, "only the end can be trained on"),
    ):
        assert reason in reasons(read_demonstrations, good, row, PLAIN)[0]
    row = {"chosen_input_ids": [1], "rejected_input_ids": [2]}
    assert "as token ids" in reasons(read_comparisons, {**good, "chosen": "b", "rejected": "c"}, row, PLAIN)[0]


def test_columns_are_renamed():
    rows = [{"dialogue": "Why?", "summary": " So.", "prompt": "unused"}]
    columns = {"prompt": "dialogue", "completion": "summary"}
    assert only(read_demonstrations(rows, tokenizer=PLAIN, columns=columns)) == Demonstration("Why?", " So.")
    found = only(read_prompts(rows, tokenizer=PLAIN, columns=columns))
    assert (found.text, found.columns) == ("Why?", {"completion": " So."})
    # A column of one kind of data, and two of ours that swap their names.
    swapped = {"prompts.prompt": "completion", "completion": "prompt"}
    found = only(read_prompts([{"prompt": "a", "completion": "b"}], tokenizer=PLAIN, columns=swapped))
    assert (found.text, found.columns) == ("b", {"completion": "a"})
    # A named conversation wins over the text beside it.
    row = {"prompt": "plain", "turns": [USER]}
    assert only(read_prompts([row], tokenizer=CHAT, columns={"messages": "turns"})).text == RENDERED


def test_a_named_column_that_is_missing_names_those_that_exist():
    rows = [{"dialogue": "Why?", "summary": " So."}]
    with pytest.raises(DataError) as raised:
        read_demonstrations(rows, tokenizer=PLAIN, columns={"prompt": "dialog", "completion": "summary"})
    assert str(raised.value).startswith(
        "data.columns.prompt=dialog: list has no column 'dialog'; its columns are 'dialogue', 'summary'"
    )
    # References are optional in prompts, and columns of other kinds of data are not looked for.
    columns = {"prompt": "dialogue", "completion": "nowhere", "demonstrations.text": "x", "margin": "y"}
    assert only(read_prompts(rows, tokenizer=PLAIN, columns=columns)).text == "Why?"
    with pytest.raises(DataError, match=r"; data\.columns\.prompt=… names a column that holds it$"):
        read_prompts(rows, tokenizer=PLAIN)
