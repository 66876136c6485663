"""Frozen policies: sample responses to prompts, batch by batch, and measure KL."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import ENDINGS, Rollout
from kedge.algorithm.shaping import sequence_kl
from kedge.config import Config
from kedge.data import Prompt, encode_completion, encode_prompt, room_for_prompt, tldr_response
from kedge.data.chat import render_prompt
from kedge.data.fields import messages_of
from kedge.data.prompts import prompt_columns
from kedge.data.records import RowError
from kedge.models import (
    LanguageModel,
    Precision,
    StopTokens,
    load_language_model,
    load_tokenizer,
    model_width,
    named_stop_tokens,
    own_stop_tokens,
    resolve_precision,
    response_logprobs,
)
from kedge.ranks import ALONE, Ranks
from kedge.rewards import MESSAGES_COLUMN, Responses
from kedge.rewards.score import describe_responses
from kedge.rollout import Engine, Sampler, SharedEngine, shared_out
from kedge.runs.frozen import freeze_models
from kedge.runs.run import Run
from kedge.runs.training import OnPhase
from kedge.training.runtime import (
    avoid_kernels_per_shape,
    resolve_device,
    set_threads,
    stream_seed,
    tune_memory,
)
from kedge_base.errors import DataError
from kedge_base.machine.invocation import as_argument
from kedge_base.machine.progress import Progress

if TYPE_CHECKING:
    from kedge.rollout.player import Player


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings.

    Attributes:
        max_new_tokens: Longest response, tokens.
        temperature: Divides the logits; 0 takes the most likely token at each step.
        batch_size: Number of responses sampled in parallel.
        seed: Seed of the samples. Row n uses the same random stream for every policy, so that equal policies give
            equal responses.
    """

    max_new_tokens: int
    temperature: float
    batch_size: int
    seed: int


@dataclass(frozen=True)
class SampledResponses:
    """A batch of sampled responses, as tokens and as texts."""

    rollout: Rollout
    responses: Responses

    @property
    def endings(self) -> list[str]:
        """How each episode ended; empty for single responses."""
        ending = self.rollout.ending
        return [] if ending is None else [ENDINGS[each] for each in ending.tolist()]


def shares_of(endings: Sequence[str]) -> dict[str, float]:
    """The shares of the endings of episodes, in their order."""
    return {word: endings.count(word) / len(endings) for word in ENDINGS if word in endings}


@dataclass(frozen=True)
class Policy:
    """A frozen policy.

    Attributes:
        source: Folder or hub id that it was loaded from.
        tokenizer: Its tokenizer.
        model: The language model.
        stop_tokens: The tokens that end a response.
        precision: Number format of the matrix products.
        ranks: Processes that share sampling and forward passes; each has the policy or a shard of its weights.
    """

    source: str
    tokenizer: PreTrainedTokenizerBase
    model: LanguageModel
    stop_tokens: StopTokens
    precision: Precision
    ranks: Ranks = ALONE

    def sampler(self, sampling: SamplingSettings) -> Sampler:
        """The sampler for this policy."""
        return Sampler(
            self.model,
            pad_id=cast("int", self.tokenizer.pad_token_id),
            stop_tokens=self.stop_tokens.ids,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            precision=self.precision,
            batch_size=sampling.batch_size,
        )

    def engine(self, sampling: SamplingSettings) -> Engine:
        """The sampler, shared by the ranks if there are several."""
        sampler = self.sampler(sampling)
        if not self.ranks.are_several:
            return sampler
        weights = (self.model,) if self.ranks.is_sharded else ()
        return SharedEngine(sampler, self.ranks, sampler.pad_id, weights)

    def logprobs(self, rollout: Rollout, *, temperature: float) -> Float[Tensor, "batch time"]:
        """Log probabilities (nats) of a rollout's actions under this policy, 0 elsewhere."""
        evaluate = partial(response_logprobs, self.model, temperature=temperature, precision=self.precision)
        if not self.ranks.are_several:
            return evaluate(rollout)
        (logprobs,) = shared_out(lambda rows: (evaluate(rows),), rollout, None, self.ranks)
        return logprobs

    def room(self, max_new_tokens: int, *, player: Player | None = None) -> int | None:
        """Longest prompt that leaves room for a response, or a player's turn, in the context; None for no limit."""
        turn_tokens = None if player is None else player.turn_tokens
        return room_for_prompt({"the model": self.model.sampling_length}, max_new_tokens, turn_tokens=turn_tokens)

    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        *,
        title: str,
        on_phase: OnPhase = lambda *_: None,
        player: Player | None = None,
    ) -> Generator[SampledResponses, None, None]:
        """Sample one response per prompt, in the order of the prompts, a batch at a time.

        Shows the progress; `on_phase` is called before the first batch, and after each batch when the next one is
        requested. With a player, the responses are episodes; those of the same prompt object start in the same state.
        """
        engine = self.engine(sampling)
        total = len(prompts)
        firsts = {id(prompt): place for place, prompt in reversed(list(enumerate(prompts)))}
        on_phase(title, 0, total)
        with Progress(title, total=total) as progress:
            for start in range(0, total, sampling.batch_size):
                batch = prompts[start : start + sampling.batch_size]
                seeds = [stream_seed(sampling.seed, start + row) for row in range(len(batch))]
                if player is None:
                    ids = [encode_prompt(self.tokenizer, prompt.text) for prompt in batch]
                    rollout = engine.generate(ids, seeds=seeds)
                else:
                    starts = [stream_seed(sampling.seed, "environment", firsts[id(prompt)]) for prompt in batch]
                    dialogue = player.episodes(self.tokenizer, batch, starts)
                    rollout = player.check(engine.generate((), seeds=seeds, dialogue=dialogue))
                described = describe_responses(
                    rollout,
                    batch,
                    self.tokenizer,
                    max_new_tokens=sampling.max_new_tokens,
                    seed=stream_seed(sampling.seed, "reward", start),
                    stop_tokens=self.stop_tokens.ids,
                )
                yield SampledResponses(rollout, described)
                done = start + len(batch)
                progress.update(done)
                on_phase(title, done, total)


def load_frozen_policy(
    source: str,
    config: Config,
    *,
    device: torch.device,
    precision: Precision,
    chat_template: str | None = None,
    ranks: Ranks = ALONE,
) -> Policy:
    """Load a policy for sampling only.

    Args:
        source: Folder or hub id.
        config: Names its stop tokens, if not its own, and says whether Python code in its folder may run.
        device: Device of the weights.
        precision: Number format of the matrix products.
        chat_template: Replaces the model's template; see `load_tokenizer`.
        ranks: The processes that share sampling and passes.

    Raises:
        ModelError: The policy cannot be loaded, or has no such stop token.
    """
    trusted = config.runtime.trust_remote_code
    tokenizer = load_tokenizer(source, trust_remote_code=trusted, chat_template=chat_template)
    named = named_stop_tokens(tokenizer, config.rollout.stop_token)
    model = load_language_model(source, tokenizer=tokenizer, device=device, trust_remote_code=trusted, ranks=ranks)
    model.trunk.check_decoding()
    stop_tokens = named or own_stop_tokens(tokenizer, model)
    return Policy(source, tokenizer, model.requires_grad_(False), stop_tokens, precision, ranks)


def load_policies(sources: Sequence[str], config: Config) -> list[Policy]:
    """Load policies to sample from outside a run, on the configured device; also sets memory and threads up.

    Raises:
        ModelError: A policy cannot be loaded, or has no such stop token.
    """
    device = resolve_device(config.runtime.device)
    tune_memory()
    avoid_kernels_per_shape(device)
    set_threads(config.runtime.num_threads)

    def load(source: str) -> Policy:
        width = model_width(source, trust_remote_code=config.runtime.trust_remote_code)
        precision = resolve_precision(config.runtime.precision, device, width=width)
        template = config.data.chat_template
        return load_frozen_policy(source, config, device=device, precision=precision, chat_template=template)

    return list(map(load, sources))


@torch.no_grad()
def policy_kl(
    policy: Policy, reference: Policy, batches: Iterable[SampledResponses], *, temperature: float
) -> list[float]:
    """Estimate the KL of a policy to another with the same tokens: one value per response in nats, to be averaged.

    Args:
        policy: The policy that sampled the responses.
        reference: The policy to compare with.
        batches: The sampled responses.
        temperature: Sampling temperature; divides the logits of both.

    Source: spec §5.20 (k1), §10.
    """
    estimates: list[float] = []
    for batch in batches:
        logprobs, ref_logprobs = (side.logprobs(batch.rollout, temperature=temperature) for side in (policy, reference))
        estimates += sequence_kl(logprobs, ref_logprobs, batch.rollout.action_mask).tolist()
    return estimates


def load_policy(source: str, config: Config, run: Run) -> Policy:
    """Load a policy to sample from, on the run's device.

    Raises:
        ModelError: The policy cannot be loaded or sharded, or has no such stop token.
    """
    policy = load_frozen_policy(
        source,
        config,
        device=run.device,
        precision=run.precision,
        chat_template=config.data.chat_template if source == str(config.model) else None,
        ranks=run.ranks,
    )
    freeze_models([policy.model], config, run, can_rest=False)
    return replace(policy, precision="bf16") if policy.model.holds_bf16 else policy


def sampling_settings(config: Config, *, num_responses: int = 1) -> SamplingSettings:
    """The sampling settings of `config.generate`.

    Args:
        config: The configuration.
        num_responses: Number of responses to each prompt; with more than one, decoding is not greedy by default.
    """
    temperature = config.generate.temperature
    if temperature is None:
        temperature = 0.0 if num_responses == 1 else config.rollout.temperature
    return SamplingSettings(
        max_new_tokens=config.generate.max_new_tokens or config.rollout.max_new_tokens,
        temperature=temperature,
        batch_size=config.generate.batch_size,
        seed=stream_seed(config.runtime.seed, "answers"),
    )


REFERENCE_COLUMNS = ("completion", "chosen", "summary")


def read_references(prompts: Sequence[Prompt], *, template: str) -> list[str]:
    """Return each prompt's reference: its `completion`, `chosen` or `summary`; for a conversation, the last message.

    Args:
        prompts: The prompts with their columns.
        template: `tldr` prepends the space that summaries have in training.

    Raises:
        DataError: A prompt has no reference.
    """
    texts = [_reference(prompt.columns) for prompt in prompts]
    if missing := [prompt.place for prompt, text in zip(prompts, texts, strict=True) if not text]:
        raise DataError(
            f"{len(missing)} of {len(texts)} prompts have no reference, first {missing[0]}; add a column "
            f"{' or '.join(REFERENCE_COLUMNS)}; name a policy to compare with: "
            f"{as_argument('--against')}; or score the policy's own responses alone, several to each prompt, for "
            f"pass@1 and more: {as_argument('--samples 8', 'kedge.pass_at_k')}"
        )
    return [tldr_response(text) if template == "tldr" else text for text in texts]


def _reference(columns: Mapping[str, Any]) -> str:
    for name in REFERENCE_COLUMNS:
        value = columns.get(name)
        if isinstance(value, (list, Mapping)):
            try:
                value = messages_of(value, name)[-1]["content"]
            except RowError:
                continue
        if isinstance(value, str) and value.strip():
            return value
    return ""


def render_for(
    policy: Policy,
    prompts: Sequence[Prompt],
    reader: Policy,
    *,
    max_new_tokens: int,
    player: Player | None = None,
) -> list[Prompt]:
    """Render the prompts with a policy's chat template; they are unchanged if it has no template.

    Args:
        policy: The policy to sample from.
        prompts: Prompts rendered with `reader`'s template.
        reader: The policy with the template that rendered them.
        max_new_tokens: Number of tokens in the context to reserve for the response.
        player: Plays episodes, if the responses are.

    Raises:
        DataError: The template rejects a conversation, or a prompt is too long for the policy's context.
    """
    rendered = list(prompts)
    if policy.tokenizer.chat_template not in (None, reader.tokenizer.chat_template):
        rendered = [_rendered(policy, prompt) for prompt in prompts]
    room = policy.room(max_new_tokens, player=player)
    for prompt in rendered:
        if room is not None and (length := len(encode_prompt(policy.tokenizer, prompt.text))) > room:
            raise DataError(
                f"{prompt.place} is {length} tokens long for {policy.source!r}, which can continue at most {room}; "
                "lower data.max_prompt_tokens"
            )
    return rendered


def _rendered(policy: Policy, prompt: Prompt) -> Prompt:
    messages = prompt.columns.get(MESSAGES_COLUMN)
    if not messages:
        return prompt
    try:
        return replace(prompt, text=render_prompt(policy.tokenizer, messages))
    except RowError as error:
        raise DataError(f"{prompt.place}, for {policy.source!r}: {error}") from error


def reencoded(responses: Responses, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Responses:
    """Encode the responses of a policy with a different tokenizer or chat template."""
    written = written_responses(
        prompts, responses.completions, responses.stopped, tokenizer, max_new_tokens=responses.max_new_tokens
    )
    return replace(written, seed=responses.seed, preceding=responses.preceding)


def written_responses(
    prompts: Sequence[Prompt],
    completions: list[str],
    stopped: list[bool],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int | None,
) -> Responses:
    """Encode texts as responses."""
    return Responses(
        prompts=[prompt.text for prompt in prompts],
        completions=completions,
        prompt_ids=[encode_prompt(tokenizer, prompt.text) for prompt in prompts],
        response_ids=[
            encode_completion(tokenizer, text, eos=ended) for text, ended in zip(completions, stopped, strict=True)
        ],
        stopped=stopped,
        columns=prompt_columns(prompts),
        max_new_tokens=max_new_tokens,
    )
