"""The built-in engine: pure sampling with a key–value cache, one random stream per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kedge.algorithm.experience import Rollout
from kedge.algorithm.logprobs import token_logprobs
from kedge.data.tokens import pad_left
from kedge.models import LanguageModel, autocast

__all__ = ["Sampler"]


@dataclass(frozen=True)
class Sampler:
    """Samples from softmax(logits/τ) until the stop token or `max_new_tokens`.

    No top-k, no top-p: a filter that is not mirrored when the tokens are scored again makes the KL negative.

    Args:
        model: The policy; every call uses its current weights.
        pad_id: What fills the unused slots.
        stop_token: The token that ends a response and counts as its last.
        max_new_tokens: The longest response, in tokens.
        temperature: τ > 0.
        precision: Number format of the matrix products.
        batch_size: Rows sampled side by side; None samples all at once.

    Source: spec §4.13–15.
    """

    model: LanguageModel
    pad_id: int
    stop_token: int
    max_new_tokens: int
    temperature: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    batch_size: int | None = None

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], policy_version: int = 0) -> Rollout:
        """Sample a response for every prompt; see `Engine`."""
        assert len(prompts) == len(seeds), "one seed per prompt"
        ids, mask = pad_left(prompts, self.pad_id)
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        draws = _uniform_draws(seeds, self.max_new_tokens).to(self.model.device, _draw_dtype(self.model.device))
        size = self.batch_size or len(prompts)
        with autocast(self.precision, self.model.device):
            parts = [
                self._sample(ids[start : start + size], mask[start : start + size], draws[start : start + size])
                for start in range(0, len(prompts), size)
            ]
        response_ids, logprobs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        response_mask, stopped = self._count(response_ids)
        return Rollout(
            prompt_ids=ids,
            prompt_mask=mask,
            response_ids=response_ids.masked_fill(~response_mask, self.pad_id),
            response_mask=response_mask,
            logprobs=logprobs.masked_fill(~response_mask, 0.0),
            stopped=stopped,
            policy_version=policy_version,
        )

    def _sample(self, ids: Tensor, mask: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their log probabilities, `[rows, max_new_tokens]`; what follows the stop token is arbitrary."""
        rows = ids.shape[0]
        cache = DynamicCache()
        tokens = torch.full((rows, self.max_new_tokens), self.pad_id, device=ids.device)
        logprobs = torch.zeros(rows, self.max_new_tokens, device=ids.device)
        running = torch.ones(rows, dtype=torch.bool, device=ids.device)
        for step in range(self.max_new_tokens):
            logits = self.model.logits(self.model.hidden(ids, mask, cache=cache)[:, -1])
            ids = _inverse_cdf(logits / self.temperature, draws[:, step])[:, None]
            tokens[:, step] = ids[:, 0]
            logprobs[:, step] = token_logprobs(logits, ids[:, 0], temperature=self.temperature)
            running &= ids[:, 0] != self.stop_token
            if not running.any():
                break
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        return tokens, logprobs

    def _count(self, response_ids: Int[Tensor, "batch time"]) -> tuple[Tensor, Tensor]:
        """The response mask, True up to and including the first stop token, and which rows have one."""
        is_stop = response_ids == self.stop_token
        stops_before = is_stop.long().cumsum(dim=1) - is_stop.long()
        return stops_before == 0, is_stop.any(dim=1)


def _uniform_draws(seeds: Sequence[int], num_steps: int) -> Float[Tensor, "rows steps"]:
    """Each row's own stream of uniform numbers: what a row samples never depends on the rows beside it."""
    streams = (torch.Generator().manual_seed(seed) for seed in seeds)
    return torch.stack([torch.rand(num_steps, generator=stream, dtype=torch.float64) for stream in streams])


def _draw_dtype(device: torch.device) -> torch.dtype:
    """Double precision, in which even a large vocabulary's sum is exact enough; Apple's GPUs have single alone."""
    return torch.float32 if device.type == "mps" else torch.float64


def _inverse_cdf(logits: Float[Tensor, "rows vocab"], draws: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """The token at which the cumulative distribution first exceeds the draw; never one of probability 0."""
    cumulative = logits.to(draws.dtype).softmax(dim=-1).cumsum(dim=-1)
    thresholds = (draws * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
