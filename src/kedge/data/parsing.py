"""Parses rows: which fields make a demonstration, a comparison, a ranking or a prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from kedge.data.chat import bare, generated_answers, render_answer, render_demonstration, render_prompt
from kedge.data.fields import (
    POST,
    Fields,
    Messages,
    Role,
    check_fields,
    check_rendered,
    columns_of,
    field_of,
    is_conversation,
    is_given,
    messages_of,
    number_of,
    rename_columns,
    text_of,
)
from kedge.data.forms import is_comparison, ranked_answers, standard_form
from kedge.data.marks import check_judged, excluded_answers
from kedge.data.records import Comparison, Demonstration, Prompt, Ranking, RowError
from kedge.data.tokens import encode_completion, encode_example, num_shared
from kedge.data.truncation import (
    Truncate,
    num_tokens,
    render_tldr,
    tldr_response,
    too_long,
    truncate_answer,
    truncate_conversation,
    truncate_prompt,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Post(NamedTuple):
    """A forum post as a prompt."""

    subreddit: str
    title: str
    post: str


_NOTHING_LEFT = "nothing to learn: the answers are excluded by their flags, or by the chat template's generation marks"

Turn: TypeAlias = "str | Messages | Post"
"""Part of a row: plain text, one or several messages, or a post."""


@dataclass(frozen=True)
class ReadingOptions:
    """Options for parsing rows.

    Attributes:
        tokenizer: renders conversations and measures lengths.
        template: `tldr` builds prompts from `subreddit`, `title` and `post`, cut at a paragraph where necessary.
        max_prompt_tokens: the longest prompt, tokens, BOS included; None for no limit.
        max_length: the longest prompt plus answer, tokens, BOS and EOS included; None for no limit.
        truncate: treatment of a prompt that is too long, alone or with its answers; answers to learn are never cut,
            answers of comparisons are cut at the end.
        columns: names of columns, ours → theirs; see `columns_of`.
        train_on: the assistant's messages that a demonstration teaches: all of them, or the last one.
        cuts: collects what was cut to fit.
        ties: accept rankings whose ranks are all equal.
        grades: collects columns with numbers that may judge answers; nothing else reads these columns.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Literal["none", "tldr"] = "none"
    max_prompt_tokens: int | None = None
    max_length: int | None = None
    truncate: Truncate = "never"
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on: Literal["all", "last"] = "all"
    ties: bool = False
    cuts: list[object] = field(default_factory=list)
    grades: set[str] = field(default_factory=set)


def parse_demonstration(value: object, options: ReadingOptions) -> Demonstration:
    """`prompt` + `completion`, `messages`, `text`, or a TL;DR post with its `summary`; a bare string counts as `text`.

    A comparison demonstrates its better answer.

    Raises:
        RowError: The row has another form.
    """
    given, fields = _read(value, "text", "demonstrations", options)
    name = "completion"
    if options.template == "tldr":
        name = "chosen" if is_given(fields, "chosen") and not is_given(fields, "summary") else "summary"
    elif not is_given(fields, name):
        if is_given(fields, "messages"):
            name = "messages"
        elif is_given(fields, "text") and not is_given(fields, "prompt"):
            text = bare(options.tokenizer, text_of(fields["text"], "text"))
            return _whole(Demonstration("", text), "text", "text", options)
    answer = field_of(fields, name)
    if is_given(given, "completion") or not is_comparison(given):
        options.grades.update(check_judged(given, answer))
    excluded = excluded_answers(given)
    if name == "messages":
        return _conversation_to_learn(messages_of(answer, name), 1, name, excluded, options)
    if isinstance(answer, (list, tuple)) and len(answer) > 1:
        start = _as_messages(field_of(fields, "prompt"), "prompt", "user")
        answers = messages_of(answer, "completion")
        asked = _up_to_question(answers, fields["prompt"]) or start
        if answers[: len(asked)] == asked:  # the completion is the whole conversation
            return _conversation_to_learn(answers, len(asked), "completion", excluded, options)
        if start[-1]["role"] == answers[0]["role"] == "assistant":
            raise RowError(
                "field 'prompt' ends with an assistant message, and 'completion' starts with one and has several: make "
                "one message of the two, and write it into one of the fields"
            )
        return _conversation_to_learn([*start, *answers], len(start), "completion", excluded, options)
    if -1 in excluded:
        raise RowError(_NOTHING_LEFT)
    prompt, completion = _prompt_and_answers(fields, {name: answer}, options)
    return Demonstration(prompt, completion)


def parse_comparison(value: object, options: ReadingOptions) -> Comparison | Ranking:
    """`prompt` + `chosen` + `rejected` (and `margin`), or `prompt` + `responses` + `ranks`.

    The prompt may be omitted where `chosen` and `rejected` both start with it.

    Raises:
        RowError: The row has neither form, or expresses no preference.
    """
    _, fields = _read(value, "", "comparisons", options)
    if is_given(fields, "responses") and not is_given(fields, "chosen"):
        return _ranking(fields, options)
    answers = {name: field_of(fields, name) for name in ("chosen", "rejected")}
    prompt, chosen, rejected = _prompt_and_answers(fields, answers, options, cuts_answers=True)
    if chosen == rejected:
        written = (
            "" if answers["chosen"] == answers["rejected"] else ", once special tokens and the chat template are added"
        )
        raise RowError(f"fields 'chosen' and 'rejected' hold the same answer{written}")
    margin = number_of(fields["margin"], "margin") if is_given(fields, "margin") else None
    if margin is not None and margin < 0:
        raise RowError(f"field 'margin' is {margin:g}, expected at least 0: swap 'chosen' and 'rejected' instead")
    return Comparison(prompt, chosen, rejected, margin)


def parse_prompt(value: object, options: ReadingOptions) -> Prompt:
    """`prompt`, `messages`, `text`, a TL;DR post, or a bare string; the other fields become columns.

    The messages of a conversation stay available to reward functions as the column `messages`, without the answer to
    them, and all fields of a post: a reward function may need the text that was cut from the prompt.

    Raises:
        RowError: The row has another form, or is too long.
    """
    _, fields = _read(value, "prompt", "prompts", options)
    columns = dict(fields)
    if options.template == "tldr":
        prompt = _post(fields)
    else:
        name = next((name for name in ("prompt", "messages", "text") if is_given(fields, name)), "prompt")
        prompt = _prompt(fields, name, options)
        del columns[name]
    prompt = bare(options.tokenizer, prompt) if isinstance(prompt, list) else prompt
    kept = _cut(prompt, {}, options)
    [text] = _checked_lengths(*_rendered(kept, {}, options), options)
    if not isinstance(kept, str):
        columns["messages"] = kept
    elif is_given(fields, "messages"):
        columns["messages"] = _conversation_beside(prompt, fields)
    return Prompt(text, columns)


def _read(value: object, name: str, role: Role, options: ReadingOptions) -> tuple[Fields, Fields]:
    """Return a row under kedge's names, both as it is and converted to one of kedge's forms.

    A bare text becomes the field `name`, and a bare conversation `messages`. Missing values, as in concatenated data
    sets, do not count as fields, but stay in the row for reward functions.
    """
    columns = columns_of(options.columns, role)
    is_text = bool(name) and isinstance(value, str)
    fields = check_fields(
        {name: value} if is_text else {"messages": value} if name and is_conversation(value) else value
    )
    if columns and not (is_text and name not in columns.values()):
        fields = rename_columns(fields, columns)
    if options.template == "tldr":
        return fields, fields
    standard = standard_form(
        {key: value for key, value in fields.items() if is_given(fields, key)}, role, options.tokenizer
    )
    is_named = "system" in columns
    if "system" in standard and (is_named or isinstance(standard["system"], str)):
        standard = _with_system(standard, options, is_named=is_named)
    if any(is_conversation(standard.get(name)) for name in ("messages", "prompt")):
        check_rendered(standard)
    rest = {key: value for key, value in fields.items() if not is_given(fields, key) and key not in standard}
    return fields, {**rest, **standard}


def _with_system(fields: Fields, options: ReadingOptions, *, is_named: bool) -> Fields:
    """Put a row's `system` at the start of its conversation, as the first message.

    Raises:
        RowError: The column was named, and the row is plain text, or starts with a different system message.
    """
    system: Messages = [{"role": "system", "content": text_of(fields["system"], "system")}]
    conversations: dict[str, Messages] = {}
    for name in ("prompt", "messages", "text"):
        if name not in fields or (name == "text" and conversations):
            continue
        is_asked = name == "prompt" and options.tokenizer.chat_template and _has_conversation(fields)
        if name != "messages" and isinstance(fields[name], str) and not is_asked:
            if not is_named:
                continue
            raise RowError(
                f"field 'system' starts a conversation, but {name!r} is plain text; write it as messages, or name the "
                "columns data.columns.instruction and, of its answer, data.columns.output"
            )
        messages = _as_messages(fields[name], name, "user") if is_asked else messages_of(fields[name], name)
        if messages[0]["role"] != "system":
            messages = [*system, *messages]
        elif is_named and messages[:1] != system:
            raise RowError(f"field {name!r} starts with a system message that differs from 'system'")
        conversations[name] = messages
    return {**fields, **conversations}


def _prompt(fields: Fields, name: str, options: ReadingOptions) -> Turn:
    """Read the prompt to sample responses to: plain text, or a conversation without its final answer."""
    prompt = _conversation_or_text(fields, name, options)
    if isinstance(prompt, str) and name != "messages":
        prompt = text_of(prompt, name)
        if options.tokenizer.chat_template and _has_conversation(fields):
            return _as_messages(prompt, name, "user")  # as when training on these answers
        return prompt
    messages = messages_of(prompt, name)
    return _without_answer(messages) if name == "messages" else messages


def _conversation_beside(prompt: Turn, fields: Fields) -> Messages:
    """Read `messages` next to a plain-text prompt, up to the answer; reward models render them with the response."""
    conversation = messages_of(fields["messages"], "messages")
    return _up_to_question(conversation, prompt) or _without_answer(conversation)


def _without_answer(messages: Messages) -> Messages:
    return messages[:-1] if messages[-1]["role"] == "assistant" and len(messages) > 1 else messages


def _up_to_question(conversation: Messages, question: object) -> Messages:
    """Cut a conversation after its first question, if that is the given text; else return no messages."""
    asked = next((index for index, message in enumerate(conversation) if message["role"] == "user"), None)
    if asked is None or conversation[asked]["content"] != question:
        return []
    return conversation[: asked + 1]


def _conversation_or_text(fields: Fields, name: str, options: ReadingOptions) -> Any:
    """Return a prompt, or the conversation in `messages` that its text repeats.

    The text may repeat the first question, as in UltraChat, or render all messages, as in rows that kedge writes.
    """
    prompt = field_of(fields, name)
    messages = fields.get("messages")
    if isinstance(prompt, str) and isinstance(messages, list) and messages and options.tokenizer.chat_template:
        conversation = messages_of(messages, "messages")
        if asked := _up_to_question(conversation, prompt):
            return asked
        with suppress(RowError):
            return conversation if render_prompt(options.tokenizer, conversation) == prompt else prompt
    return prompt


def _has_conversation(fields: Fields) -> bool:
    """True if an answer in the row is a conversation; the prompt is then also read as one."""
    responses = fields.get("responses")
    answers = [fields.get(name) for name in ("completion", "chosen", "rejected")]
    answers += responses if isinstance(responses, (list, tuple)) else []
    return any(is_conversation(answer if isinstance(answer, (list, tuple)) else [answer]) for answer in answers)


def _ranking(fields: Fields, options: ReadingOptions) -> Ranking:
    responses, ranks = ranked_answers(fields)
    if any(is_given(fields, name) for name in ("margin", "margins")):
        raise RowError("a ranking has no margin: leave 'margin' out, or write 'chosen' and 'rejected' of each pair")
    if len(set(ranks)) < 2 - options.ties:
        raise RowError("all entries of 'ranks' are equal: at least two different ranks are needed")
    answers = {f"responses[{index}]": entry for index, entry in enumerate(responses)}
    prompt, *texts = _prompt_and_answers(fields, answers, options, cuts_answers=True)
    if len(set(zip(texts, ranks, strict=True))) > len(set(texts)):
        raise RowError("field 'responses' holds the same answer twice, with different ranks")
    if len(set(texts)) < 2:
        raise RowError("field 'responses' holds a single answer: a ranking needs at least two")
    return Ranking(prompt, tuple(texts), tuple(ranks))


def _prompt_and_answers(
    fields: Fields, given: Mapping[str, Any], options: ReadingOptions, *, cuts_answers: bool = False
) -> tuple[str, ...]:
    """Render a row's prompt and answers to texts that fit.

    Each may be a conversation; all answers share one prompt, cut if necessary.

    Args:
        fields: the row.
        given: the answers' fields by name, unchecked.
        options: how rows are parsed.
        cuts_answers: also cut answers, if `options.truncate` allows it; False for answers to learn.

    Raises:
        RowError: A part is missing, empty, of the wrong type or too long.
        DataError: The row is a conversation and the tokenizer has no chat template.
    """
    if options.template == "tldr":
        posted = {name: tldr_response(text_of(answer, name)) for name, answer in given.items()}
        return _fitted(_post(fields), posted, options, cuts_answers=cuts_answers)
    prompt = _conversation_or_text(fields, "prompt", options)
    if any(isinstance(part, (list, tuple, Mapping)) for part in (prompt, *given.values())):
        prompt = _as_messages(prompt, "prompt", "user")
        answers = {
            name: turn[num_shared(prompt, turn[:-1]) :]  # a whole conversation repeats the prompt
            for name, answer in given.items()
            for turn in [_as_messages(answer, name, "assistant")]
        }
    else:
        answers = {name: text_of(answer, name) for name, answer in given.items()}
        prompt = text_of(prompt, "prompt")
    return _fitted(prompt, answers, options, cuts_answers=cuts_answers)


def _fitted(
    prompt: Turn, answers: Mapping[str, str | Messages], options: ReadingOptions, *, cuts_answers: bool = False
) -> tuple[str, ...]:
    """Cut prompt and answers to the limits, and render them."""
    prompt = bare(options.tokenizer, prompt) if isinstance(prompt, list) else prompt
    answers = {name: bare(options.tokenizer, answer) for name, answer in answers.items()}
    start, texts = _rendered(prompt, answers, options)
    if cuts_answers and options.truncate != "never" and options.max_length is not None:
        answers = _without_ends(start, answers, texts, options.max_length, options)
        start, texts = _rendered(prompt, answers, options)
    kept = _cut(prompt, texts, options)
    if kept != prompt:
        start, texts = _rendered(kept, answers, options)
    return _checked_lengths(start, texts, options)


def _conversation_to_learn(
    messages: Messages, first: int, name: str, excluded: Collection[int], options: ReadingOptions
) -> Demonstration:
    """Convert a conversation to a demonstration of its assistant's messages.

    Args:
        messages: the conversation.
        first: number of messages that always belong to the prompt, at least 1.
        name: the field with the end of the conversation.
        excluded: answers that are not learned, as negative indices.
        options: how rows are parsed.

    Raises:
        RowError: The last message is not an answer, no answer is to be learned, the template leaves out a part of a
            message, or the conversation is too long.
        DataError: The tokenizer has no chat template.
    """
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError(f"field {name!r} must end with an assistant message that follows another message")
    messages = bare(options.tokenizer, messages)
    count = len(messages)
    wanted = [index for index in range(first, count) if messages[index]["role"] == "assistant"]
    wanted = wanted[-1:] if options.train_on == "last" else wanted
    kept = [index for index in wanted if index - count not in excluded]
    learned = generated_answers(options.tokenizer, messages, kept)
    if not learned:
        raise RowError(_NOTHING_LEFT)
    messages = messages[: learned[-1] + 1]  # drop what follows the last learned answer: it changes nothing
    last = {name: messages[-1:]}
    if len(learned) == 1 and messages[-2]["role"] != "assistant":  # otherwise the answer would continue the one before
        prompt, completion = _fitted(messages[:-1], last, options)
        return Demonstration(prompt, completion)
    if options.truncate != "never":
        # The length of all turns determines how many fit; the prompt, before the first answer, has a separate limit.
        limits = options if len(learned) == 1 else replace(options, max_prompt_tokens=None)
        left = _cut(messages[:-1], _rendered(messages[:-1], last, options)[1], limits)
        dropped = len(messages) - 1 - len(left)
        rest = [*cast("Messages", left), messages[-1]]
        # The place of a dropped answer holds another message, or none.
        learned = [at - dropped for at in learned if at >= dropped and rest[at - dropped] is messages[at]]
        messages = rest
    prompt, completion, read = render_demonstration(options.tokenizer, messages, learned)
    _checked_lengths(prompt, {}, options)
    record = Demonstration(prompt, text_of(completion, name), read)
    return _whole(record, "conversation", "prompt and answer", options)


def _whole(record: Demonstration, name: str, kind: str, options: ReadingOptions) -> Demonstration:
    """Check the total length of a demonstration, and return it."""

    def encode(tokenizer: PreTrainedTokenizerBase, completion: str) -> list[int]:
        example = encode_example(tokenizer, record.prompt, completion, read=record.read)
        return [*example.prompt, *example.completion]

    if (longest := options.max_length) is not None:
        length = num_tokens(options.tokenizer, record.completion, longest, encode)
        if length > longest:
            raise too_long(f"the {name} is", record.completion, length, longest, f"{kind} longer than max_length")
    return record


def _rendered(
    prompt: Turn, answers: Mapping[str, str | Messages], options: ReadingOptions
) -> tuple[str, dict[str, str]]:
    """Render a prompt, and what each answer adds to it; beside a conversation, all answers are messages."""
    tokenizer = options.tokenizer
    if isinstance(prompt, Post):
        return render_tldr(*prompt, tokenizer, options.max_prompt_tokens), dict(cast("Mapping[str, str]", answers))
    if isinstance(prompt, str):
        return prompt, dict(cast("Mapping[str, str]", answers))
    start = render_prompt(tokenizer, prompt)
    turns = cast("Mapping[str, Messages]", answers)
    return start, {
        name: text_of(render_answer(tokenizer, prompt, answer, start), name) for name, answer in turns.items()
    }


def _cut(prompt: Turn, answers: Mapping[str, str], options: ReadingOptions) -> str | Messages:
    """Cut a prompt to the room that its answers leave: a post always, other prompts only if `options.truncate` allows
    it.
    """
    budget = _prompt_budget(answers, options)
    whole = prompt
    if isinstance(prompt, Post):
        whole = render_tldr(*prompt, options.tokenizer)
        kept = render_tldr(*prompt, options.tokenizer, budget)
    elif options.truncate == "never" or budget is None:
        return prompt
    elif isinstance(prompt, str):
        kept = truncate_prompt(options.tokenizer, prompt, budget, options.truncate)
    else:
        kept = truncate_conversation(options.tokenizer, prompt, budget, options.truncate)
    if kept != whole:
        options.cuts.append(kept)
    return kept


def _without_ends(
    start: str,
    answers: Mapping[str, str | Messages],
    texts: Mapping[str, str],
    max_length: int,
    options: ReadingOptions,
) -> dict[str, str | Messages]:
    """Cut the ends of answers that leave the prompt less than half of `max_length` and less than it needs.

    Raises:
        RowError: Two answers differ only where they are cut.
    """

    def ending(answer: str | Messages) -> str:
        return answer if isinstance(answer, str) else answer[-1]["content"]

    half = max_length // 2
    needed = num_tokens(options.tokenizer, start, half)
    room = max_length - min(needed, half, options.max_prompt_tokens or half)
    kept = dict(answers)
    for name, answer in answers.items():
        text = truncate_answer(options.tokenizer, texts[name], room)
        if text == texts[name]:
            continue
        options.cuts.append(text)
        if isinstance(answer, str):
            kept[name] = text
        else:
            # The template's closing must be kept, so shorten the content by the length of its rendering.
            *before, last = answer
            shorter = text_of(last["content"][: len(text) - len(texts[name])], name)
            kept[name] = [*before, {**last, "content": shorter}]
        for other in answers.keys() - {name}:
            if ending(answers[other]).startswith(ending(kept[name])):
                kind = "answers that differ only where they are cut to fit"
                raise RowError(f"fields {name!r} and {other!r} hold {kind}", kind)
    return kept


def _as_messages(value: object, name: str, role: str) -> Messages:
    """Read a conversation; plain text becomes a single message with the given role."""
    return [{"role": role, "content": text_of(value, name)}] if isinstance(value, str) else messages_of(value, name)


def _post(fields: Fields) -> Post:
    return Post(*(text_of(field_of(fields, name), name) for name in POST))


def _checked_lengths(prompt: str, answers: Mapping[str, str], options: ReadingOptions) -> tuple[str, ...]:
    """Check prompt and answers against the length limits, and return them."""
    longest = options.max_length
    longest_prompt = options.max_prompt_tokens
    limits = [limit for limit in (longest, longest_prompt) if limit is not None]
    length = num_tokens(options.tokenizer, prompt, max(limits, default=None))
    if length == 0:
        raise RowError("the prompt has no tokens")
    if longest_prompt is not None and length > longest_prompt:
        subject = "the prompt, once cut, is" if options.cuts else "the prompt is"
        raise too_long(subject, prompt, length, longest_prompt, "prompt longer than max_prompt_tokens")
    for name, answer in answers.items():
        if longest is None:
            break
        answer_length = num_tokens(options.tokenizer, answer, longest, encode_completion)
        if length + answer_length > longest:
            kind = f"{'answer alone' if answer_length >= longest else 'prompt and answer'} longer than max_length"
            raise too_long(f"prompt and {name!r} are", prompt + answer, length + answer_length, longest, kind)
    return (prompt, *answers.values())


def _prompt_budget(answers: Mapping[str, str], options: ReadingOptions) -> int | None:
    """The maximum tokens of a prompt together with its longest answer; None for no limit.

    An answer that leaves no room for a prompt is rejected later.
    """
    longest = options.max_length
    limits = [options.max_prompt_tokens]
    if longest is not None and answers:
        lengths = [num_tokens(options.tokenizer, answer, longest, encode_completion) for answer in answers.values()]
        limits.append(longest - max(lengths))
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)
