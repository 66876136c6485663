import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kedge.data import (
    Comparison,
    Demonstration,
    Prompt,
    Ranking,
    encode_example,
    encode_prompt,
    read_rows,
)
from kedge.data.chat import apply_template
from kedge.data.fields import Role
from kedge.data.records import Rejection, RowError, write_rejections
from kedge.data.sources import Sources
from kedge_base.errors import DataError, OutputError
from tests.tiny import CHAT_TEMPLATE, tiny_sentencepiece_tokenizer, tiny_tokenizer

PLAIN, CHAT = tiny_tokenizer(), tiny_tokenizer(chat_template=CHAT_TEMPLATE)
QUESTION = {"role": "user", "content": "Why?"}
ANSWER, OTHER = ({"role": "assistant", "content": text} for text in ("Because.", "No idea."))
RENDERED = "<|user|>\nWhy?\n<|assistant|>\n"
POST = {"subreddit": "boats", "title": "Help", "post": "The rope broke."}
TLDR = "SUBREDDIT: r/boats\n\nTITLE: Help\n\nPOST: The rope broke.\n\nTL;DR:"


def one(role: Role, row: Any, *, tokenizer: Any = CHAT, **settings: Any) -> Any:
    """The record of one row, or its rejection."""
    good = {**POST, "prompt": "a", "completion": "b", "summary": "b", "chosen": "b", "rejected": "c"}
    table = read_rows([good, row], role, tokenizer=tokenizer, max_rejected_fraction=0.5, **settings)
    return (table.records[1:] or table.rejected)[0]


def reason(role: Role, row: Any, **settings: Any) -> str:
    """The reason why a row is rejected."""
    rejection = one(role, row, **settings)
    assert (rejection.source, rejection.line) == ("list", 2)
    return rejection.reason


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"prompt": "Why?", "completion": " So."}, Demonstration("Why?", " So.")),
        ({"text": "Once upon"}, Demonstration("", "Once upon")),
        ("Once upon", Demonstration("", "Once upon")),
        ({"messages": [QUESTION, ANSWER]}, Demonstration(RENDERED, "Because.")),
        ({"prompt": "Why?", "messages": [QUESTION, ANSWER]}, Demonstration(RENDERED, "Because.")),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, Demonstration(RENDERED, "Because.")),
        ({"prompt": [QUESTION], "completion": "Because."}, Demonstration(RENDERED, "Because.")),
        ({"prompt": "Why?", "completion": [ANSWER]}, Demonstration(RENDERED, "Because.")),
    ],
)
def test_demonstrations(row, record):
    assert read_rows([row], "demonstrations", tokenizer=CHAT).records == [record]


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"prompt": "Why?", "chosen": " So.", "rejected": " No."}, Comparison("Why?", " So.", " No.")),
        ({"prompt": "Why?", "chosen": "a", "rejected": "b", "margin": 2}, Comparison("Why?", "a", "b", 2.0)),
        (
            {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [OTHER]},
            Comparison(RENDERED, "Because.", "No idea."),
        ),
        ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, OTHER]}, Comparison(RENDERED, "Because.", "No idea.")),
        (
            {"prompt": "Why?", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, OTHER]},
            Comparison(RENDERED, "Because.", "No idea."),
        ),
        (
            {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: Yonder"},
            Comparison("\n\nHuman: Hi\n\nAssistant:", " Yes", " Yonder"),
        ),
        (
            {"prompt": "Why?", "responses": ["a", "b", "c"], "ranks": [2, 1, 2]},
            Ranking("Why?", ("a", "b", "c"), (2.0, 1.0, 2.0)),
        ),
        (
            {"prompt": [QUESTION], "responses": [[ANSWER], "Never."], "ranks": [1, 2]},
            Ranking(RENDERED, ("Because.", "Never."), (1.0, 2.0)),
        ),
    ],
)
def test_comparisons(row, record):
    assert read_rows([row], "comparisons", tokenizer=CHAT).records == [record]


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"prompt": "Why?", "answer": 42}, Prompt("Why?", {"answer": 42})),
        ("Why?", Prompt("Why?")),
        ({"text": "Once upon", "id": 1}, Prompt("Once upon", {"id": 1})),
        ({"prompt": [QUESTION], "id": 1}, Prompt(RENDERED, {"id": 1, "messages": [QUESTION]})),
        ({"messages": [QUESTION, ANSWER]}, Prompt(RENDERED, {"messages": [QUESTION]})),
        (
            {"prompt": [QUESTION, {"role": "assistant", "content": "Well,"}]},
            Prompt(RENDERED + "Well,", {"messages": [QUESTION, {"role": "assistant", "content": "Well,"}]}),
        ),
    ],
)
def test_prompts(row, record):
    assert read_rows([row], "prompts", tokenizer=CHAT).records == [record]


def test_tldr_posts_in_every_reader():
    summary, other = "  rope broke ", "boat fine"
    assert one("demonstrations", {**POST, "summary": summary}, template="tldr") == Demonstration(TLDR, " rope broke")
    row = {**POST, "chosen": summary, "rejected": other}
    assert one("comparisons", row, template="tldr") == Comparison(TLDR, " rope broke", " boat fine")
    assert one("prompts", {**POST, "id": 3}, template="tldr") == Prompt(TLDR, {**POST, "id": 3})


@pytest.mark.parametrize(
    ("role", "row", "expected"),
    [
        ("prompts", {"query": "Why?"}, "field 'prompt' is missing (the row has 'query')"),
        ("prompts", {}, "field 'prompt' is missing (the row has no fields)"),
        ("prompts", {"prompt": None}, "field 'prompt' is null"),
        ("prompts", {"prompt": " \n"}, "field 'prompt' is empty"),
        ("prompts", {"prompt": []}, "field 'prompt' is empty"),
        ("prompts", {"prompt": 3}, "field 'prompt' is a number, expected a list"),
        ("prompts", 3, "the row is a number, expected an object with named fields"),
        ("prompts", {"prompt": "a", 3: "b"}, "a field's name is a number, expected text"),
        ("prompts", {"prompt": "\ud800"}, "field 'prompt' holds a lone surrogate, which UTF-8 cannot write"),
        (
            "prompts",
            {"prompt": "a", "x": [{"y": "\udfff"}]},
            "field 'x' holds a lone surrogate, which UTF-8 cannot write",
        ),
        ("prompts", {"messages": [{"role": "user"}]}, "field 'content' is missing (the row has 'role')"),
        (
            "prompts",
            {"messages": ["Why?"]},
            "field 'messages[0]' is text, expected a message with 'role' and 'content'",
        ),
        ("demonstrations", {"prompt": "a"}, "field 'completion' is missing (the row has 'prompt')"),
        ("demonstrations", {"prompt": "a", "completion": ""}, "field 'completion' is empty"),
        (
            "demonstrations",
            {"prompt": "a", "completion": True},
            "field 'completion' is true or false, expected text",
        ),
        (
            "demonstrations",
            {"messages": [QUESTION]},
            "field 'messages' must end with an assistant message that follows another message",
        ),
        (
            "comparisons",
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "fields 'chosen' and 'rejected' hold the same answer",
        ),
        (
            "comparisons",
            {"chosen": "b", "rejected": "c"},
            "field 'prompt' is missing, and 'chosen' and 'rejected' have no common start",
        ),
        ("comparisons", {"chosen": "a b", "rejected": "a b c"}, "field 'chosen' is empty"),
        (
            "comparisons",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": math.inf},
            "field 'margin' is not a finite number",
        ),
        (
            "comparisons",
            {"prompt": "a", "responses": ["b", "c"], "ranks": [1]},
            "2 responses have 1 ranks, expected one rank per response",
        ),
        (
            "comparisons",
            {"prompt": "a", "responses": ["b", "c"], "ranks": [1, math.nan]},
            "field 'ranks[1]' is not a finite number",
        ),
        (
            "comparisons",
            {"prompt": "a", "responses": ["b", "c"], "ranks": [1, 10**400]},
            "field 'ranks[1]' is not a finite number",
        ),
        (
            "comparisons",
            {"prompt": "a", "responses": ["b", "c"], "ranks": [1, 1]},
            "all entries of 'ranks' are equal: at least two different ranks are needed",
        ),
        (
            "comparisons",
            {"prompt": "a", "responses": ["b", "b"], "ranks": [1, 2]},
            "field 'responses' holds the same answer twice, with different ranks",
        ),
    ],
)
def test_a_bad_row_has_one_clear_reason(role, row, expected):
    assert reason(role, row) == expected


def test_a_row_may_nest_as_deep_as_it_can_be_written():
    deep = []
    for _ in range(99):
        deep = [deep]
    assert reason("prompts", {"prompt": deep}).startswith("field 'prompt[0]' is a list, expected a message")
    assert one("prompts", {"prompt": "a", "deep": deep}).columns == {"deep": deep}
    for _ in range(50_000):
        deep = [deep]
    assert reason("prompts", {"prompt": "a", "deep": deep}) == "field 'deep' nests deeper than 100 levels"


def test_rows_that_are_too_long_report_their_length():
    words = "sea " * 50
    length = len(encode_prompt(PLAIN, words))
    assert reason("prompts", words, max_prompt_tokens=20) == f"the prompt is {length} tokens long, at most 20 fit"
    assert reason("demonstrations", words, max_length=20) == f"the text is {length + 1} tokens long, at most 20 fit"
    row = {"prompt": "a", "chosen": "b", "rejected": words}
    text = f"prompt and 'rejected' are {length + 2} tokens long, at most 20 fit"
    assert reason("comparisons", row, max_length=20) == text
    # Exactly at the limit is not over it.
    assert isinstance(one("demonstrations", words, max_length=length + 1), Demonstration)
    assert isinstance(one("prompts", words, max_prompt_tokens=length), Prompt)


@pytest.mark.parametrize("tokenizer", [PLAIN, tiny_sentencepiece_tokenizer()])
@pytest.mark.parametrize("limit", [3, 5, 12])
def test_prompts_are_cut_only_where_asked_for(tokenizer, limit):
    text = "Once upon a time there was a caf\u00e9 \U0001f600 by the sea"
    assert isinstance(one("prompts", text, tokenizer=tokenizer, max_prompt_tokens=limit), Rejection)
    start = one("prompts", text, tokenizer=tokenizer, max_prompt_tokens=limit, truncate="keep_start").text
    end = one("prompts", text, tokenizer=tokenizer, max_prompt_tokens=limit, truncate="keep_end").text
    assert text.startswith(start)
    assert text.endswith(end)
    for cut in (start, end):
        assert 0 < len(encode_prompt(tokenizer, cut)) <= limit


ROWS = {
    "demonstrations": {"prompt": "The boat lay here. " * 9, "completion": " So it was."},
    "comparisons": {"prompt": "The boat lay here. " * 9, "chosen": " So it was, I think.", "rejected": " No."},
}


@pytest.mark.parametrize("answers", [["b"], ["b", "b"]])
def test_a_ranking_of_a_single_answer_is_no_tie(answers: list[str]) -> None:
    row = {"prompt": "a", "responses": answers, "ranks": [1] * len(answers)}
    assert reason("comparisons", row, ties=True) == (
        "field 'responses' holds a single answer: a ranking needs at least two"
    )
    tied = one("comparisons", {"prompt": "a", "responses": ["b", "c"], "ranks": [1, 1]}, ties=True)
    assert tied == Ranking("a", ("b", "c"), (1.0, 1.0))


@pytest.mark.parametrize("percent", [7, 29, 57, 58])
def test_as_many_bad_rows_as_the_limit_are_allowed(percent: int) -> None:
    rows: list[Any] = [3] * percent + ["Why?"] * (100 - percent)
    table = read_rows(rows, "prompts", tokenizer=PLAIN, max_rejected_fraction=percent / 100)
    assert (len(table.rejected), len(table.records)) == (percent, 100 - percent)
    with pytest.raises(DataError, match=f"{percent + 1} of 100 rows"):
        read_rows([3, *rows[:-1]], "prompts", tokenizer=PLAIN, max_rejected_fraction=percent / 100)


@pytest.mark.parametrize("role", ROWS)
@pytest.mark.parametrize("truncate", ["keep_start", "keep_end"])
def test_only_the_prompt_is_cut_to_leave_room_for_the_longest_answer(role, truncate):
    row = ROWS[role]
    answers = [row[name] for name in ("completion", "chosen", "rejected") if name in row]
    table = read_rows([row], role, tokenizer=PLAIN, max_length=40, truncate=truncate)
    prompt, *texts = vars(table.records[0]).values()
    assert (row["prompt"].startswith if truncate == "keep_start" else row["prompt"].endswith)(prompt)
    assert texts[: len(answers)] == answers
    lengths = [sum(map(len, encode_example(PLAIN, prompt, answer))) for answer in answers]
    assert 37 <= max(lengths) <= 40
    assert table.num_cut == 1
    assert "at most 40 fit" in reason(role, row, tokenizer=PLAIN, max_length=40)


def test_a_completion_that_is_too_long_is_rejected_and_never_cut():
    rejection = one("demonstrations", {"prompt": "a", "completion": "sea " * 50}, max_length=20, truncate="keep_end")
    assert rejection.kind == "answer alone longer than max_length=20"


@pytest.mark.parametrize("tokenizer", [PLAIN, tiny_sentencepiece_tokenizer()])
def test_answers_that_are_compared_lose_their_end_where_asked_for(tokenizer):
    long, short = " The tide went out, and in again. \U0001f600" * 9, " So it was."
    prompts = {"a": 2, "The boat lay here. " * 9: 20}  # tokens that the prompt keeps
    for prompt, least in prompts.items():
        for row in (
            {"prompt": prompt, "chosen": long, "rejected": short},
            {"prompt": prompt, "responses": [short, long], "ranks": [2, 1]},
        ):
            table = read_rows([row], "comparisons", tokenizer=tokenizer, max_length=40, truncate="keep_end")
            [record] = table.records
            first, second = (record.chosen, record.rejected) if "chosen" in row else record.responses[::-1]
            assert second == short
            assert long.startswith(first)
            lengths = [sum(map(len, encode_example(tokenizer, record.prompt, text))) for text in (first, second)]
            assert 36 <= lengths[0] <= 40
            assert len(encode_prompt(tokenizer, record.prompt)) >= min(least, len(encode_prompt(tokenizer, prompt))) - 1
            assert table.num_cut == 1
            assert "at most 40 fit" in reason("comparisons", row, tokenizer=tokenizer, max_length=40)


def test_answers_of_conversations_and_posts_are_cut_as_well():
    long = {"role": "assistant", "content": "The tide went out. " * 20}
    row = {"prompt": [QUESTION], "chosen": [long], "rejected": [ANSWER]}
    record = one("comparisons", row, max_length=80, truncate="keep_end")
    assert record.prompt == RENDERED
    assert record.rejected == "Because."
    assert long["content"].startswith(record.chosen)
    assert 70 <= sum(map(len, encode_example(CHAT, RENDERED, record.chosen)[:2])) <= 80
    row = {**POST, "chosen": "The tide went out. " * 20, "rejected": "rope broke"}
    record = one("comparisons", row, template="tldr", max_length=80, truncate="keep_end")
    assert record.prompt == TLDR
    assert record.chosen.startswith(" The tide went out.")
    same = {"prompt": "a", "chosen": "sea " * 50, "rejected": "sea " * 60}
    assert reason("comparisons", same, max_length=20, truncate="keep_end") == (
        "fields 'chosen' and 'rejected' hold answers that differ only where they are cut to fit"
    )


@pytest.mark.parametrize("is_conversation", [False, True])
def test_answers_that_differ_only_behind_the_cut_are_no_comparison(is_conversation):
    words = random.Random(0)
    for _ in range(40):
        shared = "".join(words.choices("aehlot .\n", k=60))
        ends = ["".join(words.choices("aehlot .\n", k=words.randint(1, 40))) for _ in range(2)]
        answers = dict(zip(("chosen", "rejected"), (f"The {shared}{end}." for end in ends), strict=True))
        given: dict[str, Any] = {"prompt": "Why?", **answers}
        if is_conversation:
            given |= {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        table = read_rows(
            [given, {"prompt": "a", "chosen": "b", "rejected": "c"}],
            "comparisons",
            tokenizer=CHAT,
            max_length=words.randint(30, 90),
            truncate="keep_end",
            max_rejected_fraction=0.5,
        )
        for record in table.records[:-1]:
            kept = (record.chosen, record.rejected)
            cut = [text for text, whole in zip(kept, answers.values(), strict=True) if text.strip() != whole.strip()]
            assert not any(other.startswith(text) for text in cut for other in kept if other is not text)
        if table.rejected:
            assert table.rejected[0].kind == "answers that differ only where they are cut to fit"


def test_of_a_conversation_the_oldest_turns_are_cut():
    system, first, last = (
        {"role": "system", "content": "Brief."},
        [{"role": "user", "content": "word " * 40}, {"role": "assistant", "content": "Well."}],
        [{"role": "user", "content": "Why?"}],
    )
    row = {"messages": [system, *first, *last]}
    kept = one("prompts", row, max_prompt_tokens=80, truncate="keep_end")
    assert kept.text == CHAT.apply_chat_template([system, *last], tokenize=False, add_generation_prompt=True)
    assert kept.columns["messages"] == [system, *last]
    trained = {"messages": [system, *first, *last, ANSWER]}
    assert one("demonstrations", trained, max_length=90, truncate="keep_end") == Demonstration(kept.text, "Because.")
    for truncate in ("never", "keep_start"):
        assert "at most 80 fit" in reason("prompts", row, max_prompt_tokens=80, truncate=truncate)


def test_rows_are_counted_by_reason():
    rows = ["a", "sea " * 30, "sea " * 40, {"prompt": ""}, {"query": "b"}]
    table = read_rows(rows, "prompts", tokenizer=PLAIN, max_prompt_tokens=10, max_rejected_fraction=1)
    assert table.dropped() == {
        "prompt longer than max_prompt_tokens=10": 2,
        "field 'prompt' is empty": 1,
        "field 'prompt' is missing": 1,
    }


def test_a_conversation_needs_a_chat_template():
    with pytest.raises(DataError, match=r"^list:2: the row is a conversation, .* no chat template: name one with data"):
        read_rows(["a", {"messages": [QUESTION]}], "prompts", tokenizer=PLAIN)


def test_a_conversation_is_encoded_as_its_template_writes_it():
    record = one("demonstrations", {"messages": [QUESTION, ANSWER]})
    halves = encode_example(CHAT, record.prompt, record.completion)
    rendered = str(CHAT.apply_chat_template([QUESTION, ANSWER], tokenize=False))
    assert rendered == RENDERED + "Because.<eos>\n"
    assert CHAT.decode([*halves.prompt, *halves.completion]) == rendered.rstrip()
    assert [id for id in halves.completion if id == CHAT.eos_token_id] == [CHAT.eos_token_id]


def test_named_templates_may_have_line_breaks_in_their_blocks():
    template = "{%- for message in messages\n%}{{ message['content'] }}{% endfor %}"
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.chat_template = {"default": template, "tools": "{{ 'b' }}"}
    assert apply_template(tokenizer, [QUESTION]) == QUESTION["content"]
    tokenizer.chat_template = "{{ '\\ud800' }}"
    with pytest.raises(RowError, match="rejects the conversation"):
        apply_template(tokenizer, [QUESTION])


def test_a_row_that_the_chat_template_rejects_is_a_bad_row():
    tokenizer = tiny_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    assert reason("comparisons", [QUESTION], tokenizer=tokenizer).startswith("the row is a list")
    row = {"messages": [QUESTION]}
    assert reason("prompts", row, tokenizer=tokenizer) == (
        "the chat template rejects the conversation: roles must alternate"
    )
    tokenizer = tiny_tokenizer(chat_template="{{ messages | length }}{{ messages[-1].content }}")
    row = {"messages": [QUESTION, ANSWER]}
    assert "renders the prompt differently" in reason("demonstrations", row, tokenizer=tokenizer)


def lines(path: Path, *rows: bytes) -> Path:
    path.write_bytes(b"\n".join(rows))
    return path


def test_rows_over_a_limit_name_the_limit():
    rows = [{"prompt": "a b c d e f"}] * 3
    with pytest.raises(DataError, match=r"^1 of 1 row \(100\.0%\) cannot be used; most common reason, 1 time: "):
        read_rows(rows[:1], "prompts", tokenizer=PLAIN, max_prompt_tokens=2)
    with pytest.raises(DataError, match=r"; the limit is data\.max_prompt_tokens, .*; data\.truncate cuts prompts$"):
        read_rows(rows, "prompts", tokenizer=PLAIN, max_prompt_tokens=2)


def test_too_many_bad_rows_are_written_to_a_file_and_stop_the_run(tmp_path):
    good = [b'{"prompt": "a"}'] * 90
    path = lines(tmp_path / "rows.jsonl", *good, b"{", b'{"prompt": "\\ud800"}', *[b'{"query": "a"}'] * 8)
    out = tmp_path / "run" / "rejected.jsonl"
    with pytest.raises(DataError) as raised:
        read_rows(path, "prompts", tokenizer=PLAIN, max_rejected_fraction=0.05, rejected_to=out)
    assert str(raised.value) == (
        "10 of 100 rows (10.0%) cannot be used, data.max_rejected_fraction=0.05 allows 5.0%; most common reason, "
        f"8 times: \"field 'prompt' is missing (the row has 'query')\", first at {path}:93; "
        "data.columns.prompt=… names a column that holds it"
    )
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["line"] for row in written] == list(range(91, 101))
    assert written[0] == {
        "file": str(path),
        "line": 91,
        "reason": "not JSON: Expecting property name enclosed in double quotes at column 2",
        "preview": "{",
    }
    table = read_rows(path, "prompts", tokenizer=PLAIN, max_rejected_fraction=0.1)
    assert (len(table.records), len(table.rejected)) == (90, 10)


def test_reasons_are_counted_whatever_their_numbers():
    rows = ["a", "sea " * 30, "sea " * 40, {"prompt": ""}]
    with pytest.raises(
        DataError, match=r"3 of 4 rows .*, 2 times: 'the prompt is \d+ tokens long.*first at list:2; the limit is "
    ):
        read_rows(rows, "prompts", tokenizer=PLAIN, max_prompt_tokens=10)


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
        read_rows(str(lines(tmp_path / "empty.jsonl", b"")), "prompts", tokenizer=PLAIN)
    empty = str(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"^.*empty\.jsonl has no rows"):
        read_rows(Sources((empty,)), "prompts", tokenizer=PLAIN)
    full = str(lines(tmp_path / "full.jsonl", b'{"prompt": "a"}\n'))
    assert read_rows(Sources((full, empty)), "prompts", tokenizer=PLAIN).notes == [f"{empty} has no rows"]
    with pytest.raises(DataError, match="the data has no rows"):
        read_rows([], "demonstrations", tokenizer=PLAIN)
    with pytest.raises(DataError, match=r"1 of 1 row \(100\.0%\) cannot be used"):
        read_rows([{"prompt": ""}], "prompts", tokenizer=PLAIN, max_rejected_fraction=1.0)


def test_rejections_are_appended_and_survive_anything(tmp_path):
    path = tmp_path / "rejected.jsonl"
    write_rejections(path, [])
    assert not path.exists()
    for text in ("\ud800", "\x00", "line\nbreak"):
        write_rejections(path, [Rejection("file", 1, text, text)])
    assert [json.loads(line)["reason"] for line in path.read_text().splitlines()] == ["\ud800", "\x00", "line\nbreak"]


def test_rejections_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file/rejected\.jsonl cannot be written: "):
        write_rejections(tmp_path / "file" / "rejected.jsonl", [Rejection("file", 1, "no prompt")])


def test_a_line_of_ten_megabytes(tmp_path):
    long = json.dumps({"prompt": "The tide went out.\n" * 550_000}).encode()
    path = lines(tmp_path / "rows.jsonl", *[b'{"prompt": "a"}'] * 30, long)
    table = read_rows(path, "prompts", tokenizer=PLAIN, max_prompt_tokens=100, max_rejected_fraction=0.05)
    assert len(table.records) == 30
    assert len(table.rejected[0].preview) == 120


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "a"])
keys = st.sampled_from(["role", "content"]) | st.text(max_size=4)
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)
roles = st.sampled_from(["user", "assistant", "system"])
conversations = st.lists(st.fixed_dictionaries({"role": roles, "content": json_values}), max_size=3)
answer_names = ["completion", "chosen", "rejected", "responses", "ranks", "margin", "summary"]
names = st.sampled_from(["prompt", "messages", "text", "subreddit", "title", "post", *answer_names])
rows = st.dictionaries(names | st.text(max_size=4), json_values | conversations, max_size=8) | json_values


@pytest.mark.parametrize("template", ["none", "tldr"])
@pytest.mark.parametrize("role", ["demonstrations", "comparisons", "prompts"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(row=rows)
def test_any_json_is_a_record_or_a_rejection(role, template, row):
    good = {**POST, "text": "a", "prompt": "a", "completion": "b", "summary": "c", "chosen": "d", "rejected": "e"}
    table = read_rows([good, row], role, tokenizer=CHAT, template=template, max_rejected_fraction=1.0)
    assert len(table.records) + len(table.rejected) == 2
    for rejection in table.rejected:
        json.dumps([rejection.reason, rejection.preview], ensure_ascii=False).encode("utf-8")


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_records_or_rejections(tmp_path_factory, content):
    path = lines(tmp_path_factory.mktemp("bytes") / "rows.jsonl", b'{"prompt": "a"}', content, b'{"prompt": "b"}')
    table = read_rows(path, "prompts", tokenizer=PLAIN, max_rejected_fraction=1.0)
    assert {record.text for record in table.records} >= {"a", "b"}
    assert len(table.records) + len(table.rejected) == 2 + sum(1 for line in content.split(b"\n") if line.strip())
