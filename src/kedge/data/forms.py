"""What a row means: the fields that make a demonstration, a comparison, a ranking or a prompt."""

from __future__ import annotations

from typing import Any

from kedge.data.chat import render_prompt
from kedge.data.fields import Fields, check_fields, entries_of, field_of, messages_of, number_of, text_of
from kedge.data.prompt_answers import Rules, answered, check_lengths, exchange, tldr_prompt
from kedge.data.records import Comparison, Demonstration, Prompt, Ranking
from kedge.data.rejections import RowError
from kedge.data.tokens import encode_example
from kedge.data.truncation import refuse_giant, truncate_prompt

__all__ = ["comparison_of", "demonstration_of", "prompt_of"]


def demonstration_of(value: object, rules: Rules) -> Demonstration:
    """`prompt` + `completion`, `messages`, `text`, or a TL;DR post with its `summary`; a bare text is a `text`.

    Raises:
        RowError: The row is none of these.
    """
    fields = check_fields({"text": value} if isinstance(value, str) else value)
    if rules.template == "none" and "completion" not in fields:
        if "messages" in fields:
            conversation = messages_of(fields["messages"], "messages")
            if len(conversation) < 2 or conversation[-1]["role"] != "assistant":
                raise RowError("field 'messages' does not end with an answer of the assistant to something before it")
            return Demonstration(*exchange(conversation[:-1], {"messages": conversation[-1:]}, rules))
        if "text" in fields and "prompt" not in fields:
            return _plain_text(text_of(fields["text"], "text"), rules)
    name = "summary" if rules.template == "tldr" else "completion"
    return Demonstration(*answered(fields, {name: field_of(fields, name)}, rules))


def comparison_of(value: object, rules: Rules) -> Comparison | Ranking:
    """`prompt` + `chosen` + `rejected` (and `margin`), or `prompt` + `responses` + `ranks`.

    The prompt may be left out where `chosen` and `rejected` begin with it.

    Raises:
        RowError: The row is neither, or prefers nothing.
    """
    fields = check_fields(value)
    if "responses" in fields and "chosen" not in fields:
        return _ranking(fields, rules)
    answers = {name: field_of(fields, name) for name in ("chosen", "rejected")}
    prompt, chosen, rejected = answered(fields, answers, rules)
    if chosen == rejected:
        raise RowError("fields 'chosen' and 'rejected' hold the same answer")
    margin = fields.get("margin")
    return Comparison(prompt, chosen, rejected, None if margin is None else number_of(margin, "margin"))


def prompt_of(value: object, rules: Rules) -> Prompt:
    """`prompt`, `messages`, `text`, a TL;DR post, or a bare text; the other fields become columns.

    A conversation's messages stay in the column `messages`, for reward functions that want them.

    Raises:
        RowError: The row is none of these, or too long.
    """
    fields = check_fields({"prompt": value} if isinstance(value, str) else value)
    if rules.template == "tldr":
        # The post's fields stay columns: a reward function may want what truncation took from the prompt.
        return Prompt(tldr_prompt(fields, rules, budget=rules.max_prompt_tokens), dict(fields))
    name = next((name for name in ("prompt", "messages", "text") if name in fields), "prompt")
    prompt = field_of(fields, name)
    if isinstance(prompt, str):
        text = text_of(prompt, name)
        if rules.max_prompt_tokens is not None:
            text = truncate_prompt(rules.tokenizer, text, rules.max_prompt_tokens, rules.truncate)
        check_lengths(text, {}, rules)
        if fields.get("messages") is not None:
            messages_of(fields["messages"], "messages")  # reward models render this column
        return Prompt(text, _columns(fields, name))
    messages = messages_of(prompt, name)
    if name == "messages" and messages[-1]["role"] == "assistant" and len(messages) > 1:
        messages = messages[:-1]
    text = render_prompt(rules.tokenizer, messages)
    check_lengths(text, {}, rules)
    return Prompt(text, {**_columns(fields, name), "messages": messages})


def _ranking(fields: Fields, rules: Rules) -> Ranking:
    responses = entries_of(fields["responses"], "responses")
    entries = entries_of(field_of(fields, "ranks"), "ranks")
    ranks = tuple(number_of(entry, f"ranks[{index}]") for index, entry in enumerate(entries))
    if len(responses) != len(ranks):
        raise RowError(f"{len(responses)} responses have {len(ranks)} ranks, expected one each")
    if len(set(ranks)) < 2:
        raise RowError("field 'ranks' prefers no response: at least two different ranks are needed")
    prompt, *texts = answered(fields, {f"responses[{index}]": entry for index, entry in enumerate(responses)}, rules)
    if len(set(zip(texts, ranks, strict=True))) > len(set(texts)):
        raise RowError("field 'responses' holds the same answer with different ranks")
    return Ranking(prompt, tuple(texts), ranks)


def _plain_text(text: str, rules: Rules) -> Demonstration:
    if rules.max_length is not None:
        refuse_giant(rules.tokenizer, text, rules.max_length, "the text")
        length = sum(map(len, encode_example(rules.tokenizer, "", text)))
        if length > rules.max_length:
            raise RowError(f"the text is {length} tokens long, at most {rules.max_length} fit")
    return Demonstration("", text)


def _columns(fields: Fields, *used: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in used}
