"""The engine whose responses come from vLLM servers."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.rollout.vllm.fleet import Fleet
from kedge.rollout.vllm.responses import GENERATE, SamplingSettings, read_answer, rollout_from

__all__ = ["VllmEngine"]


@dataclass(frozen=True)
class VllmEngine:
    """Samples on vLLM servers; see `Engine`.

    A row's tokens depend on its prompt, its seed and the weights, as with the built-in engine, but are other tokens:
    vLLM draws differently. Its log probabilities are those of its own kernels, so the trainer computes them again.

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
        """False: these are the kernels of another program."""
        return False

    def with_sampling(self, *, max_new_tokens: int, temperature: float, greedy: bool = False) -> VllmEngine:
        """The same servers with another length limit and temperature; see `Engine`."""
        settings = replace(self.settings, max_new_tokens=max_new_tokens, temperature=temperature, greedy=greedy)
        return replace(self, settings=settings)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        groups: Sequence[int] | None = None,
        policy_version: int = 0,
    ) -> Rollout:
        """Sample a response for every prompt; see `Engine`.

        Raises:
            EngineError: A server is gone for good, or gave an unusable answer.
        """
        assert len(prompts) == len(seeds), "one seed per prompt"
        assert "version" in self._state, "the weights are published before the first rollout"
        version, places = self._name(self._state["version"]), list(range(len(prompts)) if groups is None else groups)
        # The cache of prefixes is per version: a prompt that was read by other weights is read again.
        bodies = [
            self.settings.request(prompt, seed=seed, salt=version) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        answers = self.fleet.ask(GENERATE, bodies, places)
        return rollout_from(
            [read_answer(answer, self.settings, version=version) for answer in answers],
            prompts,
            self.settings,
            pad_id=self.pad_id,
            groups=groups,
            policy_version=policy_version,
            device=self.device,
        )

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """Send the weights to all servers; see `Engine`."""
        seconds = self.fleet.publish(tensors, self._name(version))
        self._state["version"] = version
        return {**seconds, **self.fleet.metrics()}

    def close(self) -> None:
        """End the servers; see `Engine`."""
        self.fleet.close()

    def _name(self, version: int) -> str:
        """The name of a version's weights: those of another run have other names, also on the same server."""
        return f"{self._run[:8]}-v{version}"
