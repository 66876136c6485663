"""Text that grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from kedge.rewards.score import continuation

__all__ = ["TextStream"]

INCOMPLETE = "\ufffd"
"""What a decoder writes for the first bytes of a character whose last bytes are in the next token."""


@dataclass
class TextStream:
    """A response that is being sampled.

    Attributes:
        tokenizer: Decodes it.
        prompt_ids: The prompt that it continues.
        stop_ids: Tokens that end it and are not part of its text.
        write: Takes each new piece of text.
        ids: Its tokens so far.
        text: The text written so far.
    """

    tokenizer: PreTrainedTokenizerBase
    prompt_ids: list[int]
    stop_ids: Sequence[int]
    write: Callable[[str], None]
    ids: list[int] = field(default_factory=list[int])
    text: str = ""

    def add(self, token: int) -> None:
        """Append a token, and write the text that is complete with it."""
        if token not in self.stop_ids:
            self.ids.append(token)
            self._write_up_to(continuation(self.tokenizer, self.prompt_ids, self.ids).rstrip(INCOMPLETE))

    def end(self, text: str | None = None) -> str:
        """Write what is still missing from the final text; returns that text."""
        final = continuation(self.tokenizer, self.prompt_ids, self.ids) if text is None else text
        self._write_up_to(final)
        return final

    def _write_up_to(self, text: str) -> None:
        # A tokenizer that tidies up spaces can change text that was already written; the final text is right then.
        if text.startswith(self.text) and text != self.text:
            self.write(text[len(self.text) :])
            self.text = text
