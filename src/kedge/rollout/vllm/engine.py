"""The engine that samples on vLLM servers: sends requests, and builds a rollout from the answers."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.experience import Rollout
from kedge.rollout.engine import Dialogue, GenerateOptions
from kedge.rollout.sampler import Request, Responses
from kedge.rollout.vllm.fleet import Fleet
from kedge_base.errors import EngineError

GENERATE = "inference/v1/generate"
"""vLLM's endpoint for tokens in, tokens out."""
FORBIDDEN_BIAS = -100.0
"""Bias added to a forbidden token's logit, the lowest that vLLM accepts. exp(−100) is 4e-44."""
SEED_MASK = 2**32 - 1
"""Mask that keeps the lowest 32 bits of a seed, since PyTorch's CPU generator uses no more."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings shared by all requests of a rollout.

    Attributes:
        max_new_tokens: The longest response, in tokens.
        temperature: Divides the logits, also in the log probabilities; 0 takes the most likely token at each step.
        stop_tokens: The tokens that end a response; the response includes them.
        forbidden: The tokens that are never sampled.
    """

    max_new_tokens: int
    temperature: float
    stop_tokens: Sequence[int]
    forbidden: Sequence[int] = ()

    def request(self, prompt: Sequence[int], *, seed: int, salt: str) -> dict[str, Any]:
        """Build the body of a request for one response.

        Args:
            prompt: The prompt's tokens. Requests with the same prompt share its prefill.
            seed: The seed of the row's random stream.
            salt: Separates the cached prefixes of different weights.
        """
        parameters: dict[str, Any] = {
            "n": 1,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": seed & SEED_MASK,
            "max_tokens": self.max_new_tokens,
            "logprobs": 0,  # only that of the sampled token
            "stop_token_ids": list(self.stop_tokens),
            "ignore_eos": True,  # `stop_tokens` contains EOS if it ends a response
            "detokenize": False,
            "skip_special_tokens": False,
        }
        if self.forbidden:
            parameters["logit_bias"] = {str(token): FORBIDDEN_BIAS for token in self.forbidden}
        return {"token_ids": list(prompt), "sampling_params": parameters, "cache_salt": salt}


def read_answer(
    answer: Mapping[str, Any], settings: SamplingSettings, *, version: str
) -> tuple[list[int], list[float]]:
    """Read the tokens of one response, including its stop token, and their log probabilities.

    Args:
        answer: The JSON of the server.
        settings: The settings of the rollout.
        version: Name of the weights that should have been used.

    Raises:
        EngineError: The answer is incomplete, or was sampled with other weights.
    """
    try:
        [choice] = answer["choices"]
        tokens = [int(token) for token in choice["token_ids"]]
        logprobs = [float(each["logprob"]) for each in choice["logprobs"]["content"]]
        versions = frozenset(str(span["version"]) for span in choice.get("weight_versions") or ())
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"vLLM gave an answer without tokens and log probabilities ({error})") from error
    if not 0 < len(tokens) <= settings.max_new_tokens or len(logprobs) != len(tokens):
        raise EngineError(
            f"vLLM gave {len(tokens)} tokens and {len(logprobs)} log probabilities for at most "
            f"{settings.max_new_tokens} tokens"
        )
    if len(tokens) < settings.max_new_tokens and tokens[-1] not in settings.stop_tokens:
        raise EngineError(
            f"vLLM cut a response off after {len(tokens)} tokens ({choice.get('finish_reason')}); can the server "
            "take prompts and responses of this length (--max-model-len)?"
        )
    if versions and versions != {version}:
        raise EngineError(
            f"vLLM sampled with weights {', '.join(sorted(versions))} instead of {version}: a weight update was lost, "
            "or somebody else uses this server"
        )
    return tokens, logprobs


@dataclass(frozen=True)
class VllmEngine:
    """Samples on vLLM servers; see `Engine`.

    A row's tokens depend on its prompt, its seed and the weights, as with the built-in engine, but they are different
    tokens: vLLM samples differently. Its log probabilities come from other kernels, so the trainer computes them again.

    Attributes:
        fleet: The servers.
        settings: Length limit, temperature, stop tokens, forbidden tokens.
        pad_id: Fills the unused slots.
        device: The device of the rollouts.
    """

    fleet: Fleet
    settings: SamplingSettings
    pad_id: int
    device: torch.device
    _state: dict[str, int] = field(default_factory=dict)
    _run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_exact(self) -> bool:
        """False: vLLM has other kernels."""
        return False

    def with_sampling(self, *, max_new_tokens: int, temperature: float) -> VllmEngine:
        """Return an engine on the same servers with a different length limit and temperature; see `Engine`."""
        settings = replace(self.settings, max_new_tokens=max_new_tokens, temperature=temperature)
        return replace(self, settings=settings)

    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]) -> Rollout:
        """Sample a response for every prompt; see `Engine`. The server has cached the earlier turns of a dialogue.

        Raises:
            EngineError: A server is gone for good, or gave an unusable answer.
        """
        request = Request.of(prompts, **options)
        dialogue = request.dialogue
        assert self._state, "the weights are published before the first rollout"
        version = self._name(**self._state)
        rows = list(range(len(request.prompts)))
        groups = rows if request.groups is None else request.groups
        responses = Responses.empty(len(rows), self.settings.max_new_tokens, pad_id=self.pad_id)
        for turn in itertools.count():
            limits = [self._up_to(int(responses.lengths[row]), dialogue, row) for row in rows]
            # Cached prefixes are tied to the published weights: prompts that other weights have read are read again.
            bodies = [
                limit.request(
                    responses.read_next(row, request.prompts[row]), seed=request.seeds[row] + turn, salt=version
                )
                for row, limit in zip(rows, limits, strict=True)
            ]
            found = self.fleet.ask(GENERATE, bodies, [groups[row] for row in rows])
            answers = {
                row: read_answer(each, limit, version=version)
                for row, each, limit in zip(rows, found, limits, strict=True)
            }
            if dialogue is None:
                for row, (tokens, logprobs) in answers.items():
                    responses.append(row, tokens, logprobs)
                break
            responses.start_turns(rows)
            said = {row: tokens for row, (tokens, _) in answers.items()}
            said |= {row: said[row][:count] for row, count in dialogue.kept(said).items()}
            for row, tokens in said.items():
                responses.append(row, tokens, answers[row][1][: len(tokens)])
            replies = {row: reply for row, reply in dialogue.answer(said).items() if reply is not None}
            for row, reply in replies.items():
                responses.append(row, reply.tokens, parent=reply.parent)
            rows = [row for row in rows if row in replies]
            if not rows:
                break
        return responses.rollout(request, stop_tokens=self.settings.stop_tokens, device=self.device)

    def _up_to(self, length: int, dialogue: Dialogue | None, row: int) -> SamplingSettings:
        """Return the settings for the next turn of a conversation of this length, with its length limit."""
        if dialogue is None:
            return self.settings
        left = self.settings.max_new_tokens - length
        return replace(self.settings, max_new_tokens=min(left, dialogue.limit(row)))

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """Send the weights to all servers; see `Engine`."""
        state = {"number": self._state.get("number", 0) + 1, "version": version}
        seconds = self.fleet.publish(tensors, self._name(**state))
        self._state.update(state)
        return {**seconds, **self.fleet.metrics()}

    def close(self) -> None:
        """End the servers; see `Engine`."""
        self.fleet.close()

    def _name(self, *, number: int, version: int) -> str:
        """Name the weights: a version may be sent again, and other runs on the same server use other names."""
        return f"{self._run[:8]}-{number}-v{version}"
