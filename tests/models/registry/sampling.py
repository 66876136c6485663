"""A policy's samples: their noted log probabilities, with rows that end early and leave the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kedge.algorithm.experience import Rollout
from kedge.models import LanguageModel
from kedge.models.packing.decoders import GroupedDecoder, PaddedDecoder
from kedge.models.packing.packed import PackedDecoder
from kedge.rollout import Sampler
from kedge_base.errors import KedgeError
from tests.models.registry.alone import logprobs_alone, taken
from tests.models.registry.checks import LOGPROB_TOLERANCE, check, phase, random_rows
from tests.models.registry.outcome import Fault
from tests.models.registry.sizes import PAD

# So many rows with the same prompt, at so low a temperature, that some word recurs in many of them.
PROMPTS = random_rows((2, 9)) * 12
MAX_NEW_TOKENS, TEMPERATURE = 10, 0.4
WAYS = {PackedDecoder: "packed", PaddedDecoder: "padded", GroupedDecoder: "by prompt length"}
MIN_STOPPED = 0.26
"""Share of rows that stop early: more than the sampler needs to drop them."""


@dataclass(frozen=True)
class Sampled:
    """A rollout, and how it was sampled."""

    rollout: Rollout
    way: str
    drops_rows: bool


def check_sampling(model: LanguageModel, plain: PreTrainedModel) -> Sampled | None:
    """The noted log probabilities of sampled tokens are those of plain passes over the whole rows.

    None if the model is refused by the check that every stage which samples makes before it starts.
    """
    try:
        with phase("sampling"):
            model.trunk.check_decoding()
    except KedgeError:
        return None
    with phase("sampling"):
        try:
            rollout = sample(model, PROMPTS, frequent_token(sample(model, PROMPTS)))
            check_noted("sampling", rollout, plain)
            # One token in an empty cache looks like a later step to some models.
            check_noted("sampling from one token", sample(model, [row[:1] for row in PROMPTS]), plain)
            decoder = model.trunk.decoder([[4, 5], [6]], max_new_tokens=1, pad_id=PAD)
        except KedgeError as error:
            raise Fault(f"sampling: refused only now: {error}") from error
    if not rollout.stopped.float().mean() >= MIN_STOPPED:
        raise Fault("sampling: too few rows stop early for a test of dropping them")
    return Sampled(rollout, WAYS[type(decoder)], decoder.can_drop_rows)


def sample(model: LanguageModel, prompts: list[list[int]], *stop_tokens: int) -> Rollout:
    """Sample with fixed seeds, within the context."""
    limit = model.sampling_length or MAX_NEW_TOKENS + max(map(len, prompts))
    prompts = [prompt[-max(1, limit // 2) :] for prompt in prompts]
    room = min(MAX_NEW_TOKENS, limit - max(map(len, prompts)))
    sampler = Sampler(model, pad_id=PAD, stop_tokens=stop_tokens, max_new_tokens=room, temperature=TEMPERATURE)
    return sampler.generate(prompts, seeds=range(len(prompts)))


def frequent_token(rollout: Rollout) -> int:
    """The token that would end the most rows before their last slot, but not all of them."""
    early = Counter(token for row in rollout.response_ids[:, :-1].tolist() for token in set(row))
    return max((token for token in early if early[token] < rollout.num_responses), key=lambda token: early[token])


def check_noted(name: str, rollout: Rollout, plain: PreTrainedModel) -> None:
    """Compare the noted log probabilities with plain passes over prompt and response."""
    prompts = [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    responses = [ids[mask].tolist() for ids, mask in zip(rollout.response_ids, rollout.token_mask, strict=True)]
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    with torch.no_grad():
        expected = taken(logprobs_alone(plain, rows, TEMPERATURE), rows)
    theirs = [own[len(prompt) - 1 :] for own, prompt in zip(expected, prompts, strict=True)]
    ours = [noted[mask] for noted, mask in zip(rollout.logprobs, rollout.token_mask, strict=True)]
    check(name, ours, theirs, LOGPROB_TOLERANCE / TEMPERATURE)
