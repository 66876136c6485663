"""Rows as other projects write them, under other names, as objects and as token ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kedge.data import (
    Comparison,
    Demonstration,
    Prompt,
    encode_example,
    encode_prompt,
    read_rows,
)
from kedge.data.fields import Role
from kedge.stages.policy import read_references
from kedge_base.errors import DataError
from tests.tiny import CHAT_TEMPLATE, tiny_sentencepiece_tokenizer, tiny_tokenizer

PLAIN, CHAT = tiny_tokenizer(), tiny_tokenizer(chat_template=CHAT_TEMPLATE)
RENDERED = "<|user|>\nWhy?\n<|assistant|>\n"
HUMAN, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}
USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
OTHER = {"role": "assistant", "content": "No."}


def only(table: Any) -> Any:
    """The single record of a table without rejections; else the reasons."""
    return table.records[0] if not table.rejected else [rejection.reason for rejection in table.rejected]


def reasons(role: Role, good: dict[str, Any], row: dict[str, Any], tokenizer: Any = CHAT) -> list[str]:
    table = read_rows([good, row], role, tokenizer=tokenizer, max_rejected_fraction=0.5)
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
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT)) == Demonstration(RENDERED, "So.")


def test_the_context_of_an_instruction_is_asked_with_it():
    row = {"instruction": "Where?", "context": "It is at sea.", "response": "At sea."}
    [prompt] = read_rows([row], "prompts", tokenizer=CHAT).records
    assert prompt.text == "<|user|>\nWhere?\nIt is at sea.\n<|assistant|>\n"
    [record] = read_rows([row], "demonstrations", tokenizer=CHAT, columns={"output": "response"}).records
    assert record == Demonstration(prompt.text, "At sea.")


@pytest.mark.parametrize("context", [["It is at sea."], {"passages": ["It is at sea."]}, 7, None, ""])
def test_a_context_that_is_no_text_is_left_to_reward_functions(context):
    row = {"instruction": "Why?", "output": "So.", "context": context}
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT)) == Demonstration(RENDERED, "So.")
    prompt = only(read_rows([row], "prompts", tokenizer=CHAT))
    assert (prompt.text, prompt.columns["context"]) == (RENDERED, context)


def test_a_system_column_is_the_first_message():
    row = {"conversations": [HUMAN, GPT], "system": "Brief."}
    system = {"role": "system", "content": "Brief."}
    text = CHAT.apply_chat_template([system, USER], tokenize=False, add_generation_prompt=True)
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT)).prompt == text
    row = {"instruction": "Why?", "output": "So.", "system": "Brief."}
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT)).prompt == text


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
    assert only(read_rows([row], "comparisons", tokenizer=CHAT)) == Comparison(RENDERED, "So.", "No.")


HH = {"chosen": "\n\nHuman: Why?\n\nAssistant: So it is.", "rejected": "\n\nHuman: Why?\n\nAssistant: So what?"}
HH_PROMPT = "\n\nHuman: Why?\n\nAssistant:"
NULLS = {"prompt": None, "completion": None, "chosen": None, "rejected": None, "messages": None, "text": None}


@pytest.mark.parametrize(
    ("row", "prompt", "better", "worse"),
    [
        (HH, HH_PROMPT, " So it is.", " So what?"),
        ({"prompt": "Why?", "chosen": " So.", "rejected": " No."}, "Why?", " So.", " No."),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, RENDERED, "So.", "No."),
        ({"prompt": "Why?", "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, RENDERED, "So.", "No."),
        ({"prompt": [USER], "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, RENDERED, "So.", "No."),
        ({"prompt": "Why?", "chosen": [ASSISTANT], "rejected": [OTHER]}, RENDERED, "So.", "No."),
        ({"prompt": "Why?", "chosen": ASSISTANT, "rejected": OTHER}, RENDERED, "So.", "No."),
        (
            {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}},
            RENDERED,
            "So.",
            "No.",
        ),
        ({"question": "Why?", "chosen": "So.", "rejected": "No."}, RENDERED, "So.", "No."),
        ({"instruction": "Why?", "chosen": "So.", "rejected": "No."}, RENDERED, "So.", "No."),
        ({"input": "Why?", "output_1": "So.", "output_2": "No.", "label": 1}, RENDERED, "So.", "No."),
        ({"input": "Why?", "output_1": "No.", "output_2": "So.", "label": "2"}, RENDERED, "So.", "No."),
        ({"instruction": "Why?", "output_1": "No.", "output_2": "So.", "preference": 2}, RENDERED, "So.", "No."),
        ({"prompt": "Why?", "response_0": "So.", "response_1": "No.", "better_response_id": 0}, "Why?", "So.", "No."),
        ({"prompt": "Why?", "response_a": "No.", "response_b": "So.", "winner": "model_b"}, "Why?", "So.", "No."),
        (
            {"conversation_a": [USER, ASSISTANT], "conversation_b": [USER, OTHER], "winner": "model_a"},
            RENDERED,
            "So.",
            "No.",
        ),
        ({**NULLS, **HH}, HH_PROMPT, " So it is.", " So what?"),
    ],
)
def test_a_comparison_has_the_same_prompt_in_every_role(row, prompt, better, worse):
    assert only(read_rows([row], "comparisons", tokenizer=CHAT)) == Comparison(prompt, better, worse)
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT)) == Demonstration(prompt, better)
    found = only(read_rows([row], "prompts", tokenizer=CHAT))
    assert found.text == prompt
    assert read_references([found], template="none") == [better]


@pytest.mark.parametrize("prompt", ["Why?", USER, [USER]])
def test_a_completion_that_repeats_its_prompt_is_the_whole_conversation(prompt):
    row = {"prompt": prompt, "completion": [USER, ASSISTANT]}
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT)) == Demonstration(RENDERED, "So.")
    system = {"role": "system", "content": "Be brief."}
    if prompt == "Why?":
        row = {"prompt": prompt, "completion": [system, USER, ASSISTANT]}
        expected = Demonstration(f"<|system|>\nBe brief.\n{RENDERED}", "So.")
        assert only(read_rows([row], "demonstrations", tokenizer=CHAT)) == expected


@pytest.mark.parametrize("prompt", ["Why?", USER, [USER]])
def test_responses_that_repeat_their_prompt_are_whole_conversations(prompt):
    row = {"prompt": prompt, "responses": [[USER, OTHER], [USER, ASSISTANT]], "ranks": [2, 1]}
    [better, worse] = (only(read_rows([row], "comparisons", tokenizer=CHAT)).responses[place] for place in (1, 0))
    assert only(read_rows([row], "comparisons", tokenizer=CHAT)).prompt == RENDERED
    assert (better, worse) == ("So.", "No.")


def test_rankings_demonstrate_their_best_answer():
    scored = [{"response": "No.", "overall_score": 3.0}, {"response": "So.", "overall_score": "8"}]
    ranked = {"prompt": "Why?", "responses": ["No.", "So.", "Well."], "ranks": [3, 1, 2]}
    valued = {"prompt": "Why?", "responses": ["No.", "So.", "Well."], "scores": [-3.5, 2, "0.5"]}
    forms = (({"instruction": "Why?", "completions": scored}, RENDERED), (ranked, "Why?"), (valued, "Why?"))
    for row, prompt in forms:
        assert only(read_rows([row], "demonstrations", tokenizer=CHAT)) == Demonstration(prompt, "So.")
        assert only(read_rows([row], "prompts", tokenizer=CHAT)).text == prompt
        ranking = only(read_rows([row], "comparisons", tokenizer=CHAT))
        assert ranking.prompt == prompt
        assert ranking.ranks[0] > ranking.ranks[1]


def test_a_pair_with_another_label_is_a_bad_row():
    good, bad = {"prompt": "a", "chosen": "b", "rejected": "c"}, {"input": "a", "output_1": "b", "output_2": "c"}
    [reason] = reasons("comparisons", good, {**bad, "label": 0})
    form = "expected 1 ('output_1' is better) or 2 ('output_2')"
    assert reason == f"field 'label' is 0, {form}; add 1 to labels that count from 0"
    for row in ({**bad, "label": 0}, {"instruction": "a", "completions": [{"response": "b"}, {"response": "c"}]}):
        prompt = only(read_rows([row], "prompts", tokenizer=CHAT))
        assert prompt.text == RENDERED.replace("Why?", "a")
    for label in ("b", True, 3):
        assert reasons("comparisons", good, {**bad, "label": label})[0] == f"field 'label' is {label!r}, {form}"
    tie = {"conversation_a": [USER, ASSISTANT], "conversation_b": [USER, OTHER], "winner": "tie (bothbad)"}
    assert reasons("comparisons", good, tie)[0].startswith("field 'winner' is 'tie (bothbad)', expected model_a (")
    prompt = only(read_rows([tie], "prompts", tokenizer=CHAT))
    assert prompt.text == RENDERED
    assert not prompt.columns.keys() & {"chosen", "rejected", "completion"}


def test_margins_that_are_not_read_are_refused():
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0}
    [reason] = reasons("comparisons", good, {**good, "margin": -0.5})
    assert reason == "field 'margin' is -0.5, expected at least 0: swap 'chosen' and 'rejected' instead"
    for margin in ({"margin": 1.0}, {"margins": [1.0]}):
        [reason] = reasons("comparisons", good, {"prompt": "a", "responses": ["b", "c"], "ranks": [1, 2], **margin})
        assert reason.startswith("a ranking has no margin: leave 'margin' out, or write 'chosen' and 'rejected'")
    assert only(
        read_rows(
            [{"prompt": "a", "responses": ["b", "c"], "ranks": [1, 2], "margin": None}], "comparisons", tokenizer=CHAT
        )
    )


def test_a_pair_that_the_template_makes_equal_names_the_template():
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim"))
    pair = {
        "prompt": [USER],
        "chosen": [{**ASSISTANT, "content": "Here "}],
        "rejected": [{**ASSISTANT, "content": "Here"}],
    }
    [reason] = reasons("comparisons", {"prompt": "a", "chosen": "b", "rejected": "c"}, pair, tokenizer)
    assert (
        reason
        == "fields 'chosen' and 'rejected' hold the same answer, once special tokens and the chat template are added"
    )


def test_comparisons_with_tldr_posts_demonstrate_the_better_summary():
    row = {"subreddit": "sailing", "title": "Help", "post": "It broke.", "chosen": "rope broke", "rejected": "a post"}
    assert only(read_rows([row], "demonstrations", tokenizer=PLAIN, template="tldr")).completion == " rope broke"


@pytest.mark.parametrize("null", [None, float("nan"), "", " \n", []])
def test_null_columns_of_concatenated_data_sets_are_absent(null):
    nulls = dict.fromkeys(NULLS, null)
    for row, text in (
        ({"messages": [USER, ASSISTANT]}, Demonstration(RENDERED, "So.")),
        ({"prompt": "Why?", "completion": " So."}, Demonstration("Why?", " So.")),
        ({"text": "Why?"}, Demonstration("", "Why?")),
        ({"instruction": "Why?", "input": null, "output": "So."}, Demonstration(RENDERED, "So.")),
        ({"conversations": [HUMAN, GPT]}, Demonstration(RENDERED, "So.")),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, Demonstration(RENDERED, "So.")),
    ):
        assert only(read_rows([{**nulls, **row}], "demonstrations", tokenizer=CHAT)) == text
        assert only(read_rows([{**nulls, **row}], "prompts", tokenizer=CHAT)).text == (text.prompt or text.completion)
    # Where none of the forms has its fields, the row says so; reward functions still take a column of nulls.
    assert "field 'completion' is null" in reasons("demonstrations", {"text": "a"}, {"prompt": "a", "completion": None})
    assert only(read_rows([{"prompt": "Why?", "answer": None}], "prompts", tokenizer=CHAT)).columns == {"answer": None}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "human", "content": "Why?"}, {"role": "gpt", "content": "So."}],
        [
            {"role": "User", "content": "Why?"},
            {"role": "model", "content": "So.", "tool_calls": None, "thinking": "", "function_call": float("nan")},
        ],
        [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]}, ASSISTANT],
        [{"role": "user", "content": ["Why?"]}, {"role": "assistant", "value": "So."}],
        [{**HUMAN, "role": None, "content": None}, {**ASSISTANT, "from": None, "value": None}],
        json.dumps([USER, ASSISTANT]),
    ],
)
def test_messages_of_other_projects(messages):
    assert only(read_rows([{"messages": messages}], "demonstrations", tokenizer=CHAT)) == Demonstration(RENDERED, "So.")
    assert only(read_rows([{"messages": messages}], "prompts", tokenizer=CHAT)).columns["messages"] == [USER]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"content": None, "tool_calls": [{"id": 1}]},
            "'messages[1].tool_calls' holds a call of tools, which kedge does",
        ),
        ({"content": "So.", "function_call": {"name": "f"}}, "write the call into 'content'"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "has a part that is not text (image_url)"),
        (
            {"content": "So.", "reasoning_content": "Hm."},
            "holds reasoning, which kedge does not read: write it into 'content'",
        ),
        ({"content": "So.", "thinking": "Hm."}, "'messages[1].thinking' holds reasoning"),
        ({"content": [3]}, "has a part that is not text (a number)"),
        ({"content": []}, "field 'messages[1].content' is empty"),
    ],
)
def test_messages_that_are_not_text_say_what_to_do(message, reason):
    row = {"messages": [USER, {"role": "assistant", **message}]}
    assert reason in reasons("demonstrations", {"text": "a"}, row)[0]


def test_a_conversation_in_an_unknown_form_does_not_hide_a_comparison():
    row = {"conversation": [{"input": "a", "output": "b"}], "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}
    assert only(read_rows([row], "comparisons", tokenizer=CHAT)) == Comparison(RENDERED, "So.", "No.")


@pytest.mark.parametrize(
    "column",
    [
        {"tools": [{"type": "function"}]},
        {"tools": '[{"type": "function"}]'},
        {"chat_template_kwargs": {"thinks": False}},
    ],
)
def test_columns_for_the_template_are_refused_beside_messages(column):
    [name] = column
    compared = {"prompt": [USER], "chosen": "So.", "rejected": "No."}
    good = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d", **column}
    for role, row in (("demonstrations", {"messages": [USER, ASSISTANT]}), ("prompts", {"prompt": [USER]}),
                      ("comparisons", compared), ("prompts", {"question": "Why?"})):  # fmt: skip
        [reason] = reasons(role, good, {**row, **column})
        assert reason.startswith(f"field '{name}' is for the chat template, which kedge gives messages alone: ")
        assert only(read_rows([{**row, name: None}], role, tokenizer=CHAT))


def test_names_of_tools_are_a_column_like_others():
    row = {"prompt": [USER], "tools": ["calculator"]}
    assert only(read_rows([row], "prompts", tokenizer=CHAT)).columns["tools"] == ["calculator"]


def test_conversations_from_python():
    assert only(read_rows([[USER]], "prompts", tokenizer=CHAT)) == Prompt(RENDERED, {"messages": [USER]})
    assert only(read_rows([[HUMAN, GPT]], "prompts", tokenizer=CHAT)).text == RENDERED
    assert only(read_rows([[USER, ASSISTANT]], "demonstrations", tokenizer=CHAT)) == Demonstration(RENDERED, "So.")
    [reason] = reasons("prompts", {"prompt": "a"}, USER)
    assert reason.endswith("(the row has 'role', 'content': a single message; a conversation is a list of messages)")
    with pytest.raises(DataError, match=r"field 'role' is missing \(the row has 'human'\)\", first at list:1$"):
        read_rows([{"messages": [{"human": "Why?"}]}], "prompts", tokenizer=CHAT)  # no column holds it
    [reason] = reasons("prompts", {"prompt": "a"}, {"messages": "[{'role': 'user'}]"})
    assert reason == "field 'messages' is text, expected a list, or the JSON of one"


def test_a_system_column_comes_first_also_beside_messages_and_prompts():
    system = {"role": "system", "content": "Brief."}
    text = CHAT.apply_chat_template([system, USER], tokenize=False, add_generation_prompt=True)
    rows = [{"messages": [USER, ASSISTANT]}, {"prompt": "Why?", "messages": [USER, ASSISTANT]}]
    rows += [{"prompt": [USER], "completion": "So."}, {"prompt": "Why?", "completion": [ASSISTANT]}]
    rows += [{"prompt": [USER], "chosen": "So.", "rejected": "No."}]
    rows += [{"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "No."}]}]
    for row in rows:
        row["system"] = "Brief."
        assert only(read_rows([row], "prompts", tokenizer=CHAT)).text == text
        assert only(read_rows([row], "demonstrations", tokenizer=CHAT)).prompt == text
        if "chosen" in row:
            assert only(read_rows([row], "comparisons", tokenizer=CHAT)).prompt == text
    other = {"role": "system", "content": "Long."}
    found = only(read_rows([{"prompt": [other, USER], "system": "Brief."}], "prompts", tokenizer=CHAT))
    assert found.columns["messages"] == [other, USER]
    found = only(read_rows([{"prompt": "Why?", "system": "Brief."}], "prompts", tokenizer=CHAT))
    assert found == Prompt("Why?", {"system": "Brief."})


@pytest.mark.parametrize("names", [{"messages": "chat"}, {"prompt": "asked", "completion": "answer"},
                                   {"prompt": "question", "completion": "answer"}])  # fmt: skip
def test_a_named_system_column_is_the_first_message(names):
    system = {"role": "system", "content": "Brief."}
    text = CHAT.apply_chat_template([system, USER], tokenize=False, add_generation_prompt=True)
    row = {"chat": [USER, ASSISTANT], "asked": [USER], "question": "Why?", "answer": [ASSISTANT], "how": "Brief."}
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT, columns={**names, "system": "how"})).prompt == text
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT, columns=names)).prompt == RENDERED
    row["chat"], row["asked"] = [system, *row["chat"]], [system, *row["asked"]]
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT, columns={**names, "system": "how"})).prompt == text


def test_a_system_column_that_has_no_place_is_a_bad_row():
    columns = {"prompt": "q", "system": "how"}
    table = read_rows([{"q": [USER], "how": ""}, {"q": "Why?", "how": "Brief."}], "prompts", tokenizer=CHAT,
                         columns=columns, max_rejected_fraction=1)  # fmt: skip
    assert table.rejected[0].reason.startswith("field 'system' starts a conversation, but 'prompt' is plain text; ")
    other = [{"role": "system", "content": "Long."}, USER]
    table = read_rows([{"q": [USER], "how": ""}, {"q": other, "how": "Brief."}], "prompts", tokenizer=CHAT,
                         columns=columns, max_rejected_fraction=1)  # fmt: skip
    assert table.rejected[0].reason.startswith("field 'prompt' starts with a system message that differs")
    for row in ({"question": "Why?", "answer": "So.", "system": "Brief."},
                {"question": "Why?", "chosen": "So.", "rejected": "No.", "history": [["Who?", "I."]]}):  # fmt: skip
        role = "comparisons" if "chosen" in row else "demonstrations"
        good = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}
        assert reasons(role, good, row, PLAIN)[0].startswith("the row is a conversation ('history' or 'system')")


def test_prompts_of_other_projects():
    found = only(read_rows([{"conversations": [HUMAN, GPT], "id": 3}], "prompts", tokenizer=CHAT))
    assert found == Prompt(RENDERED, {"id": 3, "messages": [USER]})
    found = only(read_rows([{"instruction": "Why?", "input": "Sea", "output": "So."}], "prompts", tokenizer=CHAT))
    assert found.text == "<|user|>\nWhy?\nSea\n<|assistant|>\n"
    assert found.columns["completion"] == "So."


@pytest.mark.parametrize(("tokenizer", "prompt"), [(CHAT, RENDERED), (PLAIN, "Why?")])
def test_a_question_and_its_answer_are_read_in_both_roles(tokenizer, prompt):
    row = {"question": "Why?", "answer": "So.\n#### 5"}
    found = only(read_rows([row], "prompts", tokenizer=tokenizer))
    assert found.text == prompt
    assert found.columns["answer"] == "So.\n#### 5", "a verifier reads it"
    [shown] = read_rows([row], "demonstrations", tokenizer=tokenizer).records
    assert (shown.prompt if isinstance(shown.prompt, str) else RENDERED, shown.completion) == (prompt, row["answer"])


@pytest.mark.parametrize("more", [{"choices": ["a", "b"]}, {"context": "A text."}, {"options": {"A": "a"}}])
def test_a_question_that_is_a_part_of_what_is_asked_is_not_taken_for_the_prompt(more):
    with pytest.raises(DataError, match="field 'prompt' is missing"):
        read_rows([{"question": "Why?", "answer": "A", **more}], "prompts", tokenizer=CHAT)


def test_alpaca_rows_without_a_chat_template_get_the_prompt_of_alpaca():
    row = {"instruction": "Sort.", "input": "b a", "output": "a b"}
    record = only(read_rows([row], "demonstrations", tokenizer=PLAIN))
    assert record.prompt.startswith("Below is an instruction that describes a task, paired with an input that ")
    assert record.prompt.endswith("### Instruction:\nSort.\n\n### Input:\nb a\n\n### Response:\n")
    assert record.completion == "a b"
    assert "### Input" not in only(read_rows([{**row, "input": ""}], "demonstrations", tokenizer=PLAIN)).prompt


def test_the_input_of_alpaca_is_a_text_or_a_number():
    row = {"instruction": "Double.", "input": 5, "output": "10"}
    assert only(read_rows([row], "demonstrations", tokenizer=CHAT)).prompt == "<|user|>\nDouble.\n5\n<|assistant|>\n"
    assert only(read_rows([{**row, "input": 0}], "demonstrations", tokenizer=CHAT)).prompt.count("0") == 1
    [found] = reasons("demonstrations", {"text": "a"}, {**row, "input": [5]})
    assert found == "field 'input' is a list, expected text"


def test_an_unknown_speaker_is_a_bad_row():
    good, bad = {"messages": [USER, ASSISTANT]}, {"conversations": [{"from": "bard", "value": "x"}, GPT]}
    [reason] = reasons("demonstrations", good, bad)
    assert reason.startswith("field 'conversations[0].from' is 'bard', expected one of system, human")


@pytest.mark.parametrize("tokenizer", [PLAIN, tiny_sentencepiece_tokenizer()])
def test_token_ids_are_used_as_they_are(tokenizer):
    example = encode_example(tokenizer, "The boat lay", " at anchor.")
    ids = [*example.prompt, *example.completion]
    labels = [-100] * len(example.prompt) + example.completion
    mask = [0] * len(example.prompt) + [1] * len(example.completion)
    padded = {"input_ids": [*ids, 0, 0], "labels": [*labels, -100, -100], "attention_mask": [1] * len(ids) + [0, 0]}
    for row in (
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids, "completion_mask": mask},
        {"input_ids": ids, "loss_mask": mask},
        padded,
    ):
        record = only(read_rows([row], "demonstrations", tokenizer=tokenizer))
        assert record == Demonstration("The boat lay", " at anchor.")
    prompt = only(read_rows([{"input_ids": example.prompt, "id": 1}], "prompts", tokenizer=tokenizer))
    assert (prompt.text, prompt.columns) == ("The boat lay", {"id": 1})
    assert encode_prompt(tokenizer, prompt.text) == example.prompt
    assert only(read_rows([padded], "prompts", tokenizer=tokenizer)).text == "The boat lay"
    whole = only(read_rows([{"input_ids": ids}], "demonstrations", tokenizer=tokenizer))
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
        assert reason in reasons("demonstrations", good, row, PLAIN)[0]
    row = {"chosen_input_ids": [1], "rejected_input_ids": [2]}
    assert "as token ids" in reasons("comparisons", {**good, "chosen": "b", "rejected": "c"}, row, PLAIN)[0]


def test_columns_are_renamed():
    rows = [{"dialogue": "Why?", "summary": " So.", "prompt": "unused"}]
    columns = {"prompt": "dialogue", "completion": "summary"}
    assert only(read_rows(rows, "demonstrations", tokenizer=PLAIN, columns=columns)) == Demonstration("Why?", " So.")
    found = only(read_rows(rows, "prompts", tokenizer=PLAIN, columns=columns))
    assert (found.text, found.columns) == ("Why?", {"completion": " So."})
    # A column of one kind of data, and two of ours that swap their names.
    swapped = {"prompts.prompt": "completion", "completion": "prompt"}
    found = only(read_rows([{"prompt": "a", "completion": "b"}], "prompts", tokenizer=PLAIN, columns=swapped))
    assert (found.text, found.columns) == ("b", {"completion": "a"})
    # A named conversation wins over the text beside it.
    row = {"prompt": "plain", "turns": [USER]}
    assert only(read_rows([row], "prompts", tokenizer=CHAT, columns={"messages": "turns"})).text == RENDERED


def test_columns_of_reward_functions_are_renamed_in_prompts_alone():
    row = {"problem": "1+1=", "solution": "2"}
    columns = {"prompt": "problem", "answer": "solution"}
    [prompt] = read_rows([row], "prompts", tokenizer=PLAIN, columns=columns).records
    assert (prompt.text, prompt.columns) == ("1+1=", {"answer": "2"})
    with pytest.raises(DataError, match=r"data\.columns\.answer=gold: .*no column 'gold'"):
        read_rows([row], "prompts", tokenizer=PLAIN, columns={**columns, "answer": "gold"})
    row["completion"] = "2"
    assert read_rows([row], "demonstrations", tokenizer=PLAIN, columns=columns).records


def test_a_text_becomes_a_question_where_it_is_named_as_one():
    for row in ("Why?", {"prompt": "Why?"}):
        assert read_rows([row], "prompts", tokenizer=CHAT).records[0].text == "Why?"
        [asked] = read_rows([row], "prompts", tokenizer=CHAT, columns={"instruction": "prompt"}).records
        assert asked.text == RENDERED


def test_a_named_column_may_be_empty_in_some_rows(tmp_path):
    (tmp_path / "rows.csv").write_text("q,more,a,b,gap\nWhy?,,So.,No.,\nHow?,Sea,Well.,Ill.,0.5\n")
    path = str(tmp_path / "rows.csv")
    columns = {"instruction": "q", "input": "more", "output": "a", "chosen": "a", "rejected": "b", "margin": "gap"}
    shown = read_rows(path, "demonstrations", tokenizer=CHAT, columns=columns).records
    assert [example.prompt for example in shown] == [RENDERED, "<|user|>\nHow?\nSea\n<|assistant|>\n"]
    margins = [pair.margin for pair in read_rows(path, "comparisons", tokenizer=CHAT, columns=columns).records]
    assert margins == [None, 0.5]
    missing = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "margin": float("nan")}
    assert only(read_rows([missing], "comparisons", tokenizer=CHAT)).margin is None
    with pytest.raises(DataError, match=r"^data.columns.margin=size: .*rows.csv has no column 'size'; its columns are"):
        read_rows(path, "comparisons", tokenizer=CHAT, columns={**columns, "margin": "size"})


def test_a_dotted_column_reaches_into_mappings():
    row = {"prompt": "Why?", "reward_model": {"style": "rule", "ground_truth": "72"}}
    columns = {"answer": "reward_model.ground_truth"}
    assert only(read_rows([row], "prompts", tokenizer=PLAIN, columns=columns)).columns["answer"] == "72"
    plain = {**row, "reward_model.ground_truth": "73"}  # a column of that very name comes first
    assert only(read_rows([plain], "prompts", tokenizer=PLAIN, columns=columns)).columns["answer"] == "73"
    with pytest.raises(DataError, match=r"^data.columns.answer=reward_model.truth: list has no column"):
        read_rows([row], "prompts", tokenizer=PLAIN, columns={"answer": "reward_model.truth"})
    with pytest.raises(DataError, match=r"^data.columns.answer=prompt.truth: list has no column"):
        read_rows([row], "prompts", tokenizer=PLAIN, columns={"answer": "prompt.truth"})


def test_a_named_column_that_is_missing_names_those_that_exist():
    rows = [{"dialogue": "Why?", "summary": " So."}]
    with pytest.raises(DataError) as raised:
        read_rows(rows, "demonstrations", tokenizer=PLAIN, columns={"prompt": "dialog", "completion": "summary"})
    assert str(raised.value).startswith(
        "data.columns.prompt=dialog: list has no column 'dialog'; its columns are 'dialogue', 'summary'"
    )
    assert read_rows([{"text": "a"}], "pretraining", tokenizer=PLAIN, columns={"chosen": "better"}).records
    # References are optional in prompts, and columns of other kinds of data are not looked for.
    columns = {"prompt": "dialogue", "completion": "nowhere", "demonstrations.text": "x", "margin": "y"}
    assert only(read_rows(rows, "prompts", tokenizer=PLAIN, columns=columns)).text == "Why?"
    with pytest.raises(DataError, match=r"; data\.columns\.prompt=… names a column that holds it$"):
        read_rows(rows, "prompts", tokenizer=PLAIN)
