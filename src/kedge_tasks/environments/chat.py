"""Requests to an OpenAI-compatible endpoint, and their answers: parsed, checked and written, without HTTP.

Requests that would change the distribution of the policy's tokens are refused, because the policy is trained on the log
probabilities with which they were sampled.

Source: OpenAI's API reference, Chat and Completions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge_base.environment_turn import EnvironmentTurn
from kedge_base.texts import unwritable
from kedge_tasks.environments.shapes import LONGEST_TEXT
from kedge_tasks.environments.tools import Tools

MODEL = "policy"
"""The endpoint's only model."""
LARGEST_NUMBER = 128
"""Largest `n`, as of OpenAI."""
DEEPEST = 50
"""Maximum nesting of a request."""
IGNORED = "stream stream_options seed user metadata store service_tier safety_identifier prompt_cache_key"
"""Parameters without an effect on what is sampled."""
NEUTRAL = {
    "top_p": 1,
    "top_k": -1,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
"""Values without an effect; for all other parameters, these are null, 0 and empty ones."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

Message = dict[str, Any]


@dataclass(eq=False)
class Refusal(Exception):
    """A request that is answered with an error.

    Attributes:
        message: What is wrong, and what would be right.
        status: The HTTP status.
        code: The error's code.
    """

    message: str
    status: int = 400
    code: str | None = None


@dataclass(frozen=True)
class Request:
    """A request for one or several answers of the policy.

    Attributes:
        conversation: The messages that the policy reads.
        number: Number of answers.
        tools: The tools whose calls are parsed.
        turn: The turn of the policy, without its context.
    """

    conversation: list[Message]
    number: int
    tools: Tools
    turn: EnvironmentTurn

    @classmethod
    def of(cls, body: Any, temperature: float | None) -> Request:
        """Parse a request.

        Args:
            body: Its JSON.
            temperature: The sampling temperature; None if no request may name one.

        Raises:
            Refusal: It asks for what kedge cannot sample.
            Exception: It is invalid; also a `LookupError`, `TypeError`, `ValueError` or `AttributeError`.
        """
        if fault := unwritable(body, deepest=DEEPEST):
            raise Refusal(f"the request {fault}")
        given = {key: value for key, value in body.items() if value is not None}
        take = given.pop
        if (model := take("model", None)) != MODEL:
            raise Refusal(f"the model {model!r:.60} does not exist; the only one is {MODEL!r}", 404, "model_not_found")
        if (asked := take("temperature", temperature)) != temperature:
            raise Refusal(f"temperature={asked!r:.60} is not rollout.temperature, that of sampling; leave it out")
        prompt = take("prompt", None)
        messages = take("messages") if prompt is None else [{"role": "user", "content": prompt}]
        tools = Tools(take("tools", []))
        stop = take("stop", [])
        stop = [stop] if isinstance(stop, str) else stop
        limit = _checked("max_tokens", take("max_completion_tokens", take("max_tokens", None)))
        _ = tools.schemas and tools.description  # fails if a schema cannot be read
        shown = [*map(dict, tools.schemas)] or None
        turn = EnvironmentTurn(tools=shown, max_tokens=limit, stop=[text for text in stop if text > ""])
        request = cls(_messages(messages), _checked("n", take("n", 1), LARGEST_NUMBER), tools, turn)
        for key, value in given.items():
            if key not in IGNORED.split() and (value != NEUTRAL[key] if key in NEUTRAL else value):
                neutral = f", or set {NEUTRAL[key]!r}" if key in NEUTRAL else ""
                raise Refusal(
                    f"{key:.60}={value!r:.60} is not supported; leave it out{neutral}: the policy is sampled as it is "
                    "trained, at rollout.temperature alone, and the trainer keeps the log probabilities"
                )
        return request

    def answered(
        self, number: int, text: str, num_tokens: int = 0, num_read: int = 0, is_complete: bool = True
    ) -> Answer:
        """Parse an answer; `number`, its number in the episode, becomes part of the ids of its tool calls."""
        calls = self.tools.calls_in(text) if self.tools.schemas else []
        found = [call for call in calls if not call.fault]
        message: Message = {"role": "assistant", "content": text}
        if found:
            message["content"] = self.tools.text_before_calls(text) or None
            message["tool_calls"] = [
                {
                    "index": index,
                    "id": f"call_{number}_{index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for index, call in enumerate(found)
            ]
        reason = "tool_calls" if found else "stop" if is_complete else "length"
        return Answer(text, message, reason, num_tokens, num_read, len(calls), len(calls) - len(found))

    def written(self, answers: Sequence[Answer], *, is_chat: bool, is_streamed: bool) -> dict[str, Any]:
        """The answers as OpenAI writes them; a stream is one event."""
        part = "delta" if is_streamed else "message"
        choices = [
            {
                "index": index,
                **({part: answer.message} if is_chat else {"text": answer.text}),
                "logprobs": None,
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        read = answers[0].num_read
        sampled = sum(answer.num_tokens for answer in answers)
        kind = f"chat.completion{'.chunk' if is_streamed else ''}" if is_chat else "text_completion"
        now = time.time_ns()
        return {
            "id": f"chatcmpl-{now}",
            "object": kind,
            "created": now // 10**9,
            "model": MODEL,
            "choices": choices,
            "usage": {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled},
        }


@dataclass(frozen=True)
class Answer:
    """An answer of the policy.

    Attributes:
        text: As it was sampled, without its stop token.
        message: As OpenAI writes it.
        finish_reason: Why it ended.
        num_tokens: Its tokens.
        num_read: The tokens that the policy had read.
        num_calls: Tools that it called.
        num_errors: Calls that could not be read.
    """

    text: str
    message: Message
    finish_reason: str
    num_tokens: int
    num_read: int
    num_calls: int
    num_errors: int


class Answers:
    """The policy's answers in an episode, which are found again in later requests.

    Attributes:
        texts: Their texts as they were sampled.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: dict[str, list[tuple[int, int]]] = {}
        self._others: set[str] = set()

    def add(self, conversation: Sequence[Message], answer: Answer) -> None:
        """Add the next answer, which followed a conversation."""
        *_, (_, before, key) = _states([*conversation, *_messages([answer.message])])
        self._known.setdefault(key, []).append((len(self.texts), before))
        self.texts.append(answer.text)

    def context(self, conversation: Sequence[Message]) -> tuple[list[Message], int]:
        """Mark the answers in a conversation.

        A message that equals several answers counts as the newest that followed the same messages, or else the newest
        of all.

        Returns:
            The messages, with `answer` and the sampled text in those that are the policy's; and the number of other
            messages of an assistant that were not in an earlier conversation.
        """
        context: list[Message] = []
        num_changed = 0
        for message, before, key in _states(conversation):
            if found := self._known.get(key):
                number = next((number for number, place in reversed(found) if place == before), found[-1][0])
                message = {"role": "assistant", "content": self.texts[number], "answer": number}
            elif message["role"] == "assistant" and key not in self._others:
                self._others.add(key)
                num_changed += bool(self.texts)
            context.append(message)
        return context, num_changed


def _checked(name: str, value: Any, most: int = 2**31) -> Any:
    """A positive integer, or None."""
    if value is not None and (not isinstance(value, int) or not 1 <= value <= most):
        raise Refusal(f"{name}={value!r:.60} is not an integer from 1 to {most}")
    return value


def _messages(entries: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Parse a conversation."""
    messages: list[Message] = []
    names: dict[Any, Any] = {}
    for entry in entries:
        if entry["role"] not in ROLES:
            raise Refusal(f"the role {entry['role']!r:.60} is not one of {', '.join(ROLES)}")
        message: Message = {"role": ROLES[entry["role"]], "content": _text(entry.get("content"))}
        for call in entry.get("tool_calls") or []:
            name = names[call["id"]] = call["function"]["name"]
            function = {"name": name, "arguments": json.loads(call["function"]["arguments"])}
            message.setdefault("tool_calls", []).append({"type": "function", "function": function})
        if name := names.get(entry.get("tool_call_id"), entry.get("name")):
            message["name"] = name
        messages.append(message)
    if not messages:
        raise Refusal("the list of messages is empty")
    return messages


def _text(value: Any) -> str:
    """The text of a message: a text, parts of text, or nothing."""
    if isinstance(value, list):
        value = "\n".join(part["text"] for part in value)
    value = value or ""
    if not isinstance(value, str):
        raise Refusal(f"the content {value!r:.60} is not a text")
    if len(value) > LONGEST_TEXT:
        raise Refusal(f"a message has {len(value):,} characters; at most {LONGEST_TEXT:,}")
    return value


def _states(conversation: Sequence[Message]) -> Iterator[tuple[Message, int, str]]:
    """Each message, a hash of those before it, and its text as a key."""
    state = 0
    for message in conversation:
        key = json.dumps(message, sort_keys=True)
        yield message, state, key
        state = hash((state, key))
