"""Lets one or two models answer the same texts, with the scores of a reward.

text ─▶ each model's prompt ─▶ the sampler of training and evaluation ─▶ score ─▶ reply
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from kedge.config import Config, with_values
from kedge.data import TLDR_ENDING, Prompt, PromptForm, encode_prompt
from kedge.data.chat import render_prompt
from kedge.data.records import RowError
from kedge.models.origin import read_origin
from kedge.rewards import MESSAGES_COLUMN, Responses, WeightedReward, load_reward
from kedge.rewards.model import share_tokens
from kedge.rewards.score import continuation, describe_responses
from kedge.runs.inputs import Rewards, call_limits, configured_rewards
from kedge.runs.judges import with_judges
from kedge.runs.run import pass_tokens
from kedge.stages.policy import (
    Policy,
    SamplingSettings,
    load_policies,
    reencoded,
    sampling_settings,
)
from kedge.training.runtime import resolve_device, stream_seed
from kedge_base.errors import ConfigError, DataError, KedgeError
from kedge_base.texts import unwritable

MAX_MODELS = 2

SETTINGS = {
    "temperature": "generate.temperature",
    "max_new_tokens": "generate.max_new_tokens",
    "seed": "runtime.seed",
}
"""Settings that can be changed during a chat, and their fields in the configuration."""


def chosen_form(
    tokenizer: PreTrainedTokenizerBase, recorded: PromptForm | None, wanted: PromptForm | None
) -> PromptForm:
    """Choose the form of prompts: the user's wish, the form of training, or the chat template's.

    Raises:
        DataError: A conversation is wanted from a model without a chat template.
    """
    if wanted == "conversation" and not tokenizer.chat_template:
        raise DataError("--form conversation: the model's tokenizer has no chat template")
    form = wanted or recorded or "conversation"
    return "text" if form == "conversation" and not tokenizer.chat_template else form


def described_form(form: PromptForm, tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe in one line how the user's text becomes a prompt."""
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
        form: How the user's text becomes a prompt.
        messages: The turns so far; stays empty unless the form is a conversation.
    """

    tokenizer: PreTrainedTokenizerBase
    form: PromptForm
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def prompt(self, text: str, *, room: int | None) -> tuple[Prompt, int]:
        """Build the prompt for the user's text; also return the number of old messages that no longer fit.

        Args:
            text: The user's text.
            room: Tokens that the context leaves for a prompt; None for no limit.

        Raises:
            DataError: The text alone is too long, or the chat template rejects it.
        """
        history = [*self.messages, {"role": "user", "content": text}]
        length = 0
        for dropped in range(0, len(history), 2):
            prompt = self._rendered(text, history[dropped:])
            length = len(encode_prompt(self.tokenizer, prompt.text))
            if length == 0:
                raise DataError("the text has no tokens, and the model has no BOS token to start from")
            if room is None or length <= room:
                return prompt, dropped
        raise DataError(f"the text has {length} tokens with its template, at most {room} fit; shorten it")

    def add(self, text: str, answer: str, *, dropped: int = 0) -> None:
        """Add a turn to the history, and drop the oldest messages, which no longer fit."""
        if self.form == "conversation":
            turn = [{"role": "user", "content": text}, {"role": "assistant", "content": answer.strip()}]
            self.messages = [*self.messages[dropped:], *turn]

    def answered(self, text: str) -> str | list[dict[str, str]]:
        """The prompt of the newest answer, which was to this text: its messages, or a text."""
        return self.messages[:-1] if self.form == "conversation" else self._rendered(text, []).text

    def _rendered(self, text: str, messages: list[dict[str, str]]) -> Prompt:
        if self.form != "conversation":
            ending = "" if self.form == "text" or text.rstrip().endswith(TLDR_ENDING.strip()) else TLDR_ENDING
            return Prompt(text.rstrip() + ending if ending else text)
        try:
            return Prompt(render_prompt(self.tokenizer, messages), {MESSAGES_COLUMN: messages})
        except RowError as error:
            raise DataError(str(error)) from error


INCOMPLETE = "\ufffd"
"""The decoder's text for an incomplete character, whose last bytes are in the next token."""


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
        """Append a token, and write the text that it completes."""
        if token not in self.stop_ids:
            self.ids.append(token)
            self.write_up_to(continuation(self.tokenizer, self.prompt_ids, self.ids).rstrip(INCOMPLETE))

    def write_up_to(self, text: str) -> None:
        """Write the new part of the text so far."""
        # A tokenizer that cleans up spaces can change text that was already written; the reply's text is right then.
        if text.startswith(self.text) and text != self.text:
            self.write(text[len(self.text) :])
            self.text = text


class Interrupted(Exception):
    """Raised by the writer of a stream to end an answer early."""


@dataclass(frozen=True)
class Reply:
    """A model's answer.

    Attributes:
        text: The answer.
        num_tokens: Tokens sampled.
        ending: `stopped` at a stop token, `cut off` at max_new_tokens, or `interrupted`.
        num_dropped: Oldest messages that were left out because the context is full.
        score: The reward's score; None without a reward or a score.
        score_error: The error of a reward that failed.
    """

    text: str
    num_tokens: int
    ending: str
    num_dropped: int = 0
    score: float | None = None
    score_error: str = ""


class Chat:
    """A conversation with one or two models.

    Args:
        config: Settings of the sampling.
        policies: The models.
        forms: The form of the prompt made from the user's text, per model.
        scorer: Scores the answers, encoded in the first model's tokens.
    """

    def __init__(
        self, config: Config, policies: Sequence[Policy], forms: Sequence[PromptForm], scorer: WeightedReward | None
    ) -> None:
        self.policies = policies
        self.scorer = scorer
        self._config = config
        self._turn = 0
        self.conversations = [
            Conversation(policy.tokenizer, form) for policy, form in zip(policies, forms, strict=True)
        ]
        self._check_room(config)

    @property
    def settings(self) -> dict[str, float | int]:
        """The current sampling settings."""
        sampling = sampling_settings(self._config)
        return {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": self._config.runtime.seed,
        }

    def set(self, name: str, value: object) -> None:
        """Change a sampling setting.

        Raises:
            ConfigError: The setting is unknown, or the value is invalid.
        """
        if name not in SETTINGS:
            raise ConfigError(f"{name!r} is not a setting; choose one of {', '.join(SETTINGS)}")
        config = with_values(self._config, {SETTINGS[name]: value})
        self._check_room(config)
        self._config = config

    def reset(self) -> None:
        """Forget the conversation; the random numbers start over as well."""
        self._turn = 0
        for conversation in self.conversations:
            conversation.messages = []

    def introductions(self) -> list[str]:
        """One line per model: its name, how the user's text becomes a prompt, and where answers end."""
        return [
            f"{policy.source}: {described_form(conversation.form, policy.tokenizer)}; {policy.stop_tokens.line}"
            for policy, conversation in zip(self.policies, self.conversations, strict=True)
        ]

    def ask(self, text: str, write: Callable[[int, str], None] = lambda model, text: None) -> list[Reply]:
        """Sample the answers of all models to a text.

        Ctrl-C, or an `Interrupted` from `write`, ends the current answer, and the remaining models do not answer.

        Args:
            text: The user's text.
            write: Takes each piece of an answer as soon as it is sampled, with the model's number.

        Raises:
            DataError: The text does not fit into a model's context, or is not valid Unicode; nothing is sampled.
        """
        if (fault := unwritable(text, deepest=0)) is not None:
            raise DataError(f"the text {fault}")
        sampling = replace(
            sampling_settings(self._config), seed=stream_seed(self._config.runtime.seed, "chat", self._turn)
        )
        prompts = [
            conversation.prompt(text, room=policy.room(sampling.max_new_tokens))
            for policy, conversation in zip(self.policies, self.conversations, strict=True)
        ]
        replies: list[Reply] = []
        for index, (prompt, dropped) in enumerate(prompts):
            reply = self._answer(index, prompt, sampling, lambda piece, model=index: write(model, piece))
            self.conversations[index].add(text, reply.text, dropped=dropped)
            replies.append(replace(reply, num_dropped=dropped))
            if reply.ending == "interrupted":
                break
        self._turn += 1
        return replies

    def _answer(self, index: int, prompt: Prompt, sampling: SamplingSettings, write: Callable[[str], None]) -> Reply:
        policy = self.policies[index]
        prompt_ids = encode_prompt(policy.tokenizer, prompt.text)
        stream = TextStream(policy.tokenizer, prompt_ids, policy.stop_tokens.ids, write)
        try:
            sampler = replace(policy.sampler(sampling), on_token=lambda row, token: stream.add(token))
            rollout = sampler.generate([prompt_ids], seeds=[sampling.seed])
            most = sampling.max_new_tokens
            seed = stream_seed(sampling.seed, "reward")
            responses = describe_responses(rollout, [prompt], policy.tokenizer, max_new_tokens=most, seed=seed)
            stream.write_up_to(responses.completions[0])
        except (KeyboardInterrupt, Interrupted):
            return Reply(stream.text, len(stream.ids), "interrupted")
        score, error = self._score(policy, prompt, responses)
        ending = "stopped" if responses.stopped[0] else "cut off"
        return Reply(responses.completions[0], responses.lengths[0], ending, score=score, score_error=error)

    def _score(self, policy: Policy, prompt: Prompt, responses: Responses) -> tuple[float | None, str]:
        if self.scorer is None:
            return None, ""
        reader = self.policies[0]
        try:
            if policy is not reader and not share_tokens(policy.tokenizer, reader.tokenizer):
                responses = reencoded(responses, [prompt], reader.tokenizer)
            return self.scorer.score(responses)[0], ""
        except KedgeError as error:  # the answer is still worth reading
            return None, str(error)

    def _check_room(self, config: Config) -> None:
        for policy in self.policies:
            policy.room(sampling_settings(config).max_new_tokens)


def load_chat(
    config: Config, models: Sequence[str], *, form: PromptForm | None = None, reward: Rewards | None = None
) -> Chat:
    """Load the models, and the reward that scores them.

    Args:
        config: Device, precision, sampling settings and rewards.
        models: One or two folders or hub ids.
        form: The form of the prompt made from the user's text; None for the form of each model's training.
        reward: Functions or models instead of `config.reward`.

    Raises:
        KedgeError: A model or reward cannot be loaded or does not fit.
    """
    if not 1 <= len(models) <= MAX_MODELS:
        raise ConfigError(f"chat needs one or {MAX_MODELS} models, not {len(models)}")
    policies = load_policies(models, config)
    origins = [read_origin(source) for source in models]
    forms: list[PromptForm] = [
        chosen_form(policy.tokenizer, None if origin is None else origin.prompt_form, form)
        for policy, origin in zip(policies, origins, strict=True)
    ]
    rewards = configured_rewards(config) if reward is None else reward
    scorer = None
    if rewards:
        first = policies[0]
        scorer = load_reward(
            with_judges(rewards, config),
            policy_tokenizer=first.tokenizer,
            device=resolve_device(config.runtime.device),
            trust_remote_code=config.runtime.trust_remote_code,
            micro_batch_tokens=pass_tokens(config),
            precision=first.precision,
            limits=call_limits(config),
        )
        scorer.check([MESSAGES_COLUMN] if "conversation" in forms else [])
    return Chat(config, policies, forms, scorer)
