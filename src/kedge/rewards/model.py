"""Scores from a reward model, whichever tokenizer it reads."""

from __future__ import annotations

from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from kedge.data.chat import apply_template
from kedge.data.rejections import RowError
from kedge.data.tokens import encode_completion, encode_prompt
from kedge.errors import DataError, RewardError
from kedge.models import ScalarModel, score_rows
from kedge.rewards.source import MESSAGES_COLUMN, Responses, Scores, checked_scores

__all__ = ["ModelReward", "share_tokens"]


class ModelReward:
    """A reward model as a source of scores: one number per response, read at the last real token.

    A model with the policy's own tokens reads the rollout's ids as they are, the sampled stop token included. One with
    other tokens gets the texts, encoded anew: through its own chat template where it has one and the prompt's messages
    are known, else as prompt + completion, with its own EOS behind a response that stopped.

    Args:
        model: The reward model.
        tokenizer: The reward model's own.
        policy_tokenizer: The policy's; None where the ids are known to be the reward model's.
        name: What messages and metrics call it.
        chat_template: Takes the place of the reward tokenizer's own template.
        micro_batch_tokens: Tokens per forward pass, None for all at once; never changes a score by more than rounding.
        precision: Number format of the matrix products.

    Source: spec §1 (reward-model read-out), §2.4.
    """

    def __init__(
        self,
        model: ScalarModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "reward_model",
        chat_template: str | None = None,
        micro_batch_tokens: int | None = None,
        precision: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.reads_policy_ids = policy_tokenizer is None or share_tokens(tokenizer, policy_tokenizer)
        self._chat_template = chat_template
        self._renders_chat = bool(chat_template or tokenizer.chat_template)
        self._micro_batch_tokens = micro_batch_tokens
        self._precision: Literal["fp32", "bf16"] = precision

    @property
    def max_tokens(self) -> int | None:
        """The longest prompt with its response that the model has positions for, or None where it does not say."""
        return self.model.context_length

    def scores(self, responses: Responses) -> Scores:
        """One score per response.

        Raises:
            RewardError: A text beyond the model's context, a chat template that refuses it, or a score that is not
                finite.
        """
        rows = [self._ids(responses, index) for index in range(len(responses))]
        self._check_lengths(rows)
        scores = score_rows(
            self.model, rows, precision=self._precision, micro_batch_tokens=self._micro_batch_tokens
        ).tolist()
        return checked_scores(scores, name=f"reward model {self.name!r}", count=len(rows))

    def _ids(self, responses: Responses, index: int) -> list[int]:
        """One prompt and response in the reward model's tokens."""
        if self.reads_policy_ids:
            return [*responses.prompt_ids[index], *responses.response_ids[index]]
        prompt, completion = responses.prompts[index], responses.completions[index]
        messages = responses.columns.get(MESSAGES_COLUMN, [None] * len(responses))[index]
        if self._renders_chat and messages:
            return self._conversation_ids(messages, completion)
        ending = encode_completion(self.tokenizer, completion, eos=responses.stopped[index])
        return [*encode_prompt(self.tokenizer, prompt), *ending]

    def _conversation_ids(self, messages: list[dict[str, Any]], completion: str) -> list[int]:
        if messages[-1]["role"] == "assistant":
            # The prompt began the answer, and the policy went on with it: one turn, not two.
            messages, completion = messages[:-1], f"{messages[-1]['content']}{completion}"
        answer = {"role": "assistant", "content": completion}
        try:
            text = apply_template(self.tokenizer, [*messages, answer], chat_template=self._chat_template)
        except (RowError, DataError) as error:
            raise RewardError(f"reward model {self.name!r}: {error}") from error
        # A template writes every special token itself, BOS included.
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _check_lengths(self, rows: list[list[int]]) -> None:
        for index, row in enumerate(rows):
            if not row:
                raise RewardError(f"reward model {self.name!r}: response {index} and its prompt are empty")
            if self.max_tokens is not None and len(row) > self.max_tokens:
                raise RewardError(
                    f"reward model {self.name!r} reads at most {self.max_tokens} tokens, but response {index} has "
                    f"{len(row)} with its prompt; shorten prompts or responses"
                )


def share_tokens(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers mean the same by every id that can stand in a text.

    Padding never stands in one, so a pad token that only one of them was given makes no difference.
    """
    pads = (tokenizer.pad_token, other.pad_token)
    ours, theirs = (
        {token: index for token, index in each.get_vocab().items() if token not in pads} for each in (tokenizer, other)
    )
    return ours == theirs and tokenizer.eos_token_id == other.eos_token_id
