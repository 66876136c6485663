"""What a model reads: the conversation so far, or the newest text alone, in the form that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from kedge.data import TLDR_ENDING, Prompt, PromptForm, encode_prompt
from kedge.data.chat import render_prompt
from kedge.data.records import RowError
from kedge.errors import DataError
from kedge.rewards import MESSAGES_COLUMN

__all__ = ["Conversation", "chosen_form", "described_form"]


def chosen_form(
    tokenizer: PreTrainedTokenizerBase, recorded: PromptForm | None, wanted: PromptForm | None
) -> PromptForm:
    """The form of a model's prompts: as the user wants it, as in kedge's training, or by the chat template.

    Raises:
        DataError: A conversation is wanted from a model without a chat template.
    """
    if wanted == "conversation" and not tokenizer.chat_template:
        raise DataError("--form conversation: the model's tokenizer has no chat template")
    if wanted or recorded:
        form = wanted or recorded
        return "text" if form is None or (form == "conversation" and not tokenizer.chat_template) else form
    return "conversation" if tokenizer.chat_template else "text"


def described_form(form: PromptForm, tokenizer: PreTrainedTokenizerBase) -> str:
    """One line that says what becomes of the user's text."""
    if form == "conversation":
        return "a conversation in its chat template"
    if form == "tldr":
        return "trained on TL;DR posts: your text is the post, TL;DR: is added, and nothing is remembered"
    reason = "trained on plain prompts" if tokenizer.chat_template else "no chat template"
    return f"{reason}: it continues your text, and nothing is remembered"


@dataclass
class Conversation:
    """One model's conversation.

    Attributes:
        tokenizer: Renders and measures the prompts.
        form: What becomes of the user's text.
        messages: The turns so far; stays empty unless the form is a conversation.
    """

    tokenizer: PreTrainedTokenizerBase
    form: PromptForm
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def prompt(self, text: str, *, room: int | None) -> tuple[Prompt, int]:
        """The prompt for the user's text, and the number of old messages that no longer fit.

        Args:
            text: What the user wrote.
            room: Tokens that the context leaves for a prompt; None for no limit.

        Raises:
            DataError: The text alone is too long, or the chat template rejects it.
        """
        history, length = [*self.messages, {"role": "user", "content": text}], 0
        for dropped in range(0, len(history), 2):
            prompt = self._rendered(text, history[dropped:])
            length = len(encode_prompt(self.tokenizer, prompt.text))
            if length == 0:
                raise DataError("the text has no tokens, and the model has no BOS token to start from")
            if room is None or length <= room:
                return prompt, dropped
        raise DataError(f"the text has {length} tokens with its template, at most {room} fit; shorten it")

    def add(self, text: str, answer: str, *, dropped: int = 0) -> None:
        """Remember a turn, without the oldest messages that no longer fit."""
        if self.form == "conversation":
            turn = [{"role": "user", "content": text}, {"role": "assistant", "content": answer.strip()}]
            self.messages = [*self.messages[dropped:], *turn]

    def _rendered(self, text: str, messages: list[dict[str, str]]) -> Prompt:
        if self.form != "conversation":
            ending = "" if self.form == "text" or text.rstrip().endswith(TLDR_ENDING.strip()) else TLDR_ENDING
            return Prompt(text.rstrip() + ending if ending else text)
        try:
            return Prompt(render_prompt(self.tokenizer, messages), {MESSAGES_COLUMN: messages})
        except RowError as error:
            raise DataError(str(error)) from error
