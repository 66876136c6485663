"""Reward models as reward sources, with the policy's tokenizer or their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from transformers import PreTrainedTokenizerBase

from kedge.data.records import RowError
from kedge.errors import DataError, RewardError
from kedge.models import Precision, ScalarModel, score_rows
from kedge.rewards.reading import Reader
from kedge.rewards.source import MESSAGES_COLUMN, Responses, Score, ScoringModel, checked_scores
from kedge.system.memory import in_phase
from kedge.system.ranks import ALONE, PassTokens, Ranks

__all__ = ["ModelReward", "share_tokens"]


class ModelReward:
    """A reward model as a reward source: one number per response, of the ids that its `Reader` gives.

    Args:
        model: The reward model.
        tokenizer: The reward model's.
        policy_tokenizer: The policy's; None if the reward model has the policy's tokens.
        name: Its name in metrics and messages.
        chat_template: Used instead of the reward tokenizer's own template.
        skip_too_long: A text longer than the model's context gets no score, instead of an error.
        micro_batch_tokens: Tokens per forward pass, None for all at once; changes scores by rounding at most.
        precision: Number format of the matrix products.
        ranks: They share the texts, which all of them have.

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
        skip_too_long: bool = False,
        micro_batch_tokens: PassTokens = None,
        precision: Precision = "fp32",
        ranks: Ranks = ALONE,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.shares_tokens = policy_tokenizer is None or share_tokens(tokenizer, policy_tokenizer)
        self._reader = Reader(
            tokenizer,
            policy_tokenizer,
            trained_here=model.trained_here,
            pooled=model.trunk is None,
            pads_with_eos=model.pads_with_eos,
            chat_template=chat_template,
        )
        self._skip_too_long = skip_too_long
        self._micro_batch_tokens = micro_batch_tokens
        self._precision: Precision = precision
        self._ranks = ranks

    @property
    def max_tokens(self) -> int | None:
        """The model's context length: the longest prompt plus response, tokens; None if unknown."""
        return self.model.context_length

    @property
    def models(self) -> Mapping[str, ScoringModel]:
        """The model itself."""
        return {self.name: self}

    def check(self, columns: Collection[str]) -> None:
        """Check that the model's tokenizer can mark the end of a text (`RewardError` if not)."""
        try:
            self._reader.check(conversations=MESSAGES_COLUMN in columns)
        except RewardError as error:
            raise RewardError(f"reward model {self.name!r}: {error}") from error

    @in_phase("scoring")
    def score(self, responses: Responses) -> list[Score]:
        """One score per response.

        Raises:
            RewardError: A text exceeds the model's context, its chat template fails, or a score is not finite.
        """
        rows, limit = self._rows(responses), self.max_tokens
        fitting = [index for index, row in enumerate(rows) if limit is None or len(row) <= limit]
        scores: list[float | None] = [None] * len(rows)
        found = score_rows(
            self.model,
            [rows[index] for index in fitting],
            precision=self._precision,
            micro_batch_tokens=self._micro_batch_tokens,
            ranks=self._ranks,
        )
        for index, score in zip(fitting, found.tolist(), strict=True):
            scores[index] = score
        return checked_scores(scores, name=f"reward model {self.name!r}", lengths=responses.lengths)

    def _rows(self, responses: Responses) -> list[list[int]]:
        """The ids of each prompt and response in the reward model's tokens."""
        try:
            rows = [self._reader.row(responses, index) for index in range(len(responses))]
        except (RowError, DataError) as error:
            raise RewardError(f"reward model {self.name!r}: {error}") from error
        limit = self.max_tokens
        for index, row in enumerate(rows):
            if not row:
                raise RewardError(f"reward model {self.name!r}: response {index} and its prompt are empty")
            if limit is not None and len(row) > limit and not self._skip_too_long:
                raise RewardError(
                    f"reward model {self.name!r} reads at most {limit} tokens, but response {index} has "
                    f"{len(row)} with its prompt; shorten prompts or responses"
                )
        return rows


def share_tokens(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers assign the same ids to the same tokens.

    Pad tokens are ignored: they never occur in a text.
    """
    pads = (tokenizer.pad_token, other.pad_token)
    ours, theirs = (
        {token: index for token, index in each.get_vocab().items() if token not in pads} for each in (tokenizer, other)
    )
    return ours == theirs and tokenizer.eos_token_id == other.eos_token_id
