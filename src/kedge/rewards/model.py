"""Reward models as reward sources, with the policy's tokenizer or their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache, partial

from transformers import PreTrainedTokenizerBase

from kedge.data import encode_example, encode_prompt, encode_text, end_with_eos
from kedge.data.chat import apply_template, closing_of, render_answer, render_prompt
from kedge.data.fields import Messages
from kedge.data.records import RowError
from kedge.data.tokens import special_wrapping
from kedge.models import Precision, ScalarModel, score_rows
from kedge.ranks import ALONE, PassTokens, Ranks
from kedge.rewards.source import MESSAGES_COLUMN, Responses, Score, checked_scores
from kedge_base.errors import DataError, RewardError
from kedge_base.machine.memory import in_phase


class ModelReward:
    """A reward model as a reward source: one number per response, for the ids from its `Reader`.

    Args:
        model: The reward model.
        tokenizer: The reward model's.
        policy_tokenizer: The policy's; None if the reward model has the policy's tokens.
        name: Its name in metrics and messages.
        skip_too_long: A text longer than the model's context gets no score, instead of an error.
        micro_batch_tokens: Tokens per forward pass, None for all at once; only affects the rounding of scores.
        precision: Number format of the matrix products.
        ranks: Ranks that divide the texts among them; each passes all texts.

    Source: spec §1 (reward-model read-out), §2.4.
    """

    def __init__(
        self,
        model: ScalarModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "reward_model",
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
    def models(self) -> Mapping[str, ModelReward]:
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
        rows = self._rows(responses)
        limit = self.max_tokens
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
        """Encode each prompt and response in the reward model's tokens."""
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
    """True if two tokenizers assign the same ids to the same tokens, and end a text with the same token.

    Pad tokens are ignored: they never occur in a text.
    """
    pads = (tokenizer.pad_token, other.pad_token)
    ours, theirs = (
        {token: index for token, index in each.get_vocab().items() if token not in pads} for each in (tokenizer, other)
    )
    return ours == theirs and tokenizer.eos_token_id == other.eos_token_id


class Reader:
    """Encodes what a reward model reads.

    The ids follow from the texts, independently of the policy's tokens and stop token:

    - A model that kedge trained reads what its training read: prompt + completion + EOS, a conversation rendered by
      `render_prompt` and `render_answer`. Its score is thus taken at EOS.
    - Another model with a chat template reads a conversation through it, the response as its last turn.
    - Another model otherwise reads prompt + completion. A tokenizer without EOS, or one of an encoder that closes every
      text with a separate token, encodes the text as `tokenizer(text)` does ([CLS] … [SEP]); for any other, the text
      starts with the special tokens that the tokenizer writes before a text.

    EOS is only added after a response that stopped; a chat template or [SEP] closes every text.
    A model that came with EOS as padding never took its score at EOS, so none is left at the end. Where the model reads
    the completion as it is, the sampled ids replace its re-encoding if they mean the same tokens in both vocabularies:
    they spell the same text, but keep what decoding hides (parts of a character).

    Args:
        tokenizer: The reward model's.
        policy_tokenizer: The policy's; None if the reward model has the policy's tokens.
        trained_here: kedge trained the model.
        pooled: The score is of the whole text (an encoder), not taken at its last token.
        pads_with_eos: The model came with EOS as padding.

    Source: spec §1 (reward-model read-out), §2.4.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase | None,
        *,
        trained_here: bool = False,
        pooled: bool = False,
        pads_with_eos: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._as_trained = trained_here
        self._drops_eos = pads_with_eos and not self._as_trained
        self._has_template = bool(tokenizer.chat_template)
        theirs = (policy_tokenizer or tokenizer).get_vocab()
        self._same = {index for token, index in tokenizer.get_vocab().items() if theirs.get(token) == index}
        self._start, self._end = start, end = special_wrapping(tokenizer)
        has_eos = tokenizer.eos_token_id is not None
        self._wraps = not self._as_trained and (not has_eos or (pooled and bool(end)))
        self._marks_ends = has_eos or bool(start or end)
        self._encode_prompt = lru_cache(16, typed=True)(partial(encode_prompt, tokenizer))  # responses share prompts

    def check(self, *, conversations: bool) -> None:
        """Check that the reward model can distinguish a complete text from a truncated one.

        Raises:
            RewardError: Its tokenizer has no token for the end of a text.
        """
        if not self._marks_ends and not (conversations and self._has_template):
            raise RewardError(
                "its tokenizer has no EOS and adds no special tokens, so nothing marks the end of a text; set "
                "eos_token in its tokenizer_config.json to the token that its training texts end with"
            )

    def row(self, responses: Responses, index: int) -> list[int]:
        """Encode a prompt and its response.

        Raises:
            RowError: The chat template rejects the conversation.
            DataError: The chat template exceeds its limits.
        """
        row = self._row(responses, index)
        while self._drops_eos and len(row) > 1 and row[-1] == self._tokenizer.eos_token_id:
            row = row[:-1]
        return row

    def _row(self, responses: Responses, index: int) -> list[int]:
        # A prompt rendered by the policy's chat template is plain text to a model that does not read conversations.
        prompt = str(responses.prompts[index])
        completion = responses.completions[index]
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
            return [*self._encode_prompt(prompt), *(end_with_eos(self._tokenizer, sampled) if stopped else sampled)]
        example = encode_example(self._tokenizer, prompt, read, eos=stopped)
        return [*example.prompt, *example.completion]

    def _conversation(self, messages: Messages, answer: str) -> list[int]:
        """Render a conversation with the model's own template, which writes all special tokens, including BOS."""
        turn = {"role": "assistant", "content": answer}
        text = apply_template(self._tokenizer, [*messages, turn])
        return encode_text(self._tokenizer, text)

    def _rendered(self, messages: Messages, answer: str, *, stopped: bool) -> tuple[str, str]:
        """Render prompt and answer as in training; an answer that did not stop is not closed."""
        turn = {"role": "assistant", "content": answer}
        start = render_prompt(self._tokenizer, messages, in_full=False)
        return start, render_answer(self._tokenizer, messages, [turn], start, in_full=False) if stopped else answer

    def _spells(self, sampled: list[int], completion: str, read: str) -> bool:
        """True if the sampled ids spell exactly the text to read: the completion and the template's closing."""
        if not read.startswith(completion) or not self._same.issuperset(sampled):
            return False
        return str(self._tokenizer.decode(sampled)).endswith(read[len(completion) :])


def _assistant_turn(messages: Messages, completion: str) -> tuple[Messages, str]:
    """Split into the turns before the assistant's, and its text, including any start that the prompt contains."""
    if messages[-1]["role"] != "assistant":
        return messages, completion
    return messages[:-1], f"{messages[-1]['content']}{completion}"
