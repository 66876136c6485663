"""Renames the columns of people's data to those that kedge reads: `data.columns.prompt=dialogue`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from kedge.data.fields import Fields
from kedge.errors import DataError

__all__ = ["Role", "columns_of", "name_missing_columns", "rename_columns"]

Role: TypeAlias = Literal["demonstrations", "comparisons", "prompts", "pretraining"]

_POST = ("subreddit", "title", "post")
_INSTRUCTION = ("instruction", "input", "system")
_IDS = ("input_ids", "attention_mask")
_READ: Mapping[str, tuple[str, ...]] = {
    "demonstrations": (
        *("prompt", "completion", "messages", "text", "output", "summary", "labels", "completion_mask"),
        *(*_INSTRUCTION, *_IDS, *_POST),
    ),
    "comparisons": ("prompt", "chosen", "rejected", "margin", "responses", "ranks", *_INSTRUCTION, *_POST),
    "prompts": ("prompt", "messages", "text", *_INSTRUCTION, *_IDS, *_POST),
}
_COMPARED = ("chosen", "rejected", "responses", "ranks")
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "prompts": ("completion", "summary", "output", *_COMPARED),
    "demonstrations": _COMPARED,
}
"""Columns that may be missing: references of prompts, and those of comparisons, which other roles can read."""

_WHOLE = {"messages": ("prompt", "text", "completion"), "text": ("prompt", "messages", "completion")}
"""What a row must not hold next to a column that is its whole content, if that one was named and they were not."""


def columns_of(columns: Mapping[str, str], role: Role) -> dict[str, str]:
    """The names that apply to a role: ours → theirs.

    Args:
        columns: `prompt` names the column for every role, `demonstrations.prompt` for one.
        role: the role.
    """
    read = "demonstrations" if role == "pretraining" else role
    names = (*_READ[read], *_OPTIONAL.get(read, ()))
    general = {ours: theirs for ours, theirs in columns.items() if ours in names}
    own = {name.partition(".")[2]: theirs for name, theirs in columns.items() if name.startswith(f"{role}.")}
    return {**general, **own}


def rename_columns(fields: Fields, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with its columns renamed; a column that it lacks stays missing, even if it has another of our name.

    Args:
        fields: the row.
        columns: ours → theirs; one column of theirs may serve as several of ours.
    """
    hidden = {name for ours in columns for name in _WHOLE.get(ours, ()) if name not in columns}
    gone = {*columns, *columns.values(), *hidden}
    kept = {name: value for name, value in fields.items() if name not in gone}
    return {**kept, **{ours: fields[theirs] for ours, theirs in columns.items() if theirs in fields}}


def name_missing_columns(fields: Fields, columns: Mapping[str, str], role: Role, source: str) -> None:
    """Refuse a source whose first row lacks a named column.

    Raises:
        DataError: Names the column and those that exist.
    """
    for ours, theirs in columns.items():
        if theirs not in fields and ours not in _OPTIONAL.get(role, ()):
            present = ", ".join(repr(str(name)[:40]) for name in list(fields)[:12]) or "none"
            raise DataError(
                f"data.columns.{ours}={theirs}: {source} has no column {theirs!r}; its columns are {present} "
                f"(data.columns.{role}.{ours} names the column of the {role} only)"
            )
