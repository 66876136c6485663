"""OpenAI's Responses API, in terms of chat completions.

Source: OpenAI's API reference, Responses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kedge_tasks.environments.chat import MODEL, Answer, Message, Refusal

NAMES = {"input": "messages", "max_output_tokens": "max_completion_tokens", "text": "response_format"}
"""Parameters with another name in chat completions."""
WITHOUT_EFFECT = ("include", "reasoning", "truncation")
STORED = ("previous_response_id", "conversation", "prompt")
"""Parameters that name what OpenAI has stored."""


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a request.

    Raises:
        Refusal: It names what OpenAI has stored, or an item or tool that only OpenAI has, such as a web search.
        Exception: It is invalid; `LookupError`, `TypeError`, `ValueError` or `AttributeError`.
    """
    given = {
        NAMES.get(key, key): value for key, value in body.items() if value is not None and key not in WITHOUT_EFFECT
    }
    if stored := next((key for key in STORED if key in given), None):
        raise Refusal(f"{stored} is not supported; send all items of the conversation as input")
    if "n" in given:
        raise Refusal("n is not supported; a response is one answer")
    asked = given["messages"]
    entries = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    system = given.pop("instructions", None)
    given["messages"] = [*([{"role": "system", "content": system}] if system else ()), *_messages(entries)]
    tools = given.get("tools", ())
    if other := next((tool["type"] for tool in tools if tool["type"] != "function"), None):
        raise Refusal(f"a tool of type {other!r:.60} is not supported; expected function")
    shown = ("name", "description", "parameters")
    given["tools"] = [
        {"type": "function", "function": {key: tool[key] for key in shown if tool.get(key)}} for tool in tools
    ]
    if "response_format" in given:
        given["response_format"] = given["response_format"].get("format")
    return given


def _messages(entries: Any) -> list[Message]:
    """The messages of a request's items; calls of tools are part of the message before them."""
    messages: list[Message] = []
    for entry in entries:
        kind = entry.get("type", "message")
        if kind == "message":
            messages.append({"role": entry["role"], "content": entry["content"]})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            call = {"id": entry["call_id"], "function": {name: entry[name] for name in ("name", "arguments")}}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": entry["call_id"], "content": entry["output"]})
        elif kind != "reasoning":
            raise Refusal(f"an item of type {kind!r:.60} is not supported")
    return messages


def written(answer: Answer) -> dict[str, Any]:
    """Return an answer as OpenAI writes a response."""
    now = time.time_ns()
    is_cut = answer.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    message = answer.message
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{call['id']}",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        for call in message.get("tool_calls", ())
    ]
    parts = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
    text = {"type": "message", "id": f"msg_{now}", "role": "assistant", "status": status, "content": parts}
    read, sampled = answer.num_read, answer.num_tokens
    return {
        "id": f"resp_{now}",
        "object": "response",
        "created_at": now // 10**9,
        "model": MODEL,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": [text, *calls] if message["content"] or not calls else calls,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        },
    }


def events(response: Mapping[str, Any]) -> str:
    """Return a response as a stream, each of its items in one piece."""
    started = {"response": {**response, "status": "in_progress", "output": []}}
    sent = [("created", started), *_items(response), (str(response["status"]), {"response": response})]
    lines = (
        {"type": f"response.{kind}", "sequence_number": number, **content}
        for number, (kind, content) in enumerate(sent)
    )
    return "".join(f"event: {line['type']}\ndata: {json.dumps(line)}\n\n" for line in lines)


def _items(response: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        yield "output_item.added", {**place, "item": {**item, "status": "in_progress"}}
        if item["type"] == "message":
            where = {**place, "item_id": item["id"], "content_index": 0}
            [part] = item["content"]
            yield "content_part.added", {**where, "part": {**part, "text": ""}}
            yield "output_text.delta", {**where, "delta": part["text"], "logprobs": []}
            yield "output_text.done", {**where, "text": part["text"], "logprobs": []}
            yield "content_part.done", {**where, "part": part}
        yield "output_item.done", {**place, "item": item}
