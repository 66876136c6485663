"""transformers without its own output: no progress bars, no load reports, and errors on one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

__all__ = ["loading_reason", "quiet_transformers"]


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
    message = " ".join(str(error).split())
    if "trust_remote_code" in message:
        return "it needs code from its folder; set runtime.trust_remote_code=true to run it"
    return message[:300] or type(error).__name__
