"""Parses rows: which fields make a demonstration, a comparison, a ranking or a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kedge.data.chat import render_answer, render_demonstration, render_prompt
from kedge.data.fields import (
    Fields,
    Messages,
    Role,
    check_fields,
    columns_of,
    entries_of,
    field_of,
    is_conversation,
    is_given,
    messages_of,
    number_of,
    rename_columns,
    text_of,
)
from kedge.data.forms import standard_form
from kedge.data.records import Comparison, Demonstration, Prompt, Ranking, RowError
from kedge.data.tokens import encode_completion, encode_example, encode_prompt
from kedge.data.truncation import (
    Truncate,
    oversized_prefix,
    reject_oversized,
    render_tldr,
    tldr_response,
    truncate_answer,
    truncate_conversation,
    truncate_prompt,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ReadingOptions", "Template", "TrainOn", "parse_comparison", "parse_demonstration", "parse_prompt"]


def parse_demonstration(value: object, options: ReadingOptions) -> Demonstration:
    """`prompt` + `completion`, `messages`, `text`, or a TL;DR post with its `summary`; a bare string counts as `text`.

    A comparison demonstrates its better answer.

    Raises:
        RowError: The row has another form.
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
        RowError: The row has another form, or is too long.
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
    """True if an answer of the row is a conversation: its prompt is then read as one."""
    responses = fields.get("responses")
    answers = [fields.get(name) for name in ("completion", "chosen", "rejected")]
    answers += responses if isinstance(responses, (list, tuple)) else []
    return any(is_conversation(answer if isinstance(answer, (list, tuple)) else [answer]) for answer in answers)


def _columns(fields: Fields, *used: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in used}


Template: TypeAlias = Literal["none", "tldr"]
TrainOn: TypeAlias = Literal["all", "last"]
_TLDR_FIELDS = ("subreddit", "title", "post")


@dataclass
class CutCounter:
    """Number of times that something was cut to fit."""

    count: int = 0

    def note(self, kept: object, whole: object) -> None:
        """Count a text that was cut."""
        self.count += kept != whole


@dataclass(frozen=True)
class ReadingOptions:
    """Options for parsing rows.

    Attributes:
        tokenizer: renders conversations and measures lengths.
        template: `tldr` builds prompts from the fields `subreddit`, `title` and `post`.
        max_prompt_tokens: the longest prompt, tokens, BOS included; None for no limit.
        max_length: the longest prompt plus answer, tokens, BOS and EOS included; None for no limit.
        truncate: treatment of a prompt that is too long alone or with its answers; answers to learn are never
            cut, answers of comparisons lose their end.
        columns: names of columns, ours → theirs; see `columns_of`.
        train_on: the assistant's messages that a demonstration teaches: all of them, or the last one.
        cuts: counts the prompts that were cut.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template = "none"
    max_prompt_tokens: int | None = None
    max_length: int | None = None
    truncate: Truncate = "never"
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    train_on: TrainOn = "all"
    cuts: CutCounter = field(default_factory=lambda: CutCounter())


def prompt_and_answers(
    fields: Fields, answers: Mapping[str, Any], options: ReadingOptions, *, cuts_answers: bool = False
) -> tuple[str, ...]:
    """The texts of a row: the prompt, followed by the answers.

    Args:
        fields: the row.
        answers: the answers' fields by name, unchecked.
        options: how rows are parsed.
        cuts_answers: cut answers as well as prompts, if `options.truncate` allows it; False for answers to learn.

    Raises:
        RowError: A part is missing, empty, of the wrong type or too long.
        DataError: The row is a conversation and the tokenizer has no chat template.
    """
    if options.template == "tldr":
        texts = {name: tldr_response(text_of(answer, name)) for name, answer in answers.items()}
        if cuts_answers:
            texts = _cut_answers(tldr_prompt(fields, options, budget=options.max_prompt_tokens), texts, options)
        prompt = tldr_prompt(fields, options, budget=_prompt_budget(texts, options))
        return check_lengths(prompt, texts, options)
    prompt = conversation_or_text(fields, "prompt", options)
    return render_prompt_and_answers(prompt, answers, options, cuts_answers=cuts_answers)


def conversation_or_text(fields: Fields, name: str, options: ReadingOptions) -> Any:
    """A prompt, or the conversation of the row's `messages` that its text repeats.

    It repeats the first question, as in UltraChat, or is the rendering of all messages, as in the rows that kedge
    writes.
    """
    prompt = field_of(fields, name)
    messages = fields.get("messages")
    if isinstance(prompt, str) and isinstance(messages, list) and messages and options.tokenizer.chat_template:
        conversation = messages_of(messages, "messages")
        asked = next((index for index, message in enumerate(conversation) if message["role"] == "user"), None)
        if asked is not None and conversation[asked]["content"] == prompt:
            return conversation[: asked + 1]
        with suppress(RowError):
            return conversation if render_prompt(options.tokenizer, conversation) == prompt else prompt
    return prompt


def render_prompt_and_answers(
    prompt: object, answers: Mapping[str, Any], options: ReadingOptions, *, cuts_answers: bool = False
) -> tuple[str, ...]:
    """The texts of a prompt and its answers; each may be a conversation, and all answers share one cut prompt."""
    if not any(isinstance(part, (list, tuple, Mapping)) for part in (prompt, *answers.values())):
        texts = {name: text_of(answer, name) for name, answer in answers.items()}
        if cuts_answers:
            texts = _cut_answers(text_of(prompt, "prompt"), texts, options)
        return check_lengths(cut_text(text_of(prompt, "prompt"), texts, options), texts, options)
    messages = as_messages(prompt, "prompt", "user")
    ends = {name: as_messages(answer, name, "assistant") for name, answer in answers.items()}
    texts = _render_answers(messages, ends, options)
    if cuts_answers:
        cut = _cut_answers(render_prompt(options.tokenizer, messages), texts, options)
        for name in (name for name in texts if cut[name] != texts[name]):
            # The end that the template writes stays: the answer loses as many characters as its rendering.
            *before, last = ends[name]
            kept_text = last["content"][: len(cut[name]) - len(texts[name])]
            ends[name] = [*before, {**last, "content": text_of(kept_text, name)}]
        texts = _render_answers(messages, ends, options)
    kept = cut_conversation(messages, texts, options)
    if kept != messages:
        texts = _render_answers(kept, ends, options)
    return check_lengths(render_prompt(options.tokenizer, kept), texts, options)


def conversation_to_learn(messages: Messages, first: int, name: str, options: ReadingOptions) -> Demonstration:
    """A conversation as a demonstration of its assistant's messages.

    Args:
        messages: the conversation.
        first: number of messages that belong to the prompt in any case, at least 1.
        name: the field that holds its end.
        options: how rows are parsed.

    Raises:
        RowError: The last message is not an answer, the template leaves out a part of a message, or the conversation is
            too long.
        DataError: The tokenizer has no chat template.
    """
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError(f"field {name!r} must end with an assistant message that follows another message")
    several = options.train_on == "all" and any(message["role"] == "assistant" for message in messages[first:-1])
    if not several:
        prompt, completion = render_prompt_and_answers(messages[:-1], {name: messages[-1:]}, options)
        return Demonstration(prompt, completion)
    if options.truncate != "never":
        # The length of all turns decides how many fit; the prompt, before the first answer, has a separate limit.
        whole = replace(options, max_prompt_tokens=None)
        answer = _render_answers(messages[:-1], {name: messages[-1:]}, options)
        kept = cut_conversation(messages[:-1], answer, whole)
        first = max(first - (len(messages) - 1 - len(kept)), 1)
        messages = [*kept, messages[-1]]
    learned = [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]
    prompt, completion, read = render_demonstration(options.tokenizer, messages, learned)
    check_lengths(prompt, {}, options)
    _reject_oversized({name: text_of(completion, name)}, options)
    if options.max_length is not None:
        example = encode_example(options.tokenizer, prompt, completion, read=read)
        length = len(example.prompt) + len(example.completion)
        if length > options.max_length:
            raise RowError(
                f"the conversation is {length} tokens long, at most {options.max_length} fit",
                f"prompt and answer longer than max_length={options.max_length}",
            )
    return Demonstration(prompt, completion, read)


def cut_text(prompt: str, answers: Mapping[str, str], options: ReadingOptions) -> str:
    """A plain-text prompt, cut to what its answers leave if `options.truncate` allows it.

    Raises:
        RowError: An answer alone is too long.
    """
    if options.truncate == "never" or (budget := _prompt_budget(answers, options)) is None:
        return prompt
    kept = truncate_prompt(options.tokenizer, prompt, budget, options.truncate, _kind(budget, options))
    options.cuts.note(kept, prompt)
    return kept


def cut_conversation(prompt: Messages, answers: Mapping[str, str], options: ReadingOptions) -> Messages:
    """A conversation, cut to what its answers leave if `options.truncate` allows it; errors as in `cut_text`."""
    if options.truncate == "never" or (budget := _prompt_budget(answers, options)) is None:
        return prompt
    kept = truncate_conversation(options.tokenizer, prompt, budget, options.truncate, _kind(budget, options))
    options.cuts.note(kept, prompt)
    return kept


def _cut_answers(prompt: str, answers: Mapping[str, str], options: ReadingOptions) -> dict[str, str]:
    """Answers without their end, where it leaves the prompt less than half of `max_length` and less than it needs."""
    if options.truncate == "never" or options.max_length is None:
        return dict(answers)
    tokenizer = options.tokenizer
    half = options.max_length // 2
    start = oversized_prefix(tokenizer, prompt, half) or prompt
    limits = (len(encode_prompt(tokenizer, start)), half, options.max_prompt_tokens or half)
    cut = {name: truncate_answer(tokenizer, text, options.max_length - min(limits)) for name, text in answers.items()}
    options.cuts.note(cut, answers)
    return cut


def _render_answers(prompt: Messages, answers: Mapping[str, Messages], options: ReadingOptions) -> dict[str, str]:
    return {name: text_of(render_answer(options.tokenizer, prompt, turn), name) for name, turn in answers.items()}


def as_messages(value: object, name: str, role: str) -> Messages:
    """A conversation; a plain text among conversations becomes one message with the given role."""
    return [{"role": role, "content": text_of(value, name)}] if isinstance(value, str) else messages_of(value, name)


def tldr_prompt(fields: Fields, options: ReadingOptions, *, budget: int | None) -> str:
    """The TL;DR prompt of a row, at most `budget` tokens long."""
    subreddit, title, post = (text_of(field_of(fields, name), name) for name in _TLDR_FIELDS)
    prompt = render_tldr(subreddit, title, post, options.tokenizer, budget)
    options.cuts.note(post.strip() in prompt, True)
    return prompt


def check_lengths(prompt: str, answers: Mapping[str, str], options: ReadingOptions) -> tuple[str, ...]:
    """The texts, after their lengths have been checked against the limits."""
    tokenizer = options.tokenizer
    longest = options.max_length
    longest_prompt = options.max_prompt_tokens
    if longest_prompt is not None:
        reject_oversized(tokenizer, prompt, longest_prompt, "the prompt", _prompt_kind(longest_prompt))
    if longest is not None:
        reject_oversized(
            tokenizer, prompt, longest, "the prompt", f"prompt and answer longer than max_length={longest}"
        )
    _reject_oversized(answers, options)
    length = len(encode_prompt(tokenizer, prompt))
    if length == 0:
        raise RowError("the prompt has no tokens")
    if longest_prompt is not None and length > longest_prompt:
        raise RowError(
            f"the prompt is {length} tokens long, at most {longest_prompt} fit", _prompt_kind(longest_prompt)
        )
    if longest is not None:
        for name, answer in answers.items():
            own = len(encode_completion(tokenizer, answer))
            if length + own > longest:
                parts = "answer alone" if own >= longest else "prompt and answer"
                raise RowError(
                    f"prompt and {name!r} are {length + own} tokens long, at most {longest} fit",
                    f"{parts} longer than max_length={longest}",
                )
    return (prompt, *answers.values())


def _prompt_kind(limit: int) -> str:
    return f"prompt longer than max_prompt_tokens={limit}"


def _kind(budget: int, options: ReadingOptions) -> str:
    """The kind of a prompt that is over a budget: which of the two limits it comes from."""
    if budget == options.max_prompt_tokens:
        return _prompt_kind(budget)
    return f"prompt and answer longer than max_length={options.max_length}"


def _prompt_budget(answers: Mapping[str, str], options: ReadingOptions) -> int | None:
    """The most tokens that a prompt may have next to the longest of its answers; None for no limit.

    Raises:
        RowError: An answer leaves no token for the prompt.
    """
    if options.max_length is None or not answers:
        return options.max_prompt_tokens
    _reject_oversized(answers, options)
    lengths = {name: len(encode_completion(options.tokenizer, answer)) for name, answer in answers.items()}
    name = max(lengths, key=lambda name: lengths[name])
    room = options.max_length - lengths[name]
    if room < 1:
        raise RowError(
            f"{name!r} alone is {lengths[name]} tokens long, at most {options.max_length} fit with its prompt",
            f"answer alone longer than max_length={options.max_length}",
        )
    return room if options.max_prompt_tokens is None else min(room, options.max_prompt_tokens)


def _reject_oversized(answers: Mapping[str, str], options: ReadingOptions) -> None:
    if options.max_length is not None:
        kind = f"answer alone longer than max_length={options.max_length}"
        for name, answer in answers.items():
            reject_oversized(options.tokenizer, answer, options.max_length, repr(name), kind)
