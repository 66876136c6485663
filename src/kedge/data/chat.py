"""Renders conversations with the tokenizer's chat template, and splits them where answers start and end."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kedge.data.fields import Messages
from kedge.data.records import RowError
from kedge.data.tokens import Rendered, num_shared, special_wrapping
from kedge.template_worker import render
from kedge_base.errors import DataError
from kedge_base.texts import error_text
from kedge_base.workers.log import CallLog
from kedge_base.workers.process import Request, WorkerEnded, WorkerError, WorkerProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 40
"""Maximum characters of a text quoted in an error."""


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, in_full: bool = True) -> Rendered:
    """Render a conversation up to the next assistant turn; a trailing assistant message is left open to continue.

    Args:
        tokenizer: The model's.
        messages: The conversation.
        in_full: Refuse a template that leaves out a part of a message.

    Raises:
        DataError: The tokenizer has no chat template.
        RowError: The template rejects these messages, or leaves out a part of one.
    """
    unfinished = messages[-1]["role"] == "assistant"
    text = _render(tokenizer, messages, add_generation_prompt=not unfinished, continue_final_message=unfinished)
    if in_full:
        _check_all_shown(text, enumerate(messages))
    return Rendered(text)


def render_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, answer: Messages, start: str, *, in_full: bool = True
) -> str:
    """Render the text that an answer adds to its rendered prompt, without the end-of-sequence token.

    It ends with the closing of the answer's turn, such as `<|eot_id|>`. What a template adds after that, such as line
    breaks or the header of the next answer, belongs to the next turn and must not be learned. Encoding adds the
    end-of-sequence token once, as for plain text.

    Args:
        tokenizer: The model's.
        prompt: The conversation up to the answer. A final assistant message is the start of the answer.
        answer: The assistant's message, or several messages.
        start: The prompt as `render_prompt` renders it.
        in_full: Refuse a template that leaves out a part of a message.

    Raises:
        DataError: The tokenizer has no chat template.
        RowError: The template rejects the messages, leaves out a part of one, or renders the prompt differently once
            an answer follows.
    """
    if prompt[-1]["role"] == answer[0]["role"] == "assistant":
        begun = {**answer[0], "content": prompt[-1]["content"] + answer[0]["content"]}
        prompt = prompt[:-1]
        answer = [begun, *answer[1:]]
    whole = _render(tokenizer, [*prompt, *answer])
    if in_full:
        _check_all_shown(whole, enumerate(answer[:-1], start=len(prompt)))
    before = start
    if len(answer) > 1 and whole.startswith(start):
        # An earlier message of the answer may contain the same text as its last one.
        is_answer = answer[-1]["role"] == "assistant"
        before = _render(tokenizer, [*prompt, *answer[:-1]], add_generation_prompt=is_answer)
        before = whole[: max(len(start), num_shared(whole, before))]
    end = _end_of_answer(tokenizer, whole, before, answer[-1], len(prompt) + len(answer) - 1, in_full=in_full)
    return _without_eos(tokenizer, whole[len(start) : end])


def render_demonstration(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, learned: Sequence[int]
) -> tuple[Rendered, str, tuple[tuple[int, int], ...]]:
    """Render a conversation and split it into the prompt and the text after it, with the ranges of that text that are
    only read.

    Args:
        tokenizer: The model's.
        messages: The conversation; the last message is learned.
        learned: Indices of the learned messages, ascending, not including the first message.

    Returns:
        The text before the first learned message; the text from there on, without a final end-of-sequence token; and
        the ranges of the latter, in characters, that are not learned.

    Raises:
        DataError: The tokenizer has no chat template.
        RowError: The template rejects the messages, leaves out a part of one, or renders the conversation before an
            answer differently once more messages follow.
    """
    _check_has_template(tokenizer)
    begun = [(index, {"add_generation_prompt": True}) for index in learned]
    whole, *starts = apply_to_parts(tokenizer, messages, [(len(messages), {}), *begun])
    _check_all_shown(whole, ((index, message) for index, message in enumerate(messages) if index not in learned))
    spans: list[tuple[int, int]] = []
    for index, start, following in zip(learned, starts, [*starts[1:], whole], strict=True):
        is_last = index == len(messages) - 1
        try:
            end = _end_of_answer(tokenizer, whole, start, messages[index], index, is_last=is_last)
            if end > len(following):  # the template shortens this answer; the text was found in a later one
                raise _left_out(whole, messages[index], index)
            spans.append((len(start), end))
        except RowError as error:
            if is_last:
                raise
            raise RowError(f"{error}; data.train_on=last learns the last answer only", error.kind) from error
    begin = spans[0][0]
    end = spans[-1][1]
    read = tuple((first - begin, last - begin) for (_, first), (last, _) in pairwise(spans))
    return Rendered(whole[:begin]), _without_eos(tokenizer, whole[begin:end]), read


def generated_answers(tokenizer: PreTrainedTokenizerBase, messages: Messages, answers: list[int]) -> list[int]:
    """Return the indices of the answers that the template marks with `{% generation %}`; all answers without marks.

    Raises the errors of `render_demonstration`.
    """
    template = str(tokenizer.chat_template)
    marked = re.sub(
        r"(\{%[-+]?\s*generation\b.*?%\})(.*?)(\{%[-+]?\s*endgeneration)",
        "\\1\ufdd0\\2\ufdd1\\3",
        template,
        flags=re.DOTALL,
    )
    if marked == template:
        return answers
    named = [
        {**message, "content": f"{message['content']}\ufdd2{index}\ufdd2"} for index, message in enumerate(messages)
    ]
    inside = re.findall("\ufdd0.*?\ufdd1", apply_template(tokenizer, named, chat_template=marked), flags=re.DOTALL)
    return [index for index in answers if f"\ufdd2{index}\ufdd2" in "".join(inside)]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an assistant's message, such as `<end_of_turn>`.

    None without a template, if it rejects a question with an answer, or if it writes no special token there.
    """
    return special_tokens(tokenizer).get(closing_of(tokenizer)) if tokenizer.chat_template else None


def closing_of(tokenizer: PreTrainedTokenizerBase, *, is_last: bool = True) -> str:
    """The text with which the chat template closes an assistant's message, stripped of whitespace.

    Empty if it writes nothing there, or rejects a question with an answer.

    Args:
        tokenizer: The model's.
        is_last: For the last message of a conversation, or for an earlier one, which may be closed differently.
    """
    last, earlier = _closings(tokenizer, str(tokenizer.chat_template))
    return last if is_last else earlier


def bare(tokenizer: PreTrainedTokenizerBase, turn: str | Messages) -> Any:
    """Strip BOS and EOS from the ends of a text or of messages, since rendering and encoding add them anyway.

    Args:
        tokenizer: The model's, which adds both to a text; to messages, the chat template adds them.
        turn: The text or the messages.
    """
    end = str(tokenizer.eos_token or "")
    if isinstance(turn, str):
        start = "".join(map(str, tokenizer.convert_ids_to_tokens(special_wrapping(tokenizer)[0])))
        return _stripped(turn, start, end)
    bos = str(tokenizer.bos_token or "")
    start = bos if any(each in str(tokenizer.chat_template) for each in ("bos_token", bos)) else ""
    ends = {"assistant": end if closing_of(tokenizer) else ""}
    return [
        {**message, "content": _stripped(message["content"], start, ends.get(message["role"], ""))} for message in turn
    ]


def _stripped(text: str, start: str, end: str) -> str:
    """Strip `start` and `end` from a text; an answer that is only EOS keeps it."""
    while start and text.startswith(start):
        text = text.removeprefix(start)
    short = re.sub(rf"{re.escape(end)}(\s|{re.escape(end)})*\Z", "", text) if end else text
    return short if short.strip() else text.strip()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids of the tokenizer's special tokens: those with a role, such as EOS, and all others marked as special."""
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {**added, **{token: index for token, index in roles if token}}


@lru_cache(maxsize=8)
def _closings(tokenizer: PreTrainedTokenizerBase, _template: str) -> tuple[str, str]:
    """Find out how the tokenizer's template closes a conversation's last answer, and an earlier one."""
    question = "How deep is it?"
    answer = "Nine fathoms."
    reply = "How cold?"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        before, found, after = apply_template(tokenizer, turns).rpartition(answer)
        further = apply_template(tokenizer, [*turns, {"role": "user", "content": reply}])
    except (DataError, RowError):
        return "", ""
    if not found:
        return "", ""
    opening, _, asked = before.partition(question)
    between = further.partition(answer)[2].partition(reply)[0]
    special = special_tokens(tokenizer)

    def token_before(*texts: str) -> str:
        """The special token with which all texts start."""
        return max((token for token in special if all(text.startswith(token) for text in texts)), key=len, default="")

    # A token after an answer may be the next turn's header; it only closes turns if it also follows other turns.
    after = after.lstrip()
    asked = asked.lstrip()
    between = between.lstrip()
    header = opening[len(opening) - num_shared(opening[::-1], between[::-1]) :]
    middle = token_before(between, asked) or token_before(between, after) or between.removesuffix(header).strip()
    if token_before(between, after) or before.endswith(after):
        # After the last answer comes the header of the next answer, or nothing.
        return token_before(between, after) or (middle if after.startswith(middle) else ""), middle
    return token_before(after) or between[: num_shared(between, after)].strip(), middle


def _end_of_answer(
    tokenizer: PreTrainedTokenizerBase,
    whole: str,
    start: str,
    message: dict[str, str],
    index: int,
    *,
    is_last: bool = True,
    in_full: bool = True,
) -> int:
    """The offset in the rendered conversation where a message after `start` ends, including its turn's closing."""
    content = message["content"]
    closing = closing_of(tokenizer, is_last=is_last) if message["role"] == "assistant" else ""
    # The message may start inside the header that ends the prompt, as with `<think>`.
    for ending in dict.fromkeys((closing, "")):
        for begin in (len(start), max(0, len(start) - len(content) - _SHOWN)):
            end = _end_of_content(whole, content, ending, begin, at_least=len(start))
            if end is not None and whole.startswith(start):
                return end
    if _end_of_content(whole, content, "", 0) is None and in_full:
        raise _left_out(whole, message, index)
    if not whole.startswith(start):
        same = num_shared(whole, start)
        raise RowError(
            "the chat template renders the prompt differently once an answer follows: "
            f"{start[same:][:_SHOWN]!r} becomes {whole[same:][:_SHOWN]!r}"
        )
    last = whole.rfind(closing, len(start)) if closing else -1
    return len(whole.rstrip()) if last < 0 else last + len(closing)


def _end_of_content(whole: str, content: str, ending: str, begin: int, *, at_least: int = 0) -> int | None:
    """The offset after a text and the `ending` that follows it; None if missing. Whitespace may differ."""
    exact = _end_of(whole, content.strip(), ending, begin, at_least)
    if exact is not None:
        return exact
    text, least, content, ending = (
        "".join(each.split()) for each in (whole[begin:], whole[begin:at_least], content, ending)
    )
    count = _end_of(text, content, ending, 0, len(least))
    if not count:
        return None
    for word in re.compile(r"\S+").finditer(whole, begin):
        if count <= len(word[0]):
            return word.start() + count
        count -= len(word[0])
    return None


def _end_of(whole: str, content: str, ending: str, begin: int, at_least: int) -> int | None:
    follows = re.compile(rf"\s*{re.escape(ending)}" if ending else "")
    at = whole.find(content, begin)
    while at >= 0:
        if (found := follows.match(whole, at + len(content))) and found.end() >= at_least:
            return found.end()
        at = whole.find(content, at + 1)
    return None


def _check_all_shown(whole: str, numbered: Iterable[tuple[int, dict[str, str]]]) -> None:
    """Check that the rendered conversation contains these messages, given with their indices.

    Templates may shorten earlier answers to their conclusion, and write tool results as JSON: only their last word has
    to appear.
    """
    for index, message in numbered:
        content = message["content"]
        if message["role"] in ("system", "user"):
            shown = _end_of_content(whole, content, "", 0) is not None
        else:
            words = re.findall(r"\w+", content)
            shown = not words or words[-1] in whole or content.rstrip().endswith((">", "]"))
        if not shown:
            raise _left_out(whole, message, index)


def _left_out(whole: str, message: dict[str, str], index: int) -> RowError:
    missing = message["content"].strip()
    place = 0
    for line in filter(None, map(str.strip, message["content"].splitlines())):
        place = whole.find(line, place)
        if place < 0:
            missing = line
            break
    return RowError(
        f"the chat template leaves out a part of message {index + 1} ({message['role']}): {missing[:_SHOWN]!r}; "
        "data.chat_template names a template that keeps it",
        f"message of the {message['role']} of which the chat template leaves out a part",
    )


def _without_eos(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    return text.removesuffix(str(tokenizer.eos_token or ""))


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **settings: Any) -> str:
    _check_has_template(tokenizer)
    return apply_template(tokenizer, messages, **settings)


def _check_has_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise DataError(
            "the row is a conversation, but the tokenizer has no chat template: name one with data.chat_template "
            "(chatml, zephyr or a file), use an instruction-tuned model, or write prompts and completions as plain text"
        )


TEMPLATE_SECONDS = 10.0
TEMPLATE_MEMORY = 2**30
STARTUP_SECONDS = 120.0
AT_ONCE = 2**20
"""Maximum characters of messages that are rendered within the limits of one request, after its first rendering."""
LONGEST_TEXT = 2**27
"""Maximum characters of a rendered conversation, the same as the byte limit of a line in a file."""


_day: str | None = None


def render_as_of(day: str) -> None:
    """Set the date that templates write, as in `Today Date: …`, so that it stays the same when a run is resumed.

    Args:
        day: Such as `2026-02-28`; remains in effect in this process until set again. By default, templates write
            today's date.
    """
    global _day
    _day = day


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, chat_template: str | None = None, **settings: Any
) -> str:
    """Render a conversation with the tokenizer's chat template, in jinja's sandbox, with limits on time and memory.

    A tokenizer class with its own method for this is code that the user trusts, and runs in this process; so does
    every template on Windows. Neither has limits.

    Args:
        tokenizer: Must have a chat template unless one is given.
        messages: The conversation.
        chat_template: Instead of the tokenizer's.
        settings: Passed to `apply_chat_template`.

    Raises:
        DataError: The template exceeds its time or memory limit.
        RowError: The template rejects these messages, or its output is too long.
    """
    return apply_to_parts(tokenizer, messages, [(len(messages), settings)], chat_template)[0]


def apply_to_parts(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    parts: Sequence[tuple[int, Mapping[str, Any]]],
    chat_template: str | None = None,
) -> list[str]:
    """Render beginnings of a conversation as `apply_template` does, with few requests to the process that renders.

    Args:
        tokenizer: Must have a chat template unless one is given.
        messages: The conversation.
        parts: The number of messages of each beginning, and its settings for `apply_chat_template`.
        chat_template: Instead of the tokenizer's.

    Raises:
        DataError: The template exceeds its time or memory limit.
        RowError: The template rejects these messages, or its output is too long.
    """
    sizes = [0, *accumulate(len(str(message)) for message in messages)]
    totals = accumulate(sizes[count] for count, _ in parts)
    texts: list[str] = []
    for _, pairs in groupby(zip(totals, parts, strict=True), lambda pair: pair[0] // AT_ONCE):
        together = [part for _, part in pairs]
        longest = messages[: max(count for count, _ in together)]
        texts += map(_text_of, _replies(tokenizer, longest, together, chat_template))
    return texts


def _replies(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    parts: Sequence[tuple[int, Mapping[str, Any]]],
    chat_template: str | None,
) -> list[dict[str, Any]]:
    """Return the texts of beginnings up to the first failure, and the reason for that."""
    try:
        settings = {} if chat_template is None else {"chat_template": chat_template}
        if os.name != "posix" or not _has_usual_method(tokenizer):
            return render(tokenizer, messages, settings, parts, LONGEST_TEXT)
        settings = {"eos_token": "", **tokenizer.special_tokens_map}
        settings["chat_template"] = tokenizer.get_chat_template(chat_template)
        work = {"messages": messages, "settings": settings, "parts": parts, "longest": LONGEST_TEXT}
        return _renderer().render(day=_day, memory=TEMPLATE_MEMORY, **work)
    except DataError:
        raise
    except Exception as error:  # values that JSON cannot represent
        return [{"error": "rejected", "reason": error_text(error, limit=200)}]


def _text_of(reply: Mapping[str, Any]) -> str:
    if "length" in reply:
        raise RowError(
            f"the chat template renders {reply['length']:,} characters, at most {LONGEST_TEXT:,} are allowed"
        )
    if reply.get("error") == "memory":
        raise DataError(f"the chat template needs over {TEMPLATE_MEMORY / 2**30:g} GiB of memory for one conversation")
    if "text" not in reply:
        raise RowError(f"the chat template rejects the conversation: {reply['reason']}")
    return reply["text"]


def _has_usual_method(tokenizer: PreTrainedTokenizerBase) -> bool:
    from transformers import PreTrainedTokenizerBase  # slow to import

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


class _Renderer:
    """The process that renders templates, started on demand; an idle one exits."""

    _NAME = "the chat template"

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()

    def render(self, **arguments: Any) -> list[dict[str, Any]]:
        """Render in the process; return the texts up to the first failure, and the reason for that.

        Raises:
            DataError: The process ended, or did not reply in time.
        """
        rendering = Request.of(self._NAME, "render", **arguments), TEMPLATE_SECONDS, "rendering one conversation"
        try:
            with self._lock:
                if self._process is not None and self._process.is_running:
                    # It may be exiting because it was idle for too long; a new process then gets the request.
                    with suppress(WorkerEnded):
                        return self._reply(self._process, *rendering)
                self._process = WorkerProcess("kedge.template_worker", CallLog(None, self._NAME))
                self._reply(self._process, Request.of(self._NAME, "load"), STARTUP_SECONDS, "starting its process")
                return self._reply(self._process, *rendering)
        except WorkerError as error:
            raise DataError(str(error)) from error

    @staticmethod
    def _reply(process: WorkerProcess, request: Request, seconds: float, doing: str) -> Any:
        process.send(request, seconds=seconds)
        return process.reply(request, seconds, doing)


@cache
def _renderer() -> _Renderer:
    return _Renderer()


PromptForm: TypeAlias = Literal["conversation", "text", "tldr"]

TLDR_ENDING = "\n\nTL;DR:"
"""The end of a post's prompt."""

NUM_READ = 20
"""Number of prompts that determine the form."""


def prompt_form(prompts: Iterable[str], *, template: str = "none") -> PromptForm:
    """The form that most of the first prompts have.

    Args:
        prompts: Prompts as text, as the model reads them.
        template: The template of the data: `none` or `tldr`.
    """
    if template == "tldr":
        return "tldr"
    read = list(islice(prompts, NUM_READ))
    rendered = sum(isinstance(prompt, Rendered) for prompt in read)
    return "conversation" if 2 * rendered > len(read) else "text"
