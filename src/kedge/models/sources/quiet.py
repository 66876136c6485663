"""transformers without its own output: no progress bars, no load reports, and errors on one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

from kedge.system.texts import error_text

DAMAGED = "the file may be incomplete or damaged: download it again"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and load reports; `load_pretrained` checks the reports itself."""
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


def loading_reason(error: BaseException) -> str:
    """The message of a transformers error, without line breaks."""
    message = error_text(error)
    if (unknown := unknown_kind(error)) is not None:
        return unknown
    if "trust_remote_code" in str(error):
        return "it needs code from its folder; set runtime.trust_remote_code=true to run it"
    if "deserializing header" in message:  # of safetensors
        return f"{message}; {DAMAGED}"
    return f"it lacks {message}" if isinstance(error, KeyError) else message


def unknown_kind(error: BaseException) -> str | None:
    """The reason if transformers has no such class for this architecture: its own message lists hundreds; else None."""
    found = re.search(r"Unrecognized configuration class <class '.*?(\w+)Config'>.* AutoModelFor(\w+)\.", str(error))
    kinds = {"CausalLM": "causal language model", "SequenceClassification": "reward model"}
    return found and f"{found[1]} is not a {kinds.get(found[2], found[2])} that transformers knows; use another model"
