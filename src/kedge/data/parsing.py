"""Parses rows: which fields make a demonstration, a comparison, a ranking or a prompt."""

from __future__ import annotations

from typing import Any

from kedge.data.chat import render_prompt
from kedge.data.columns import Role, columns_of, rename_columns
from kedge.data.fields import (
    Fields,
    check_fields,
    entries_of,
    field_of,
    is_conversation,
    is_given,
    messages_of,
    number_of,
    text_of,
)
from kedge.data.forms import standard_form
from kedge.data.prompt_answers import (
    ReadingOptions,
    as_messages,
    check_lengths,
    conversation_or_text,
    conversation_to_learn,
    cut_conversation,
    cut_text,
    prompt_and_answers,
    tldr_prompt,
)
from kedge.data.records import Comparison, Demonstration, Prompt, Ranking
from kedge.data.rejections import RowError
from kedge.data.tokens import encode_example
from kedge.data.truncation import reject_oversized

__all__ = ["parse_comparison", "parse_demonstration", "parse_prompt"]


def parse_demonstration(value: object, options: ReadingOptions) -> Demonstration:
    """`prompt` + `completion`, `messages`, `text`, or a TL;DR post with its `summary`; a bare string counts as `text`.

    A comparison demonstrates its better answer.

    Raises:
        RowError: The row has none of these forms.
    """
    fields = _read(value, "text", "demonstrations", options)
    if options.template == "none" and not is_given(fields, "completion"):
        if is_given(fields, "messages"):
            return conversation_to_learn(messages_of(fields["messages"], "messages"), 1, "messages", options)
        if is_given(fields, "text") and not is_given(fields, "prompt"):
            return _plain_text(text_of(fields["text"], "text"), options)
    name = "completion"
    if options.template == "tldr":
        name = "chosen" if is_given(fields, "chosen") and not is_given(fields, "summary") else "summary"
    answer = field_of(fields, name)
    if options.template == "none" and isinstance(answer, (list, tuple)) and len(answer) > 1:
        start = as_messages(field_of(fields, "prompt"), "prompt", "user")
        return conversation_to_learn([*start, *messages_of(answer, name)], len(start), name, options)
    prompt, completion = prompt_and_answers(fields, {name: answer}, options)
    return Demonstration(prompt, completion)


def parse_comparison(value: object, options: ReadingOptions) -> Comparison | Ranking:
    """`prompt` + `chosen` + `rejected` (and `margin`), or `prompt` + `responses` + `ranks`.

    The prompt may be omitted where `chosen` and `rejected` both start with it.

    Raises:
        RowError: The row has neither form, or expresses no preference.
    """
    fields = _read(value, "", "comparisons", options)
    if is_given(fields, "responses") and not is_given(fields, "chosen"):
        return _ranking(fields, options)
    answers = {name: field_of(fields, name) for name in ("chosen", "rejected")}
    prompt, chosen, rejected = prompt_and_answers(fields, answers, options, cuts_answers=True)
    if chosen == rejected:
        cut = "" if answers["chosen"] == answers["rejected"] else ", once cut to fit"
        raise RowError(f"fields 'chosen' and 'rejected' hold the same answer{cut}")
    margin = fields.get("margin")
    return Comparison(prompt, chosen, rejected, None if margin is None else number_of(margin, "margin"))


def parse_prompt(value: object, options: ReadingOptions) -> Prompt:
    """`prompt`, `messages`, `text`, a TL;DR post, or a bare string; the other fields become columns.

    The messages of a conversation stay available to reward functions as the column `messages`.

    Raises:
        RowError: The row has none of these forms, or is too long.
    """
    fields = _read(value, "prompt", "prompts", options)
    if options.template == "tldr":
        # The post's fields stay columns: a reward function may need the text that truncation cut from the prompt.
        return Prompt(tldr_prompt(fields, options, budget=options.max_prompt_tokens), dict(fields))
    name = next((name for name in ("prompt", "messages", "text") if is_given(fields, name)), "prompt")
    prompt = conversation_or_text(fields, name, options)
    if isinstance(prompt, str) and options.tokenizer.chat_template and _has_conversation(fields):
        prompt = {"role": "user", "content": prompt}  # as in training on these answers
    if isinstance(prompt, str) and name != "messages":
        text = cut_text(text_of(prompt, name), {}, options)
        check_lengths(text, {}, options)
        if is_given(fields, "messages"):
            messages_of(fields["messages"], "messages")  # reward models render this column
        return Prompt(text, _columns(fields, name))
    messages = messages_of(prompt, name)
    if name == "messages" and messages[-1]["role"] == "assistant" and len(messages) > 1:
        messages = messages[:-1]
    messages = cut_conversation(messages, {}, options)
    text = render_prompt(options.tokenizer, messages)
    check_lengths(text, {}, options)
    return Prompt(text, {**_columns(fields, name), "messages": messages})


def _read(value: object, name: str, role: Role, options: ReadingOptions) -> Fields:
    """A row under kedge's names and in one of its forms.

    A bare text becomes the field `name`, and a bare conversation `messages`. Missing values, which rows of concatenated
    data sets have in the columns of the others, do not count as fields; reward functions may still take them.
    """
    if isinstance(value, str) and name:
        return check_fields({name: value})
    fields = check_fields({"messages": value} if name and is_conversation(value) else value)
    if columns := columns_of(options.columns, role):
        fields = rename_columns(fields, columns)
    if options.template == "tldr":
        return fields
    given = standard_form(
        {key: value for key, value in fields.items() if is_given(fields, key)}, role, options.tokenizer
    )
    return {**{key: value for key, value in fields.items() if not is_given(fields, key) and key not in given}, **given}


def _ranking(fields: Fields, options: ReadingOptions) -> Ranking:
    responses = entries_of(fields["responses"], "responses")
    entries = entries_of(field_of(fields, "ranks"), "ranks")
    ranks = tuple(number_of(entry, f"ranks[{index}]") for index, entry in enumerate(entries))
    if len(responses) != len(ranks):
        raise RowError(f"{len(responses)} responses have {len(ranks)} ranks, expected one rank per response")
    if len(set(ranks)) < 2:
        raise RowError("all entries of 'ranks' are equal: at least two different ranks are needed")
    prompt, *texts = prompt_and_answers(
        fields, {f"responses[{index}]": entry for index, entry in enumerate(responses)}, options, cuts_answers=True
    )
    if len(set(zip(texts, ranks, strict=True))) > len(set(texts)):
        raise RowError("field 'responses' holds the same answer twice, with different ranks")
    return Ranking(prompt, tuple(texts), ranks)


def _plain_text(text: str, options: ReadingOptions) -> Demonstration:
    if options.max_length is not None:
        kind = f"text longer than max_length={options.max_length}"
        reject_oversized(options.tokenizer, text, options.max_length, "the text", kind)
        length = sum(map(len, encode_example(options.tokenizer, "", text)))
        if length > options.max_length:
            raise RowError(f"the text is {length} tokens long, at most {options.max_length} fit", kind)
    return Demonstration("", text)


def _has_conversation(fields: Fields) -> bool:
    """Tell whether an answer of the row is a conversation: its prompt is then read as one."""
    responses = fields.get("responses")
    answers = [fields.get(name) for name in ("completion", "chosen", "rejected")]
    answers += responses if isinstance(responses, (list, tuple)) else []
    return any(is_conversation(answer if isinstance(answer, (list, tuple)) else [answer]) for answer in answers)


def _columns(fields: Fields, *used: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in used}
