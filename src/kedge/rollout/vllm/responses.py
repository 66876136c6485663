"""Requests for responses, and a rollout from their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.data.tokens import pad_left
from kedge.errors import EngineError

__all__ = ["GENERATE", "Answer", "SamplingSettings", "read_answer", "rollout_from"]

GENERATE = "inference/v1/generate"
"""vLLM's endpoint for tokens in, tokens out."""
FORBIDDEN_BIAS = -100.0
"""Added to a forbidden token's logit; vLLM accepts no larger one. exp(−100) is 4e-44."""
SEED_MASK = 2**32 - 1
"""PyTorch's generator on a CPU uses 32 bits of a seed."""


@dataclass(frozen=True)
class SamplingSettings:
    """What all requests of a rollout share.

    Attributes:
        max_new_tokens: The longest response, in tokens.
        temperature: Divides the logits, also in the log probabilities.
        stop_tokens: The tokens that end a response, of which they are the last.
        forbidden: The tokens that are never sampled.
        greedy: Take the most likely token at each step.
    """

    max_new_tokens: int
    temperature: float
    stop_tokens: Sequence[int]
    forbidden: Sequence[int] = ()
    greedy: bool = False

    def request(self, prompt: Sequence[int], *, seed: int, salt: str) -> dict[str, Any]:
        """The body of a request for one response.

        Args:
            prompt: The prompt's tokens. Requests with the same prompt share its prefill.
            seed: The seed of the row's random stream.
            salt: Separates the cached prefixes of different weights.
        """
        parameters: dict[str, Any] = {
            "n": 1,
            "temperature": 0.0 if self.greedy else self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": seed & SEED_MASK,
            "max_tokens": self.max_new_tokens,
            "logprobs": 0,  # of the sampled token alone
            "stop_token_ids": list(self.stop_tokens),
            "ignore_eos": True,  # `stop_tokens` has it if it is one
            "detokenize": False,
            "skip_special_tokens": False,
        }
        if self.forbidden:
            parameters["logit_bias"] = {str(token): FORBIDDEN_BIAS for token in self.forbidden}
        return {"token_ids": list(prompt), "sampling_params": parameters, "cache_salt": salt}


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        tokens: Its tokens, the stop token included.
        logprobs: Their log probabilities.
        versions: The weights that sampled it; empty if the server does not say so.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: frozenset[str]


def read_answer(answer: Mapping[str, Any], settings: SamplingSettings, *, version: str) -> Answer:
    """Check one answer.

    Args:
        answer: The JSON of the server.
        settings: What was asked for.
        version: Name of the weights that should have sampled it.

    Raises:
        EngineError: It is incomplete, or was sampled with other weights.
    """
    try:
        [choice] = answer["choices"]
        tokens = [int(token) for token in choice["token_ids"]]
        logprobs = [float(each["logprob"]) for each in choice["logprobs"]["content"]]
        versions = frozenset(str(span["version"]) for span in choice.get("weight_versions") or ())
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM gave an answer without tokens and log probabilities ({error})") from error
    if not 0 < len(tokens) <= settings.max_new_tokens or len(logprobs) != len(tokens):
        raise EngineError(
            f"vLLM gave {len(tokens)} tokens and {len(logprobs)} log probabilities for at most "
            f"{settings.max_new_tokens} tokens"
        )
    if len(tokens) < settings.max_new_tokens and tokens[-1] not in settings.stop_tokens:
        raise EngineError(
            f"vLLM broke a response off after {len(tokens)} tokens ({choice.get('finish_reason')}); can the server "
            "take prompts and responses of this length (--max-model-len)?"
        )
    if versions and versions != {version}:
        raise EngineError(
            f"vLLM sampled with weights {', '.join(sorted(versions))} in place of {version}: a weight update was lost, "
            "or somebody else uses this server"
        )
    return Answer(tokens, logprobs, versions)


def rollout_from(
    answers: Sequence[Answer],
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    *,
    pad_id: int,
    groups: Sequence[int] | None,
    policy_version: int,
    device: torch.device,
) -> Rollout:
    """The responses as padded tensors; arguments as in `Engine.generate`."""
    ids = torch.full((len(answers), settings.max_new_tokens), pad_id)
    logprobs = torch.zeros(ids.shape)
    for row, answer in enumerate(answers):
        ids[row, : len(answer.tokens)] = torch.tensor(answer.tokens)
        logprobs[row, : len(answer.tokens)] = torch.tensor(answer.logprobs)
    lengths = torch.tensor([len(answer.tokens) for answer in answers])
    mask = (torch.arange(settings.max_new_tokens) < lengths[:, None]).to(device)
    stopped = torch.tensor([answer.tokens[-1] in settings.stop_tokens for answer in answers])
    prompt_ids, prompt_mask = pad_left(prompts, pad_id)

    def whole(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), device=device)

    return Rollout(
        prompt_ids=prompt_ids.to(device),
        prompt_mask=prompt_mask.to(device),
        response_ids=ids.to(device),
        token_mask=mask,
        action_mask=mask,
        logprobs=logprobs.to(device),
        values=None,
        stopped=stopped.to(device),
        group=whole(range(len(prompts)) if groups is None else groups),
        policy_version=whole([policy_version] * len(prompts)),
    )
