"""The running means of the prompts' scores: a baseline for single responses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from statistics import pvariance
from typing import Any

from kedge.algorithm.group_advantages import decayed_mean


class PromptMeans:
    """A running mean of the scores of each prompt, which starts from that of all scores.

    A prompt's first scores are added to 1/(1 − ρ) scores that equal the mean of all. Prompts are identified by their
    text.

    Args:
        decay: ρ, by which the weight of earlier scores decays in each update with the prompt.

    Source: SPO (arXiv 2509.13232), and its authors' recipe in verl. There ρ depends on how far the policy has moved
        since the prompt's last response, and the first mean is that of responses sampled before.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._all = [0.0, 0.0]  # a count and a mean, replaced at each change, since states that were taken share it
        self._known: dict[str, list[float]] = {}
        self._metrics: dict[str, float] = {}

    def baselines(self, prompts: Sequence[str]) -> list[float]:
        """The mean of each prompt's earlier scores, or of all earlier scores; 0 before the first ones."""
        return [self._known.get(_key(prompt), self._all)[1] for prompt in prompts]

    def add(self, prompts: Sequence[str], scores: Sequence[float]) -> None:
        """Add an update's scores."""
        left = [score - before for score, before in zip(scores, self.baselines(prompts), strict=True)]
        by_prompt = defaultdict[str, list[float]](list)
        for prompt, score in zip(prompts, scores, strict=True):
            by_prompt[_key(prompt)].append(score)
        known = sum(len(each) for key, each in by_prompt.items() if key in self._known)
        self._metrics = {
            "prompt/known": known / len(prompts),
            "prompt/variance_saved": 1.0 - pvariance(left) / spread if (spread := pvariance(scores)) else 0.0,
        }
        self._all = self._with(self._all, scores)
        start = [1.0 / (1.0 - self.decay), self._all[1]]
        for key, each in by_prompt.items():
            self._known[key] = self._with(self._known.get(key, start), each)

    def _with(self, known: Sequence[float], scores: Sequence[float]) -> list[float]:
        count, mean = known
        return [*decayed_mean(count, mean, scores, decay=self.decay)]

    def metrics(self) -> dict[str, float]:
        """The share of the last responses whose prompt had a mean, and of the variance of scores that means explain."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Counts and means."""
        return {"all": self._all, "known": self._known.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._all = state["all"]
        self._known = dict(state["known"])


def _key(prompt: str) -> str:
    return blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
