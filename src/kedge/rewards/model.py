"""Reward models as reward sources, with the policy's tokenizer or their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from kedge.data.chat import apply_template
from kedge.data.rejections import RowError
from kedge.data.tokens import encode_completion, encode_prompt
from kedge.errors import DataError, RewardError
from kedge.models import Precision, ScalarModel, score_rows
from kedge.rewards.source import MESSAGES_COLUMN, Responses, Score, ScoringModel, checked_scores

__all__ = ["ModelReward", "share_tokens"]


class ModelReward:
    """A reward model as a reward source: one number per response, read at its last token.

    A model that shares the policy's tokens reads the sampled ids, including the stop token. A model with another
    tokenizer reads the re-encoded texts: through its own chat template if it has one and the prompt's messages are
    known, else prompt + completion, with its own EOS after a response that stopped.

    Args:
        model: The reward model.
        tokenizer: The reward model's.
        policy_tokenizer: The policy's; None if the ids are known to be the reward model's.
        name: Its name in metrics and messages.
        chat_template: Used instead of the reward tokenizer's own template.
        micro_batch_tokens: Tokens per forward pass, None for all at once; changes scores by rounding at most.
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
        precision: Precision = "fp32",
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.reads_policy_ids = policy_tokenizer is None or share_tokens(tokenizer, policy_tokenizer)
        self._chat_template = chat_template
        self._renders_chat = bool(chat_template or tokenizer.chat_template)
        self._micro_batch_tokens = micro_batch_tokens
        self._precision: Precision = precision

    @property
    def max_tokens(self) -> int | None:
        """The model's context length: the longest prompt plus response, tokens; None if unknown."""
        return self.model.context_length

    @property
    def models(self) -> Mapping[str, ScoringModel]:
        """The model itself."""
        return {self.name: self}

    def check(self, columns: Collection[str]) -> None:
        """Nothing to check: a model needs no columns."""

    def score(self, responses: Responses) -> list[Score]:
        """One score per response.

        Raises:
            RewardError: A text exceeds the model's context, its chat template fails, or a score is not finite.
        """
        rows = [self._ids(responses, index) for index in range(len(responses))]
        self._check_lengths(rows)
        scores = score_rows(
            self.model, rows, precision=self._precision, micro_batch_tokens=self._micro_batch_tokens
        ).tolist()
        return checked_scores(scores, name=f"reward model {self.name!r}", lengths=responses.lengths)

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
            # The prompt started the assistant's turn and the policy continued it: one turn, not two.
            messages, completion = messages[:-1], f"{messages[-1]['content']}{completion}"
        answer = {"role": "assistant", "content": completion}
        try:
            text = apply_template(self.tokenizer, [*messages, answer], chat_template=self._chat_template)
        except (RowError, DataError) as error:
            raise RewardError(f"reward model {self.name!r}: {error}") from error
        # A chat template writes all special tokens itself, including BOS.
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
    """Whether two tokenizers assign the same ids to the same tokens.

    Pad tokens are ignored: they never occur in a text.
    """
    pads = (tokenizer.pad_token, other.pad_token)
    ours, theirs = (
        {token: index for token, index in each.get_vocab().items() if token not in pads} for each in (tokenizer, other)
    )
    return ours == theirs and tokenizer.eos_token_id == other.eos_token_id
