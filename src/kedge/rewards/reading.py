"""How a reward model reads a response: the token ids of one prompt and response."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from kedge.data import encode_example, encode_prompt, encode_text, end_with_eos
from kedge.data.chat import apply_template, closing_of, render_answer, render_prompt
from kedge.data.fields import Messages
from kedge.data.tokens import special_wrapping
from kedge.errors import RewardError
from kedge.rewards.source import MESSAGES_COLUMN, Responses

__all__ = ["Reader"]


class Reader:
    """The token ids that a reward model reads.

    They follow from the texts, whatever tokens and stop token the policy has:

    - A model that kedge trained reads what its training read: prompt + completion + EOS, a conversation rendered by
      `render_prompt` and `render_answer`. Its score is thus taken at EOS.
    - Another model with a chat template reads a conversation through it, the response as its last turn.
    - Another model otherwise reads prompt + completion. A tokenizer without EOS, or an encoder's that closes every text
      with a token of its own, encodes the text as `tokenizer(text)` does ([CLS] … [SEP]); for any other, the text
      starts with the special tokens that the tokenizer writes before a text.

    Where a reading adds EOS, it does so only after a response that stopped; a chat template or [SEP] closes every text.
    A model that came with EOS as padding never read its last EOS, so none is left at the end. Where the text that is
    read is the completion, the sampled ids replace its re-encoding if they are the same tokens in both vocabularies:
    another spelling of the same text, which keeps what decoding hides (parts of a character).

    Args:
        tokenizer: The reward model's.
        policy_tokenizer: The policy's; None if the reward model has the policy's tokens.
        trained_here: Whether kedge trained the model.
        pooled: Whether it is read as a whole (an encoder), not at its last token.
        pads_with_eos: Whether the model came with EOS as padding.
        chat_template: Used instead of the tokenizer's own, and instead of the reading of kedge's training.

    Source: spec §1 (reward-model read-out), §2.4.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        trained_here: bool = False,
        pooled: bool = False,
        pads_with_eos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._as_trained = trained_here and chat_template is None
        self._drops_eos = pads_with_eos and not self._as_trained
        self._has_template = bool(chat_template or tokenizer.chat_template)
        self._same = _same_ids(tokenizer, policy_tokenizer or tokenizer)
        self._start, self._end = start, end = special_wrapping(tokenizer)
        has_eos = tokenizer.eos_token_id is not None
        self._wraps = not self._as_trained and (not has_eos or (pooled and bool(end)))
        self._marks_ends = has_eos or bool(start or end)

    def check(self, *, conversations: bool) -> None:
        """Check that the reward model can tell a complete text from the start of one.

        Args:
            conversations: Whether the prompts are conversations.

        Raises:
            RewardError: Its tokenizer has no token for the end of a text.
        """
        if not self._marks_ends and not (conversations and self._has_template):
            raise RewardError(
                "its tokenizer has no EOS and adds no special tokens, so nothing marks the end of a text; set "
                "eos_token in its tokenizer_config.json to the token that its training texts end with"
            )

    def row(self, responses: Responses, index: int) -> list[int]:
        """The ids of one prompt and response.

        Raises:
            RowError: The chat template rejects the conversation.
            DataError: The chat template exceeds its limits.
        """
        row = self._row(responses, index)
        while self._drops_eos and len(row) > 1 and row[-1] == self._tokenizer.eos_token_id:
            row = row[:-1]
        return row

    def _row(self, responses: Responses, index: int) -> list[int]:
        # A prompt that the policy's chat template rendered is a plain text to a model that does not read conversations.
        prompt, completion = str(responses.prompts[index]), responses.completions[index]
        stopped = responses.stopped[index]
        messages = responses.columns[MESSAGES_COLUMN][index] if MESSAGES_COLUMN in responses.columns else None
        answer = read = completion
        if messages and self._has_template:
            messages, answer = _assistant_turn(messages, completion)
            if not self._as_trained:
                return self._conversation(messages, answer)
            if stopped and (closing := closing_of(self._tokenizer)) and answer.rstrip().endswith(closing):
                answer = answer.rstrip().removesuffix(closing)  # the policy closed its turn before it stopped
            prompt, read = self._rendered(messages, answer, stopped=stopped)
        elif self._wraps:
            return [*self._start, *encode_text(self._tokenizer, prompt + completion), *self._end]
        sampled = responses.response_ids[index][:-1] if stopped else responses.response_ids[index]
        if answer == completion and self._spells(sampled, completion, read):
            start = encode_prompt(self._tokenizer, prompt)
            return [*start, *(end_with_eos(self._tokenizer, sampled) if stopped else sampled)]
        example = encode_example(self._tokenizer, prompt, read, eos=stopped)
        return [*example.prompt, *example.completion]

    def _conversation(self, messages: Messages, answer: str) -> list[int]:
        """A conversation through the model's own template, which writes all special tokens itself, including BOS."""
        turn = {"role": "assistant", "content": answer}
        text = apply_template(self._tokenizer, [*messages, turn], chat_template=self._chat_template)
        return encode_text(self._tokenizer, text)

    def _rendered(self, messages: Messages, answer: str, *, stopped: bool) -> tuple[str, str]:
        """Prompt and answer as training rendered them; an answer that did not stop is not closed."""
        turn = {"role": "assistant", "content": answer}
        closed = render_answer(self._tokenizer, messages, [turn], in_full=False) if stopped else answer
        return render_prompt(self._tokenizer, messages, in_full=False), closed

    def _spells(self, sampled: list[int], completion: str, read: str) -> bool:
        """Whether the sampled ids spell the text that is read: the completion, and what the template closes it with."""
        if not read.startswith(completion) or not self._same.issuperset(sampled):
            return False
        return str(self._tokenizer.decode(sampled)).endswith(read[len(completion) :])


def _same_ids(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that are the same token in both vocabularies."""
    theirs = other.get_vocab()
    return frozenset(index for token, index in tokenizer.get_vocab().items() if theirs.get(token) == index)


def _assistant_turn(messages: Messages, completion: str) -> tuple[Messages, str]:
    """The turns before the assistant's, and its text, which includes what the prompt started it with."""
    if messages[-1]["role"] != "assistant":
        return messages, completion
    return messages[:-1], f"{messages[-1]['content']}{completion}"
