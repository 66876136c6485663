"""Policies that only answer: prompts in, responses out, batch by batch. Nothing here is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Rollout
from kedge.algorithm.kl import sequence_kl
from kedge.config import Config
from kedge.data import Prompt, Sources, encode_prompt, read_prompts
from kedge.errors import ConfigError
from kedge.models import LanguageModel, load_language_model, load_tokenizer, response_logprobs, stop_token_id
from kedge.pipelines.run import Run
from kedge.pipelines.scoring import describe_responses
from kedge.report.progress import Progress
from kedge.rewards import Responses
from kedge.rollout import Sampler
from kedge.training.runtime import stream_seed

__all__ = ["Answers", "Policy", "Sampling", "load_policy", "policy_kl", "read_questions"]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Attributes:
        max_new_tokens: The longest response, tokens.
        temperature: Divides the logits.
        batch_size: Responses drawn side by side.
        seed: Of the draws. Row n of every policy has the same random stream, so that equal policies answer equally.
    """

    max_new_tokens: int
    temperature: float
    batch_size: int
    seed: int

    @classmethod
    def of(cls, config: Config) -> Sampling:
        """As `config.generate` has it."""
        return cls(
            max_new_tokens=config.generate.max_new_tokens or config.rollout.max_new_tokens,
            temperature=config.generate.temperature,
            batch_size=config.generate.batch_size,
            seed=stream_seed(config.runtime.seed, "answers"),
        )


@dataclass(frozen=True)
class Answers:
    """A batch of responses, as tokens and as texts."""

    rollout: Rollout
    responses: Responses


@dataclass(frozen=True)
class Policy:
    """A frozen policy.

    Attributes:
        source: The folder or id that it came from.
        tokenizer: Its own.
        model: The language model.
        stop_token: The token that ends a response.
        precision: Number format of the matrix products.
    """

    source: str
    tokenizer: PreTrainedTokenizerBase
    model: LanguageModel
    stop_token: int
    precision: Literal["fp32", "bf16"]

    def answer(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Answers]:
        """One response per prompt, in the prompts' order, a batch at a time."""
        sampler = Sampler(
            self.model,
            pad_id=cast("int", self.tokenizer.pad_token_id),
            stop_token=self.stop_token,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            precision=self.precision,
        )
        for start in range(0, len(prompts), sampling.batch_size):
            batch = prompts[start : start + sampling.batch_size]
            rollout = sampler.generate(
                [encode_prompt(self.tokenizer, prompt.text) for prompt in batch],
                seeds=[stream_seed(sampling.seed, start + row) for row in range(len(batch))],
            )
            described = describe_responses(rollout, batch, self.tokenizer, max_new_tokens=sampling.max_new_tokens)
            yield Answers(rollout, described)

    def answer_all(self, prompts: Sequence[Prompt], sampling: Sampling, *, title: str) -> list[Answers]:
        """All batches, with a progress display."""
        batches: list[Answers] = []
        with Progress(title, total=len(prompts)) as progress:
            for answers in self.answer(prompts, sampling):
                batches.append(answers)
                progress.update(sum(len(done.responses) for done in batches))
        return batches

    def room_for_prompt(self, max_new_tokens: int) -> int | None:
        """Tokens that the model's context leaves for a prompt, or None where it has no limit.

        Raises:
            ConfigError: It leaves none.
        """
        if self.model.context_length is None:
            return None
        room = self.model.context_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"{max_new_tokens} new tokens leave no room for a prompt in the context of {self.source!r}, "
                f"{self.model.context_length} tokens; lower generate.max_new_tokens"
            )
        return room


def load_policy(source: str, config: Config, run: Run) -> Policy:
    """A policy's folder or id, to be sampled from.

    Raises:
        ModelError: It cannot be loaded, or has no such stop token.
    """
    trust = config.runtime.trust_remote_code
    tokenizer = load_tokenizer(source, trust_remote_code=trust)
    stop_token = stop_token_id(tokenizer, config.rollout.stop_token)
    model = load_language_model(source, tokenizer=tokenizer, device=run.device, trust_remote_code=trust)
    return Policy(source, tokenizer, model.requires_grad_(False), stop_token, run.precision)


def read_questions(
    config: Config, run: Run, policy: Policy, prompts: Sequence[Any] | None, *, max_new_tokens: int
) -> list[Prompt]:
    """The prompts that a policy is to answer, each with all columns that any of them has.

    Args:
        config: Names the data and its limits.
        run: Where unusable rows are written down.
        policy: Who answers; its tokenizer renders and measures.
        prompts: Texts or rows in place of `config.data.prompts`.
        max_new_tokens: What the context must leave room for.

    Raises:
        KedgeError: The data cannot be read or does not fit.
    """
    data, room = config.data, policy.room_for_prompt(max_new_tokens)
    table = read_prompts(
        Sources(tuple(data.prompts)) if prompts is None else prompts,
        tokenizer=policy.tokenizer,
        max_prompt_tokens=data.max_prompt_tokens if room is None else min(data.max_prompt_tokens, room),
        template=data.template,
        truncate=data.truncate,
        max_rejected_fraction=data.max_rejected_fraction,
        rejected_to=run.folder / "rejected.jsonl",
    )
    names = dict.fromkeys(name for record in table.records for name in record.columns)
    return [replace(record, columns={name: record.columns.get(name) for name in names}) for record in table.records]


@torch.no_grad()
def policy_kl(policy: Policy, reference: Policy, answers: Iterable[Answers], *, temperature: float) -> list[float]:
    """KL of a policy to another one of the same tokens: an estimate per response, nats; their mean is the divergence.

    Args:
        policy: Who sampled the responses.
        reference: Whom it is compared with.
        answers: What it sampled.
        temperature: At which it sampled; divides the logits of both.

    Source: spec §5.20 (k1), §10.
    """
    estimates: list[float] = []
    for each in answers:
        logprobs, ref_logprobs = (
            response_logprobs(side.model, each.rollout, temperature=temperature, precision=side.precision)
            for side in (policy, reference)
        )
        estimates += sequence_kl(logprobs, ref_logprobs, each.rollout.response_mask).tolist()
    return estimates
