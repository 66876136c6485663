"""One or two models that answer the same texts, with the scores of a reward.

text ─▶ each model's prompt ─▶ the sampler of training and evaluation ─▶ score ─▶ reply
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kedge.config import Config, with_values
from kedge.data import Prompt, PromptForm, encode_prompt, room_for_prompt
from kedge.errors import ConfigError, DataError, KedgeError
from kedge.models import model_width, resolve_precision
from kedge.models.card import Origin, read_origin
from kedge.rewards import MESSAGES_COLUMN, Responses, WeightedReward
from kedge.rewards.model import share_tokens
from kedge.rewards.score import describe_responses
from kedge.runs.inputs import Rewards, configured_rewards, load_rewards_on
from kedge.runs.run import pass_tokens
from kedge.stages.chat.conversation import Conversation, chosen_form, described_form
from kedge.stages.chat.stream import TextStream
from kedge.stages.evaluation.policy import Policy, Sampling, load_frozen_policy, sampling_of, written_responses
from kedge.system.texts import unwritable
from kedge.training.runtime import keep_freed_memory, resolve_device, set_threads, stream_seed

__all__ = ["MAX_MODELS", "SETTINGS", "Chat", "Interrupted", "Reply", "load_chat"]

MAX_MODELS = 2

SETTINGS = {
    "temperature": "generate.temperature",
    "max_new_tokens": "generate.max_new_tokens",
    "seed": "runtime.seed",
}
"""What can be changed during a chat, and its field of the configuration."""


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
        score: The reward's score; None without a reward, or if there is none.
        score_error: Why there is no score, if the reward failed.
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
        forms: What becomes of the user's text, per model.
        scorer: Scores the answers; reads texts in the first model's tokens.
    """

    def __init__(
        self, config: Config, policies: Sequence[Policy], forms: Sequence[PromptForm], scorer: WeightedReward | None
    ) -> None:
        self.policies, self.scorer, self._config, self._turn = policies, scorer, config, 0
        self.conversations = [
            Conversation(policy.tokenizer, form) for policy, form in zip(policies, forms, strict=True)
        ]
        self._check_room(config)

    @property
    def settings(self) -> dict[str, float | int]:
        """The sampling settings in force."""
        sampling = sampling_of(self._config)
        return {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": self._config.runtime.seed,
        }

    def set(self, name: str, value: object) -> None:
        """Change a sampling setting.

        Raises:
            ConfigError: There is no such setting, or the value is invalid.
        """
        if name not in SETTINGS:
            raise ConfigError(f"{name!r} is not a setting; choose one of {', '.join(SETTINGS)}")
        config = with_values(self._config, {SETTINGS[name]: value})
        self._check_room(config)
        self._config = config

    def reset(self) -> None:
        """Forget the conversation; the random numbers start over, too."""
        self._turn = 0
        for conversation in self.conversations:
            conversation.messages = []

    def introductions(self) -> list[str]:
        """One line per model: its name, what becomes of the user's text, and where answers end."""
        return [
            f"{policy.source}: {described_form(conversation.form, policy.tokenizer)}; {policy.stop_tokens.line}"
            for policy, conversation in zip(self.policies, self.conversations, strict=True)
        ]

    def ask(self, text: str, write: Callable[[int, str], None] = lambda model, text: None) -> list[Reply]:
        """The answers of all models to a text.

        An answer that is interrupted, by Ctrl-C or by an `Interrupted` from `write`, ends there, and the models after
        it do not answer.

        Args:
            text: What the user wrote.
            write: Takes each piece of an answer as soon as it is sampled, with the model's number.

        Raises:
            DataError: The text does not fit into a model's context, or is not valid Unicode; nothing is sampled.
        """
        if (fault := unwritable(text, deepest=0)) is not None:
            raise DataError(f"the text {fault}")
        sampling = replace(sampling_of(self._config), seed=stream_seed(self._config.runtime.seed, "chat", self._turn))
        prompts = [
            conversation.prompt(text, room=self._room(policy, sampling.max_new_tokens))
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

    def _answer(self, index: int, prompt: Prompt, sampling: Sampling, write: Callable[[str], None]) -> Reply:
        policy = self.policies[index]
        prompt_ids = encode_prompt(policy.tokenizer, prompt.text)
        stream = TextStream(policy.tokenizer, prompt_ids, policy.stop_tokens.ids, write)
        try:
            rollout = policy.sampler(sampling).generate(
                [prompt_ids], seeds=[sampling.seed], on_token=lambda row, token: stream.add(token)
            )
            most, seed = sampling.max_new_tokens, stream_seed(sampling.seed, "reward")
            responses = describe_responses(rollout, [prompt], policy.tokenizer, max_new_tokens=most, seed=seed)
            stream.end(responses.completions[0])
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
                columns = [Prompt(prompt.text, prompt.columns)]
                responses = written_responses(columns, responses.completions, responses.stopped, reader.tokenizer)
            return self.scorer.score(responses)[0], ""
        except KedgeError as error:  # the answer is still worth reading
            return None, str(error)

    def _room(self, policy: Policy, max_new_tokens: int) -> int | None:
        return room_for_prompt([policy.model.sampling_length], max_new_tokens)

    def _check_room(self, config: Config) -> None:
        for policy in self.policies:
            self._room(policy, sampling_of(config).max_new_tokens)


def load_chat(
    config: Config, models: Sequence[str], *, form: PromptForm | None = None, reward: Rewards | None = None
) -> Chat:
    """Load the models, and the reward that scores them.

    Args:
        config: Device, precision, sampling settings and rewards.
        models: One or two folders or hub ids.
        form: What becomes of the user's text; None for the form of each model's training.
        reward: Functions or models in place of `config.reward`.

    Raises:
        KedgeError: A model or reward cannot be loaded or does not fit; one line.
    """
    if not 1 <= len(models) <= MAX_MODELS:
        raise ConfigError(f"chat needs one or {MAX_MODELS} models, not {len(models)}")
    device, trusted = resolve_device(config.runtime.device), config.runtime.trust_remote_code
    keep_freed_memory()
    set_threads(config.runtime.num_threads)

    def load(source: str) -> Policy:
        width = model_width(source, trust_remote_code=trusted)
        return load_frozen_policy(
            source,
            device=device,
            precision=resolve_precision(config.runtime.precision, device, width=width),
            stop_token=config.rollout.stop_token,
            trust_remote_code=trusted,
            chat_template=config.data.chat_template,
        )

    policies = [load(source) for source in models]
    forms: list[PromptForm] = [_form(policy, read_origin(policy.source), form) for policy in policies]
    rewards = configured_rewards(config) if reward is None else reward
    scorer = None
    if rewards:
        first = policies[0]
        scorer = load_rewards_on(
            rewards,
            config,
            first.tokenizer,
            device=device,
            precision=first.precision,
            log=None,
            micro_batch_tokens=pass_tokens(config),
        )
        scorer.check([MESSAGES_COLUMN] if "conversation" in forms else [])
    return Chat(config, policies, forms, scorer)


def _form(policy: Policy, origin: Origin | None, wanted: PromptForm | None) -> PromptForm:
    return chosen_form(policy.tokenizer, None if origin is None else origin.prompt_form, wanted)
