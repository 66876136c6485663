"""Uses transformers without its own output, by one thread at a time: no progress bars, and one-line errors."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

from kedge_base.texts import error_text

# PEFT and parts of transformers import it if it is installed; it warns about a kernel that training does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

_one_at_a_time = threading.RLock()
DAMAGED = "the file may be incomplete or damaged: download it again"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and load reports; `load_pretrained` checks the reports itself.

    Threads take turns: while it builds or loads a model, transformers patches functions of torch and methods of models
    for the whole process, and two threads would restore each other's patches; likewise for the verbosity. So never wait
    for another thread inside the block.
    """
    with _one_at_a_time:
        verbosity = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()


def _reset_after_fork() -> None:
    """Reset the lock in a forked process, which lacks the thread that may hold it."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def loading_reason(error: BaseException) -> str:
    """Return the message of a transformers error, without line breaks."""
    message = error_text(error)
    if (unknown := unknown_kind(error)) is not None:
        return unknown
    if "trust_remote_code" in str(error):
        return "it needs code from its folder; set runtime.trust_remote_code=true to run it"
    if "deserializing header" in message:  # an error of safetensors
        return f"{message}; {DAMAGED}"
    return f"it lacks {message}" if isinstance(error, KeyError) else message


def unknown_kind(error: BaseException) -> str | None:
    """Return a short reason if transformers has no such class for an architecture, else None; its own message lists
    hundreds.
    """
    found = re.search(r"Unrecognized configuration class <class '.*?(\w+)Config'>.* AutoModelFor(\w+)\.", str(error))
    kinds = {"CausalLM": "causal language model", "SequenceClassification": "reward model"}
    return found and f"{found[1]} is not a {kinds.get(found[2], found[2])} that transformers knows; use another model"
