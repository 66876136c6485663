"""The running means of the prompts' scores: a baseline for single responses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kedge.algorithm.group_advantages import decayed_mean


class PromptMeans:
    """A running mean of the scores of each prompt, which starts from that of all scores.

    A prompt's first scores are added to 1/(1 − ρ) scores that equal the mean of all. Prompts are known by their text.

    Args:
        decay: ρ, by which the weight of earlier scores decays in each update with the prompt.

    Source: SPO (arXiv 2509.13232) §3.1. There ρ depends on how far the policy has moved since the prompt's last
        response, and the first mean is that of eight responses sampled before.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._all = (0.0, 0.0)
        self._known: dict[str, tuple[float, float]] = {}
        self._metrics: dict[str, float] = {}

    def baselines(self, prompts: Sequence[str]) -> Float[Tensor, " batch"]:
        """The mean of each prompt's earlier scores, or of all earlier scores; 0 before the first ones."""
        return torch.tensor([self._known.get(_key(prompt), self._all)[1] for prompt in prompts])

    def add(self, prompts: Sequence[str], scores: Float[Tensor, " batch"]) -> None:
        """Add an update's scores."""
        plain, left = (float(each.double().var(correction=0)) for each in (scores, scores - self.baselines(prompts)))
        self._metrics = {
            "prompt/known": sum(_key(prompt) in self._known for prompt in prompts) / len(prompts),
            "prompt/variance_saved": 1.0 - left / plain if plain > 0 else 0.0,
        }
        by_prompt = defaultdict[str, list[float]](list)
        for prompt, score in zip(prompts, scores.tolist(), strict=True):
            by_prompt[_key(prompt)].append(score)
        self._all = decayed_mean(*self._all, scores.tolist(), decay=self.decay)
        start = (1.0 / (1.0 - self.decay), self._all[1])
        for key, each in by_prompt.items():
            self._known[key] = decayed_mean(*self._known.get(key, start), each, decay=self.decay)

    def metrics(self) -> dict[str, float]:
        """The share of the last responses whose prompt had a mean, and of the variance of scores that means explain."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Counts and means."""
        return {"all": list(self._all), "known": {key: list(mean) for key, mean in self._known.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._all = tuple(state["all"])
        self._known = {key: tuple(mean) for key, mean in state["known"].items()}


def _key(prompt: str) -> str:
    return blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
