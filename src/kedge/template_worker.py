"""The worker process that renders chat templates: they come with a model and may never finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, tzinfo
from functools import cache
from typing import TYPE_CHECKING, Any

from kedge_base.machine.memory import memory_limit, private_memory
from kedge_base.texts import error_text
from kedge_base.workers.serving import serve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDLE = 60.0
"""Seconds without a request after which the process ends; the next request starts another."""


def main(descriptor: int, tie: int) -> None:
    """Render conversations until the connection closes.

    Args:
        descriptor: The worker's end of the connection, an open file descriptor.
        tie: The reading end of a pipe that closes when kedge ends.
    """
    serve(descriptor, tie, {"load": _load, "render": _render}, idle=IDLE)


def _load() -> None:
    """Import everything that rendering needs."""
    _tokenizer()


def _render(day: str | None, memory: int, **arguments: Any) -> list[dict[str, Any]]:
    """Render beginnings of a conversation on a day, within a number of bytes of memory."""
    _set_clock(day)
    with memory_limit(private_memory() + memory):
        return render(_tokenizer(), **arguments)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Any,
    settings: Mapping[str, Any],
    parts: Sequence[tuple[int, Mapping[str, Any]]],
    longest: int,
) -> list[dict[str, Any]]:
    """Render beginnings of a conversation.

    Args:
        tokenizer: Renders them.
        messages: The conversation.
        settings: Settings of `apply_chat_template`.
        parts: The number of messages of each beginning, and its further settings.
        longest: The number of characters from which on only the length of a text is returned.

    Returns:
        The texts up to the first failure, and the reason for that.
    """
    replies: list[dict[str, Any]] = []
    try:
        for count, further in parts:
            text = str(tokenizer.apply_chat_template(messages[:count], tokenize=False, **settings, **further))
            text.encode()  # not half of a surrogate pair, which no tokenizer takes
            replies.append({"length": len(text)} if len(text) > longest else {"text": text})
    except MemoryError:
        replies.append({"error": "memory"})
    except Exception as error:  # template code may raise anything
        replies.append({"error": "rejected", "reason": error_text(error, limit=200)})
    return replies


def _set_clock(day: str | None) -> None:
    """Set the time that `strftime_now` in templates sees to midnight of a day; None for the machine's clock."""
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.fromisoformat(day) if day else datetime.now(tz)

    # `strftime_now` looks up the time through this name.
    chat_template_utils.datetime = Clock  # pyright: ignore[reportPrivateImportUsage]


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    """Make a tokenizer without a vocabulary: rendering only needs the request's template and special tokens."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase  # imports no torch

    return PreTrainedTokenizerBase()
