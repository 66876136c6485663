"""Reads the fields of a row with checks: any JSON value either passes or raises one clear reason."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, Literal, TypeAlias

from kedge.data.records import RowError, is_missing
from kedge_base.errors import DataError
from kedge_base.texts import unwritable

Fields: TypeAlias = "Mapping[str, Any]"
Messages: TypeAlias = "list[dict[str, str]]"

_DEEPEST = 100
_ROLES = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"chatgpt": "assistant", "model": "assistant", "tool": "tool", "observation": "tool"},
}
_UNREAD = {
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "thinking"),
        ("reasoning", "write it into 'content', as the model is to write it, or set it to null"),
    ),
    **dict.fromkeys(
        ("tool_calls", "function_call"),
        ("a call of tools", "write the call into 'content', as the model is to write it"),
    ),
}
"""Fields of a message that kedge does not read, with what they contain and a remedy."""
_FOR_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns that TRL passes to the chat template."""
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def check_fields(value: object) -> Fields:
    """Check that a row has named fields that can all be written as UTF-8 JSON.

    Raises:
        RowError: The value is not a mapping, a name is not text, a text holds a lone surrogate, or a field nests too
            deeply to be sent to a reward function or written to a file.
    """
    if not isinstance(value, Mapping):
        raise RowError(f"the row is {_kind(value)}, expected an object with named fields")
    for name, entry in value.items():
        if not isinstance(name, str):
            raise RowError(f"a field's name is {_kind(name)}, expected text")
        if (fault := unwritable((name, entry), deepest=_DEEPEST)) is not None:
            raise RowError(f"field {name[:40]!r} {fault}")
    return value


def field_of(fields: Fields, name: str) -> Any:
    """Return a required field.

    Raises:
        RowError: The field is missing or null.
    """
    if name not in fields:
        present = ", ".join(repr(key[:20]) for key in list(fields)[:6])
        alone = ": a single message; a conversation is a list of messages" if is_conversation([fields]) else ""
        raise RowError(f"field {name!r} is missing (the row has {present or 'no fields'}{alone})")
    if fields[name] is None:
        raise RowError(f"field {name!r} is null")
    return fields[name]


def is_given(fields: Fields, name: str) -> bool:
    """True if a row has a field that is not empty.

    In concatenated data sets, columns of the other sets are null, blank text or an empty list.
    """
    value = fields.get(name)
    return bool(value.strip()) if isinstance(value, str) else not is_missing(value) and value not in ([], ())


def text_of(value: object, name: str) -> str:
    """A non-blank text.

    Raises:
        RowError: The value is not text, or is blank.
    """
    if not isinstance(value, str):
        raise RowError(f"field {name!r} is {_kind(value)}, expected text")
    if not value.strip():
        raise RowError(f"field {name!r} is empty")
    return value


def number_of(value: object, name: str) -> float:
    """Check that a value is a finite number; text, such as a CSV cell, is parsed.

    Raises:
        RowError: The value is not a number, not finite, or beyond a float's range.
    """
    value = decoded(value)
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        raise RowError(f"field {name!r} is {_kind(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RowError(f"field {name!r} is not a finite number")
    return number


def entries_of(value: object, name: str) -> Sequence[Any]:
    """Check that a value is a list; text, such as a CSV cell, is parsed as JSON.

    Raises:
        RowError: The value is not a list.
    """
    value = decoded(value)
    if isinstance(value, str):
        raise RowError(f"field {name!r} is text, expected a list, or the JSON of one")
    if not isinstance(value, (list, tuple)):
        raise RowError(f"field {name!r} is {_kind(value)}, expected a list")
    return value


def decoded(value: object) -> object:
    """Parse a text that is JSON; return any other text or value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def is_conversation(value: object) -> bool:
    """True if a value is a list of messages."""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(entry, Mapping) for entry in value):
        return False
    return value[0].keys() >= {"role", "content"} or value[0].keys() >= {"from", "value"}


def messages_of(value: object, name: str) -> Messages:
    """Read a conversation: at least one message, each with `role` and `content`; other keys are ignored.

    A single message counts as a conversation. ShareGPT's `from`, `value` and roles are accepted, and so is content in
    parts if all parts are text. An empty system message is dropped.

    Raises:
        RowError: The value is not such a list, or contains more than text, such as tool calls or separate reasoning.
    """
    entries = [value] if isinstance(value, Mapping) else entries_of(value, name)
    messages = [_message(entry, f"{name}[{index}]") for index, entry in enumerate(entries)]
    given = [message for message in messages if message is not None]
    if not given:
        raise RowError(f"field {name!r} is empty")
    return given


def check_rendered(fields: Fields) -> None:
    """Check that a row whose messages will be rendered has no columns meant for the template, such as `tools`.

    Raises:
        RowError: It has such a column.
    """
    for name in _FOR_TEMPLATES:
        value = decoded(fields.get(name))
        entries = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(entry, Mapping) and entry for entry in entries):  # tools named for a reward do not count
            remedy = "which kedge gives messages alone: write what it adds into the messages, and leave the column out"
            raise RowError(f"field {name!r} is for the chat template, {remedy}", f"rows with {name}")


def _name_in(entry: Fields, ours: str, theirs: str) -> str:
    """Return the key that a message uses; in concatenated data sets, the other one is null."""
    return theirs if theirs in entry and entry.get(ours) is None else ours


def role_of(message: Fields) -> str | None:
    """Return a message's role under kedge's name; None for an unknown role."""
    return _ROLES.get(str(message.get(_name_in(message, "role", "from"))).lower())


def _message(entry: object, name: str) -> dict[str, str] | None:
    """Read a message; None for an empty system message."""
    if not isinstance(entry, Mapping):
        raise RowError(f"field {name!r} is {_kind(entry)}, expected a message with 'role' and 'content'")
    speaker = _name_in(entry, "role", "from")
    content = _name_in(entry, "content", "value")
    role = text_of(field_of(entry, speaker), f"{name}.{speaker}")
    if speaker == "from" and role.lower() not in _ROLES:
        raise RowError(f"field {name + '.from'!r} is {role[:40]!r}, expected one of {', '.join(_ROLES)}")
    for key, (held, remedy) in _UNREAD.items():
        if entry.get(key) and is_given(entry, key):
            unread = f"which kedge does not read: {remedy}"
            raise RowError(f"field {f'{name}.{key}'!r} holds {held}, {unread}", f"messages with {key}, {unread}")
    if is_empty_system(entry, name):
        return None
    text = _joined(field_of(entry, content), f"{name}.{content}")
    return {"role": _ROLES.get(role.lower(), role), "content": text_of(text, f"{name}.{content}")}


def is_empty_system(entry: Fields, name: str) -> bool:
    """True for a system message without text, which is left out of the conversation; `name` is its name in errors."""
    content = _name_in(entry, "content", "value")
    text = _joined(entry.get(content), f"{name}.{content}")
    return role_of(entry) == "system" and content in entry and not is_given({content: text}, content)


def _joined(content: object, name: str) -> object:
    """Join content in parts to one text; return other content unchanged."""
    if not isinstance(content, (list, tuple)):
        return content
    texts = [part if isinstance(part, str) else _part_text(part, name) for part in content]
    return "".join(texts)


def _part_text(part: object, name: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
    if not isinstance(part, Mapping) or kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RowError(f"field {name!r} has a part that is not text ({str(kind)[:40]}), and kedge reads text alone")
    return part["text"]


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), f"of type {type(value).__name__}")


Role: TypeAlias = Literal["demonstrations", "comparisons", "prompts", "pretraining"]

POST = ("subreddit", "title", "post")
_INSTRUCTION = ("instruction", "input", "system")
_IDS = ("input_ids", "attention_mask")
_LEARNED = (
    *("prompt", "completion", "messages", "text", "output", "summary", "labels", "completion_mask"),
    *(*_INSTRUCTION, *_IDS, *POST),
)
_READ: Mapping[Role, tuple[str, ...]] = {
    "demonstrations": _LEARNED,
    "pretraining": _LEARNED,
    "comparisons": ("prompt", "chosen", "rejected", "margin", "responses", "ranks", *_INSTRUCTION, *POST),
    "prompts": ("prompt", "messages", "text", *_INSTRUCTION, *_IDS, *POST),
}
_COMPARED = ("chosen", "rejected", "responses", "ranks")
_OPTIONAL: Mapping[Role, tuple[str, ...]] = {
    "prompts": ("completion", "summary", "output", *_COMPARED),
    "demonstrations": _COMPARED,
    "pretraining": _COMPARED,
    "comparisons": (),
}
"""Columns that may be missing: references of prompts, and columns of comparisons, which other roles can also read."""

MAY_BE_EMPTY = ("input", "system", "margin")
"""Columns that may be empty in some rows; tables drop empty cells from their rows."""

_WHOLE = {"messages": ("prompt", "text", "completion"), "text": ("prompt", "messages", "completion")}
"""Columns to ignore if the user named only this column, which holds the whole content of a row."""


def columns_of(columns: Mapping[str, str], role: Role) -> dict[str, str]:
    """Return the column names for a role: ours → theirs.

    Args:
        columns: `prompt` names the column for every role, `demonstrations.prompt` for one.
        role: the role.
    """
    names = (*_READ[role], *_OPTIONAL[role])
    general = {ours: theirs for ours, theirs in columns.items() if ours in names}
    if role == "prompts":  # other columns may be meant for reward functions
        data = {name for known in (*_READ.values(), *_OPTIONAL.values()) for name in known}
        general |= {ours: theirs for ours, theirs in columns.items() if "." not in ours and ours not in data}
    specific = {name.partition(".")[2]: theirs for name, theirs in columns.items() if name.startswith(f"{role}.")}
    return {**general, **specific}


def rename_columns(fields: Fields, columns: Mapping[str, str]) -> dict[str, Any]:
    """Rename a row's columns; a named column that the row lacks stays missing, even if the row has one of our name.

    Args:
        fields: the row.
        columns: ours → theirs; one column of theirs may serve as several of ours.
    """
    found = {ours: value for ours, theirs in columns.items() for value in column_in(fields, theirs)}
    hidden = {name for ours in columns for name in _WHOLE.get(ours, ()) if name not in columns}
    gone = {*columns, *columns.values(), *hidden}
    kept = {name: value for name, value in fields.items() if name not in gone}
    return {**kept, **found}


def column_in(fields: Fields, name: str) -> tuple[Any, ...]:
    """Return a column's value alone, or nothing if the row lacks it.

    A dotted name that is not a column, such as `reward_model.ground_truth`, reaches into a mapping.
    """
    if name in fields:
        return (fields[name],)
    outer, _, inner = name.partition(".")
    held = fields.get(outer)
    return column_in(held, inner) if isinstance(held, Mapping) else ()


def name_missing_columns(fields: Fields, columns: Mapping[str, str], role: Role, source: str) -> None:
    """Reject a source if one of its rows, usually the first, lacks a named column.

    Raises:
        DataError: A column is missing; the message lists those that exist.
    """
    for ours, theirs in columns.items():
        if not column_in(fields, theirs) and ours not in _OPTIONAL[role]:
            present = ", ".join(repr(str(name)[:40]) for name in list(fields)[:12]) or "none"
            raise DataError(
                f"data.columns.{ours}={theirs}: {source} has no column {theirs!r}; its columns are {present} "
                f"(data.columns.{role}.{ours} names the column of the {role} only)"
            )
