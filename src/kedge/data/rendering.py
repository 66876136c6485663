"""Renders conversations in a process that can be killed: a chat template is a program that comes with a model."""

from __future__ import annotations

import os
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from kedge.data.fields import Messages
from kedge.data.rejections import RowError
from kedge.errors import DataError
from kedge.system.texts import error_text
from kedge.system.workers.codec import decode, encode
from kedge.system.workers.process import WorkerEnded, WorkerProcess, WorkerTimeout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["apply_template", "render_as_of"]

TEMPLATE_SECONDS = 10.0
TEMPLATE_MEMORY = 2**30
STARTUP_SECONDS = 120.0
LONGEST_TEXT = 2**27
"""Characters of one rendered conversation; equals the byte limit of one line of a file."""


_day: str | None = None


def render_as_of(day: str) -> None:
    """Set the date that templates write, such as `Today Date: …`, so that a run has one, also when it is resumed.

    Args:
        day: As `2026-02-28`; applies to this process until it is set again. Without it, templates write today's date.
    """
    global _day
    _day = day


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Messages, **settings: Any) -> str:
    """Render a conversation with the tokenizer's chat template, in jinja's sandbox, with limits on time and memory.

    A tokenizer class with a method of its own for this is code that the user trusts, and runs in this process; so does
    everything on Windows, without limits.

    Args:
        tokenizer: Must have a chat template unless `settings` has one.
        messages: The conversation.
        settings: Passed to `apply_chat_template`.

    Raises:
        DataError: The template exceeds its time or memory limit.
        RowError: The template rejects these messages, or its output is too long.
    """
    try:
        if os.name != "posix" or not _has_usual_method(tokenizer):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))
            text.encode()  # not half of a surrogate pair, which no tokenizer takes
            reply: dict[str, Any] = {"length": len(text)} if len(text) > LONGEST_TEXT else {"text": text}
        else:
            template = tokenizer.get_chat_template(settings.get("chat_template"))
            settings = {"eos_token": "", **tokenizer.special_tokens_map, **settings, "chat_template": template}
            limits = {"memory": TEMPLATE_MEMORY, "longest": LONGEST_TEXT}
            reply = _renderer().ask({"messages": messages, "settings": settings, "day": _day, **limits})
    except DataError:
        raise
    except Exception as error:  # of the template, or of values that JSON cannot hold
        reply = {"error": "rejected", "reason": error_text(error, limit=200) or type(error).__name__}
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
    """The process that renders; it is started when it is needed, and may end by itself meanwhile."""

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            DataError: None came in time, or the process ended.
        """
        line = encode(request)
        with self._lock:
            if self._process is not None and self._process.is_running:
                try:
                    return self._exchange(self._process, line)
                except WorkerEnded:
                    pass  # perhaps it had nothing to do for too long; another one shows
            try:
                return self._exchange(self._started(), line)
            except WorkerEnded as error:
                raise DataError(f"the process that renders the chat template {error}") from error

    def _started(self) -> WorkerProcess:
        self._process = WorkerProcess("kedge.system.workers.chat_templates", lambda output: None)
        self._process.send(encode({}))
        try:
            self._process.receive(time.monotonic() + STARTUP_SECONDS)
        except WorkerTimeout as error:
            raise DataError(f"the process of chat templates did not start within {STARTUP_SECONDS:g} s") from error
        return self._process

    def _exchange(self, process: WorkerProcess, line: bytes) -> dict[str, Any]:
        try:
            process.send(line)
            return decode(process.receive(time.monotonic() + TEMPLATE_SECONDS))
        except WorkerTimeout as error:
            raise DataError(f"the chat template needs over {TEMPLATE_SECONDS:g} s for one conversation") from error


@cache
def _renderer() -> _Renderer:
    return _Renderer()
