"""Frozen policies: sample responses to prompts, batch by batch, and measure KL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Rollout
from kedge.algorithm.kl import sequence_kl
from kedge.data import Prompt, encode_prompt
from kedge.logs.phases import OnPhase
from kedge.logs.progress import Progress
from kedge.models import (
    LanguageModel,
    Precision,
    StopTokens,
    load_language_model,
    load_tokenizer,
    named_stop_tokens,
    own_stop_tokens,
    response_logprobs,
)
from kedge.rewards import Responses
from kedge.rewards.score import describe_responses
from kedge.rollout import Engine, Sampler, SharedEngine, shared_out
from kedge.system.ranks import ALONE, Ranks
from kedge.training.runtime import stream_seed

__all__ = ["Policy", "SampledBatch", "Sampling", "load_frozen_policy", "policy_kl"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    Attributes:
        max_new_tokens: Longest response, tokens.
        temperature: Divides the logits.
        batch_size: Responses sampled in parallel.
        seed: Seed of the samples. Row n uses the same random stream for every policy, so that equal policies give
            equal responses.
    """

    max_new_tokens: int
    temperature: float
    batch_size: int
    seed: int


@dataclass(frozen=True)
class SampledBatch:
    """A batch of sampled responses, as tokens and as texts."""

    rollout: Rollout
    responses: Responses


@dataclass(frozen=True)
class Policy:
    """A frozen policy.

    Attributes:
        source: Folder or hub id that it was loaded from.
        tokenizer: Its tokenizer.
        model: The language model.
        stop_tokens: The tokens that end a response.
        precision: Number format of the matrix products.
        ranks: They share sampling and passes; every one of them has the policy, or a part of each of its weights.
    """

    source: str
    tokenizer: PreTrainedTokenizerBase
    model: LanguageModel
    stop_tokens: StopTokens
    precision: Precision
    ranks: Ranks = ALONE

    def sampler(self, sampling: Sampling) -> Sampler:
        """The sampler of the policy's responses."""
        return Sampler(
            self.model,
            pad_id=cast("int", self.tokenizer.pad_token_id),
            stop_tokens=self.stop_tokens.ids,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            precision=self.precision,
        )

    def engine(self, sampling: Sampling) -> Engine:
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
        assert logprobs is not None
        return logprobs

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[SampledBatch]:
        """Sample one response per prompt, in the order of the prompts, a batch at a time."""
        engine = self.engine(sampling)
        for start in range(0, len(prompts), sampling.batch_size):
            batch = prompts[start : start + sampling.batch_size]
            rollout = engine.generate(
                [encode_prompt(self.tokenizer, prompt.text) for prompt in batch],
                seeds=[stream_seed(sampling.seed, start + row) for row in range(len(batch))],
            )
            described = describe_responses(
                rollout,
                batch,
                self.tokenizer,
                max_new_tokens=sampling.max_new_tokens,
                seed=stream_seed(sampling.seed, "reward", start),
            )
            yield SampledBatch(rollout, described)

    def sample_all(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, title: str, on_phase: OnPhase = lambda *_: None
    ) -> list[SampledBatch]:
        """Sample all batches, with a progress display; `on_phase` is called before the first batch and after each."""
        batches: list[SampledBatch] = []
        on_phase(title, 0, len(prompts))
        with Progress(title, total=len(prompts)) as progress:
            for batch in self.sample(prompts, sampling):
                batches.append(batch)
                done = sum(len(each.responses) for each in batches)
                progress.update(done)
                on_phase(title, done, len(prompts))
        return batches


def load_frozen_policy(
    source: str,
    *,
    device: torch.device,
    precision: Precision,
    stop_token: str | int | Sequence[str | int] | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    ranks: Ranks = ALONE,
) -> Policy:
    """Load a policy for sampling only.

    Args:
        source: Folder or hub id.
        device: Device of the weights.
        precision: Number format of the matrix products.
        stop_token: The token or tokens that end a response; None for the policy's own.
        trust_remote_code: Run Python code in the model folder.
        chat_template: Replaces the model's, see `load_tokenizer`.
        ranks: The processes that share sampling and passes.

    Raises:
        ModelError: The policy cannot be loaded, or has no such stop token.
    """
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code, chat_template=chat_template)
    named = named_stop_tokens(tokenizer, stop_token)
    model = load_language_model(
        source, tokenizer=tokenizer, device=device, trust_remote_code=trust_remote_code, ranks=ranks
    )
    model.check_sampling()
    stop_tokens = named or own_stop_tokens(tokenizer, model)
    return Policy(source, tokenizer, model.requires_grad_(False), stop_tokens, precision, ranks)


@torch.no_grad()
def policy_kl(policy: Policy, reference: Policy, batches: Iterable[SampledBatch], *, temperature: float) -> list[float]:
    """KL of a policy to another with the same tokens: one estimate per response, nats; their mean estimates the KL.

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
