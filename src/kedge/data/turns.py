"""Continues conversations from sampled tokens: encodes the turns between the policy's.

The policy's tokens are not decoded and encoded again, since other tokens can have the same text. The other side's
messages are encoded separately, and appended as the chat template writes them after an answer:

    prompt │ sampled │ closing, if the policy did not write it │ messages │ header of the next answer │ sampled │ …

If the template rewrites earlier answers, as those of reasoning models drop thoughts, the whole conversation is rendered
for every turn instead. This new context has the text of earlier answers, but not the tokens that were sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kedge.data.chat import apply_template
from kedge.data.fields import Messages
from kedge.data.records import Prompt, RowError
from kedge.data.tokens import Rendered, encode_prompt, encode_text, num_shared
from kedge_base.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = "How deep is it?"
ANSWER = "Nine fathoms."
THOUGHT = "<think>\nThe lead says nine.\n</think>\n\n"
"""A test thought: templates of reasoning models drop thoughts from earlier answers."""
RESULT = {"role": "tool", "content": "nine"}
CALL_ID = "call00001"
"""Nine characters long, as Mistral's templates require."""
_PLACE = "What the environment says."
_SHOWN = 40
_KEPT = 1024
"""Rendered conversations to cache: games have few answers, and the responses to a prompt start alike."""


class ToolUse(Protocol):
    """Tools that the policy may call."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Their JSON schemas, in the form for chat templates."""
        ...

    @property
    def description(self) -> str:
        """Text before the first question that describes the tools."""
        ...

    @property
    def sample(self) -> Mapping[str, Any]:
        """A call of one of them: its `name` and `arguments`."""
        ...

    @property
    def sample_text(self) -> str:
        """The sample call, written as in the description."""
        ...

    def reads_sample(self, text: str) -> bool:
        """True if kedge parses exactly this call from a turn."""
        ...


class PlainTurns:
    """Turns as concatenated texts, for models without a chat template; see `TemplateTurns`.

    Args:
        tokenizer: The policy's.
    """

    rewrites = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def opening(self, prompt: Prompt, messages: Messages) -> Messages:
        """Return the conversation up to the policy's first turn."""
        return [_user(prompt.text), *messages]

    def context(self, conversation: Messages) -> list[int]:
        """Return the tokens of a whole conversation, up to the policy's next turn."""
        return encode_prompt(self._tokenizer, _texts(conversation))

    def after(self, sampled: Sequence[int], messages: Messages) -> list[int]:
        """Return the tokens between one turn of the policy and its next."""
        return encode_text(self._tokenizer, _texts(messages), continues=True)


class TemplateTurns:
    """Turns as the tokenizer's chat template writes them: encodes what the policy does not sample.

    Args:
        tokenizer: The policy's.
        stop_ids: The tokens that end its turns.
        tools: The tools that it may call. They are described in the prompt if the template cannot be used: it has no
            place for them, writes calls that kedge cannot parse, or moves them to the last question, as Mistral's does.

    Attributes:
        incompatibility: The reason why the template cannot be used for the tools; empty if it can.
        rewriting: How the template writes an earlier answer differently later in a conversation; empty if it does not.

    Raises:
        DataError: The template cannot render a conversation that continues, or the tokenizer has no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        *,
        tools: ToolUse | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "an environment talks in messages, but the tokenizer has no chat template: name one with "
                "data.chat_template (chatml, zephyr or a file), or write the prompts as plain text"
            )
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._shown: list[dict[str, Any]] = []
        self._description = ""
        self.incompatibility = ""
        self.rewriting = ""
        self._rendered = lru_cache(_KEPT)(lambda conversation: self._render(json.loads(conversation), self._shown))
        if tools is None:
            self._has_tool_role = self._writes_results()
            self.rewriting = self._rewriting(_user("How cold?"))
            return
        schemas = [dict(schema) for schema in tools.schemas]
        has_place = self._render([_user(QUESTION)], schemas) != self._render([_user(QUESTION)])
        calls = [*self._calls(tools.sample, schemas)] if has_place else []
        if calls and not any(map(tools.reads_sample, calls)):
            self.incompatibility = "shows tools, but writes no call that kedge reads"
        elif has_place:
            self._shown = schemas
            self._has_tool_role = self._writes_results()
            with suppress(DataError, RowError):
                self.rewriting = self._rewriting(RESULT)
                if not self.rewriting or self._keeps_tools():
                    return
            self.incompatibility = "shows tools, but elsewhere once the conversation continues"
            self._shown = []
            self._rendered.cache_clear()
        else:
            self.incompatibility = "has no place for tools"
        self._description = tools.description
        self._has_tool_role = self._writes_results()
        self.rewriting = self._rewriting(RESULT)

    @property
    def rewrites(self) -> bool:
        """True if earlier answers are written differently once the conversation continues: every turn then reads a
        whole `context`, and `after` cannot be used.
        """
        return bool(self.rewriting)

    def opening(self, prompt: Prompt, messages: Messages) -> Messages:
        """Return the conversation up to the policy's first turn."""
        given = prompt.columns.get("messages")
        asked = given if isinstance(given, list) else [_user(prompt.text)]
        return _opened(asked, self._with_tool_results(messages))

    def context(self, conversation: Messages) -> list[int]:
        """Return the tokens of a whole conversation, up to the policy's next turn.

        Raises:
            RowError: It cannot be rendered.
        """
        conversation = [*self._with_tool_results(conversation)]
        if self._description:
            first = next((place for place, each in enumerate(conversation) if each["role"] == "user"), 0)
            content = f"{self._description}\n\n{conversation[first]['content']}"
            conversation[first] = {**conversation[first], "content": content}
        if conversation[-1]["role"] == "assistant":  # the policy continues it, as without an environment
            text = self._render(conversation, self._shown, asks=False, continue_final_message=True)
        else:
            text = self._write(conversation)
        return encode_prompt(self._tokenizer, Rendered(text))

    def after(self, sampled: Sequence[int], messages: Messages) -> list[int]:
        """Return the tokens between one turn of the policy and its next.

        Raises:
            RowError: The messages cannot be rendered.
        """
        ids = encode_text(self._tokenizer, self._continuation(ANSWER, messages), continues=True)
        if not sampled or sampled[-1] not in self._stop_ids:
            return ids
        # The policy has already closed its turn, with the template's token or an equivalent one.
        closing = next((place for place, token in enumerate(ids) if token in self._stop_ids), None)
        if closing is None or str(self._tokenizer.decode(ids[:closing])).strip():
            return ids
        return ids[closing + 1 :]

    def _continuation(self, answer: str, messages: Messages) -> str:
        """Render the text after an answer: its closing, the messages, and the header of the next answer.

        Raises:
            RowError: The template writes the question or the answer differently once the conversation continues.
        """
        begin = self._write([_user(QUESTION)])
        whole = self._write(_exchange(answer, *self._with_tool_results(messages)))
        rest = whole[len(begin) :].lstrip()
        if not whole.startswith(begin) or not rest.startswith(answer):
            raise RowError(
                "the chat template writes an earlier answer differently once the conversation continues: "
                f"{_change(begin + answer, whole)}"
            )
        return rest[len(answer) :]

    def _with_tool_results(self, messages: Messages) -> Messages:
        """Convert tool results to a user's message if the template has no role for them."""
        if self._has_tool_role:
            return messages
        told: Messages = []
        for is_result, each in groupby(messages, lambda message: message["role"] == "tool"):
            if is_result:  # a single message, since many templates refuse two in a row with the same role
                told.append(_user("\n".join(f"<result>{message['content']}</result>" for message in each)))
            else:
                told += each
        return told

    def _write(self, messages: Messages) -> str:
        return self._rendered(json.dumps(messages))

    def _render(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), *, asks: bool = True, **settings: Any
    ) -> str:
        if tools:
            settings["tools"] = tools
        return apply_template(self._tokenizer, messages, add_generation_prompt=asks, **settings)

    def _calls(self, sample: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Render a tool call with the template, cut at the end-of-turn token; yield nothing if the template cannot."""
        begin = self._render([_user(QUESTION)], schemas)
        for arguments in (sample["arguments"], json.dumps(sample["arguments"])):  # templates differ
            call = {"id": CALL_ID, "type": "function", "function": {"name": sample["name"], "arguments": arguments}}
            answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
            with suppress(RowError):
                whole = self._render([_user(QUESTION), answer], schemas, asks=False)
                # A thought that is opened for the next answer shares the start of its tag with that of a call.
                shared = re.sub(r"<[^<>]*\Z", "", whole[: num_shared(whole, begin)])
                ids = encode_text(self._tokenizer, whole[len(shared) :], continues=True)
                turn = str(self._tokenizer.decode([*takewhile(lambda token: token not in self._stop_ids, ids)]))
                if turn.strip():
                    yield turn

    def _writes_results(self) -> bool:
        """True if the template writes the result of a tool."""
        try:
            return "nine" in self._write(_exchange(ANSWER, RESULT))
        except RowError:
            return False

    def _keeps_tools(self) -> bool:
        """True if the template shows the tools in the same place once the conversation continues."""
        before, question, _ = self._write([_user(QUESTION)]).rpartition(QUESTION)
        return self._write(_exchange(ANSWER, RESULT)).startswith(before + question)

    def _rewriting(self, reply: dict[str, str]) -> str:
        """How the template changes earlier answers, including thoughts, as the conversation continues; empty if it
        does not.

        It must also write every turn in the same way; some templates number them.

        Raises:
            DataError: It cannot render a conversation that continues.
        """
        turn = [{"role": "assistant", "content": ANSWER}, *self._with_tool_results([reply])]
        try:
            once, twice = (self._write([_user(QUESTION), *turn * count]) for count in (1, 2))
        except RowError as error:
            raise DataError(f"a conversation cannot continue after the policy's turn: {error}") from error
        try:
            for answer in (THOUGHT + ANSWER, ANSWER):
                after = self._continuation(answer, [reply])
        except RowError as error:
            return str(error)
        if not twice.startswith(once) or twice[len(once) :].lstrip() != ANSWER + after:
            return (
                "the chat template writes a third turn differently than the second: "
                f"{_change(once + ANSWER + after, twice)}"
            )
        return ""


Turns: TypeAlias = PlainTurns | TemplateTurns


def opened_conversation(tokenizer: PreTrainedTokenizerBase, messages: Messages, opening: str) -> Messages:
    """Recover the initial conversation of an episode: the row's messages, and the text that the environment added as
    user.

    Ranks and checkpoints only transfer the text. If it is not the rendering of the row's messages with one text added,
    as when it describes tools, the row's messages alone are returned.

    Args:
        tokenizer: The policy's, with which the opening was rendered.
        messages: The row's.
        opening: The text that the policy read before its first turn.
    """
    with suppress(RowError):
        asked = _opened(messages, [_user(_PLACE)])
        before, _, after = apply_template(tokenizer, asked, add_generation_prompt=True).rpartition(_PLACE)
        added = opening[len(before) : len(opening) - len(after)]
        if added and f"{before}{added}{after}" == opening:
            return _opened(messages, [_user(added)])
    return messages


def _opened(conversation: Messages, messages: Messages) -> Messages:
    """Append the environment's messages to a row's conversation."""
    if messages and messages[0]["role"] == conversation[-1]["role"] == "user":
        # Merged into one message, as in TRL, since many templates reject two consecutive messages from the same side.
        content = f"{conversation[-1]['content']}\n{messages[0]['content']}"
        return [*conversation[:-1], {**conversation[-1], "content": content}, *messages[1:]]
    return [*conversation, *messages]


def _change(before: str, after: str) -> str:
    at = num_shared(before, after)
    return f"{before[at:][:_SHOWN]!r} becomes {after[at:][:_SHOWN]!r}"


def _exchange(answer: str, *replies: dict[str, str]) -> Messages:
    return [_user(QUESTION), {"role": "assistant", "content": answer}, *replies]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _texts(messages: Messages) -> str:
    return "".join(message["content"] for message in messages)
